"""A run over several visits to a card: its scenes, its settings, how it is stopped and told of."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import run_alone
from PIL import Image
from scipy import ndimage
from waiting import polls

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import DIFFUSION_PRESET, VL_PRESET
from lightrft_visual.config.vl import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "gpu"))

import parts  # noqa: E402
import to_the_end  # noqa: E402


def test_scenes_show_as_many_shapes_as_their_answers_say_and_splits_differ(tmp_path):
    kinds: set[str] = set()
    for split in ("train", "test"):
        path = to_the_end.counting_split(tmp_path, split, 24)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            pixels = np.asarray(Image.open(tmp_path / row["images"][0]))
            _, _, colour, kind, *_ = row["prompt"].split()
            of_colour, found = ndimage.label((pixels == to_the_end.COLOURS[colour]).all(axis=2))
            shares = [  # of a shape's own box: a square fills it, a circle pi / 4 of it, a triangle half
                (of_colour[box] == index).mean() for index, box in enumerate(ndimage.find_objects(of_colour), start=1)
            ]
            named = ["square" if share > 0.95 else "circle" if share > 0.65 else "triangle" for share in shares]
            assert len(named) == found and f"{named.count(kind.rstrip('s'))}" == row["reference"], row
        kinds |= {row["reference"] for row in rows}
    assert {"0", "1", "2"} <= kinds
    train, test = ({each.read_bytes() for each in (tmp_path / name).glob("*.png")} for name in ("train", "test"))
    assert len(train) == len(test) == 24 and not train & test


@pytest.mark.parametrize(
    "schema,preset,flags",
    [(RunConfig, VL_PRESET, to_the_end.COUNTING), (DiffusionRunConfig, DIFFUSION_PRESET, to_the_end.OCR)],
)
def test_the_settings_of_a_real_run_are_ones_that_runs_take(schema, preset, flags):
    assert parse_run(schema, flags.split(), preset=preset).config.output.save_steps == 20


def test_a_run_that_outlasts_the_visit_is_asked_to_end(tmp_path):
    code = to_the_end.visit([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, 0.5)
    assert code != 0
    assert to_the_end.visit([sys.executable, "-c", "print('ended')"], tmp_path, 300) == 0
    assert (tmp_path / "visits.log").read_text().endswith("ended\n")


def test_a_visit_that_a_signal_ends_has_its_run_save_first(tmp_path, monkeypatch):
    """Else the run would stay on the card, or be killed without a checkpoint."""
    run = (
        "import pathlib, signal, sys, time; ready, saved = map(pathlib.Path, sys.argv[1:])\n"
        "signal.signal(signal.SIGINT, lambda *_: (saved.touch(), sys.exit(130)))\nready.touch()\ntime.sleep(100)"
    )
    ready, saved = tmp_path / "ready", tmp_path / "saved"

    def wait(process: subprocess.Popen, seconds: float, real=subprocess.Popen.wait) -> int:
        if seconds == 90:  # of the visit
            assert any(ready.exists() for _ in polls(60))
            sys.exit(128 + signal.SIGTERM)  # as the handler of parts.end_by_signals
        return real(process, seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(SystemExit, match="143"):
        to_the_end.visit([sys.executable, "-c", run, ready, saved], tmp_path, 90)
    assert saved.exists()


def test_a_report_adds_up_visits_and_takes_the_place_of_the_last_one(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("step\n1\n40\n")
    (tmp_path / "run" / "eval_metrics.csv").write_text("step,eval_reward\n0,0.25\n40,0.5\n")
    (tmp_path / "visits.json").write_text(json.dumps([{"seconds": 1800}, {"seconds": 5400}]))
    note = {"steps": 200, "price": 2.5, "model": "Random weights", "host": {"device": "a card", "torch": "2"}}
    text = to_the_end.report("ocr", tmp_path, note)
    assert "40 of 200 steps in 2 visit(s), 2.00 hours of the card with loading, 5.00 dollars at 2.5 an hour" in text
    assert "| 0 | 0.250 |\n| 40 | 0.500 |" in text
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    parts.into(page, "ocr", "Heading", "old\n")
    page.write_text(page.read_text() + "\nlater\n")
    parts.into(page, "ocr", "Heading", text)
    assert "old" not in page.read_text() and page.read_text().count(text) == 1 and "later" in page.read_text()


@pytest.mark.slow
def test_a_tiny_run_comes_to_its_end_and_is_told_of(tmp_path, monkeypatch, capsys, cache_root):
    def visit(command: list[str], folder: Path, seconds: float) -> int:
        assert command[:3] == [sys.executable, "-m", "lightrft_visual"]
        (folder / "command.py").write_text("from lightrft_visual.cli import main\n\nmain()\n")
        run_alone(folder / "command.py", *command[3:], limit=600)
        return 0

    monkeypatch.setattr(to_the_end, "visit", visit)
    argv = ["to_the_end.py", "counting", str(tmp_path), "--size", "tiny", "--steps", "1", "--minutes", "20",
            "--max_eval_samples", "8", "--report", "false", "--rollout_batch_size", "8", "--train_batch_size", "64",
            "--micro_rollout_batch_size", "64", "--micro_train_batch_size", "64"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", argv)
    assert to_the_end.main() == 0
    assert "1 of 1 steps in 1 visit(s)" in (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.endswith("done\n")
