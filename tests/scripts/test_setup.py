"""What scripts/setup.sh does to an environment that an earlier version was installed into."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = "[torch.backends]\nlightrft_visual = lightrft_visual_launchers:attend\n"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A site-packages folder as 0.1.0 left it: module, bytecode, entry point."""
    metadata = tmp_path / "lightrft_visual-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightrft_visual\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(HOOK)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "lightrft_visual_launchers.cpython-311.pyc").touch()
    (tmp_path / "lightrft_visual_launchers.py").write_text("def attend(): pass\n")
    (tmp_path / "lightrft_visual.py").touch()
    return tmp_path


def clean(folder: Path) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "remove_old_hook.py"), str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def groups(folder: Path) -> set[str]:
    return {point.group for found in distributions(path=[str(folder)]) for point in found.entry_points}


def test_an_old_hook_is_removed_with_its_entry_point(old: Path) -> None:
    assert groups(old) == {"torch.backends"}
    assert "removed the hook" in clean(old)
    assert not groups(old) and not list(old.rglob("*launchers*")) and (old / "lightrft_visual.py").exists()
    assert clean(old) == ""


def test_an_old_hook_leaves_other_entry_points(old: Path) -> None:
    path = old / "lightrft_visual-0.1.0.dist-info" / "entry_points.txt"
    path.write_text(f"{HOOK}[console_scripts]\nlightrft-Visual = lightrft_visual.cli:main\n")
    clean(old)
    (point,) = next(iter(distributions(path=[str(old)]))).entry_points
    assert (point.group, point.name, point.value) == ("console_scripts", "lightrft-Visual", "lightrft_visual.cli:main")


def test_setup_removes_the_hook_and_runs_again_after_a_change_of_what_does_so() -> None:
    text = (ROOT / "scripts" / "setup.sh").read_text()
    (stamped,) = [line for line in text.splitlines() if line.startswith("files=(")]
    assert "\n.venv/bin/python scripts/remove_old_hook.py\n" in text and "scripts/remove_old_hook.py" in stamped
