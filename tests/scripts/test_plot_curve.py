"""scripts/plot_curve.py draws runs, and says in one line what it cannot draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plot_curve.py"
METRICS, EVALUATIONS = "step,reward_mean\n1,0.25\n2,0.5\n", "step,eval_reward\n0,0.2\n2,\n4,0.6\n"


def draw(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text(METRICS)
    (tmp_path / "run" / "eval_metrics.csv").write_text(EVALUATIONS)
    return tmp_path / "run"


def test_a_run_is_drawn(run: Path) -> None:
    done = draw(run.parent, "run", "-o", "curve.png")
    assert (done.returncode, done.stdout.strip()) == (0, "curve.png"), done.stderr
    assert Image.open(run.parent / "curve.png").size[0] > 100


def test_greedy_rewards_are_drawn_where_there_are_some(run: Path) -> None:
    def picture() -> bytes:
        draw(run.parent, "run", "-o", "curve.png")
        return Image.open(run.parent / "curve.png").tobytes()

    without = picture()
    (run / "eval_metrics.csv").write_text("step,eval_reward,eval_reward_greedy\n0,0.2,0.3\n4,0.6,0.9\n")
    assert picture() != without


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.csv", None, "run/metrics.csv: no such file; a folder that a run wrote has it"),
        ("metrics.csv", "step,loss\n1,2\n", "run/metrics.csv: no column reward_mean; it has: step, loss"),
        ("eval_metrics.csv", "", "run/eval_metrics.csv: no column step; it has: nothing"),
        ("metrics.csv", "step,reward_mean\n1,much\n", "run/metrics.csv: a row without numbers: could not convert"),
    ],
)
def test_what_cannot_be_drawn_is_named(run: Path, name: str, text: str | None, message: str) -> None:
    (run / name).unlink() if text is None else (run / name).write_text(text)
    done = draw(run.parent, "run")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"error: {message}" in done.stderr
    assert not (run.parent / "curve.png").exists()


def test_a_folder_that_is_not_there_and_a_place_that_cannot_be_written(run: Path) -> None:
    assert "error: gone/metrics.csv: no such file" in draw(run.parent, "gone").stderr
    done = draw(run.parent, "run", "-o", "missing/curve.png")
    assert done.returncode == 2 and "error: missing/curve.png: No such file or directory" in done.stderr
