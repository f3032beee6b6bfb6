"""The launchers as they behave once the package is installed, wherever it is imported from."""

from __future__ import annotations

import os
from distutils.core import run_setup
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path) -> str:
    """Write the metadata of an installed package with the entry points of setup.py; a PYTHONPATH that finds them."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        points = run_setup("setup.py", stop_after="init").entry_points
    finally:
        os.chdir(before)
    metadata = folder / "installed_for_tests-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed_for_tests\nVersion: 1\n")
    lines = [line for group, entries in points.items() for line in (f"[{group}]", *entries)]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
