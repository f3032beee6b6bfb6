"""What scripts/trace_step.py counts: by a small package whose numbers are known, and by a whole run."""

import importlib.util
import json
import runpy
import sys
import threading
from pathlib import Path

import pytest
from forked import run_alone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "trace_step.py"

LOOP = """
import threading
from small_loss import Trainer

class Kept:
    number = 0

def fit():
    for step in range(3):
        before(step)
        threading.Thread(target=lambda: update()).run()
        after()

def before(step):
    worker = threading.Thread(target=in_thread)
    worker.start()
    worker.join()

def after():
    class Local:
        number = [each for each in range(2)]

def in_thread():
    return sum(each for each in range(2))

def update():
    return Trainer().loss()

def never():
    return 0
"""
LOSS = """
class Trainer:
    def loss(self):
        return helped()

def helped():
    return loss()

def loss():
    return 0
"""


@pytest.fixture
def module(monkeypatch):
    spec = importlib.util.spec_from_file_location("trace_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_tracer_counts_functions_and_frames_between_two_calls_in_all_threads(module, tmp_path, monkeypatch):
    package, script = tmp_path / "package", tmp_path / "script.py"
    package.mkdir()
    for name, code in (("small_loop", LOOP), ("small_loss", LOSS)):
        (package / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    script.write_text("import small_loop\n\nsmall_loop.fit()\n")
    monkeypatch.syspath_prepend(package)
    tracer, before = module.StepTracer("Trainer.loss", script, package), (sys.getprofile(), threading.getprofile())
    tracer.install()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    # The loss, its helper, the function of the same name; after, before, in_thread, the lambda and update.
    # `fit` was called before, `never` is not, and the third call comes too late.
    assert tracer.files == {"small_loop.py": 5, "small_loss.py": 3} and tracer.calls == 2
    # The script, fit, the lambda, update, loss; not Thread.run of the standard library.
    assert tracer.frames == 5


def test_table_of_a_whole_run_has_the_step_of_the_trainer(module, tmp_path, monkeypatch, capsys):
    run_alone(SCRIPT, "--case", "grpo_hf", "--inside", tmp_path, limit=300)
    found = json.loads((tmp_path / "result.json").read_text())
    monkeypatch.setattr(module, "trace", lambda name: found)
    monkeypatch.setattr(sys, "argv", ["trace_step.py", "--case", "grpo_hf", "--list"])
    module.main()
    head, row, *listed = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["case", "files", "functions", "frames"]
    name, files, functions, frames = row[0], *map(int, row[1:])
    assert name == "grpo_hf" and 2 < frames <= 9
    counts = {file: int(count) for count, file in listed}
    assert len(counts) == files and sum(counts.values()) == functions
    assert {"algorithms", "rollout", "models", "rewards", "trainer"} <= {file.split("/")[0] for file in counts}
