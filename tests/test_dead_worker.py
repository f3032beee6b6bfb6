"""A test process that dies costs one failed test; the others are run and the whole ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DIES_ONCE = """
import os
from pathlib import Path

import pytest

def test_dies(flag=Path(__file__).parent / "died"):
    if not flag.exists():
        flag.write_text("")
        os._exit(143)

def test_follows():
    pass
"""


@pytest.mark.slow
def test_the_other_tests_run_after_a_worker_died_and_the_fast_loop_leaves_out_folders_of_whole_runs(tmp_path):
    for name in ("conftest.py", "blocked.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text("def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    (tmp_path / "test_l.py").write_text(DIES_ONCE)
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "test_f.py").write_text("def test_of_a_whole_run():\n    raise AssertionError\n")
    command = [sys.executable, *"-m pytest -q -p no:cacheprovider -n 2 --dist loadfile -m".split(), "not slow", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and "1 failed, 12 passed" in done.stdout, done.stdout + done.stderr
