"""Tables and curves of the learning benchmarks: runs of other lengths are compared at equal samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import curves  # noqa: E402
import learning  # noqa: E402
import learning_drawing  # noqa: E402
import trl_learn_table  # noqa: E402

RUN = "rollout: {rollout_batch_size: 8, n_samples_per_prompt: 4}\nsampling: ${rollout}\n"
COLUMNS = ("eval_reward", "eval_reward_greedy", "eval_gold", "eval_diversity")


def write_run(folder: Path, points: dict[int, float], samples_a_step: str = RUN) -> None:
    """A finished run whose evaluations, in every column, are these by step."""
    (folder / "checkpoint-final").mkdir(parents=True)
    rows = [",".join([str(step), *[str(value)] * len(COLUMNS)]) for step, value in points.items()]
    (folder / "eval_metrics.csv").write_text("\n".join([",".join(["step", *COLUMNS]), *rows]) + "\n")
    (folder / "metrics.csv").write_text("step,time_step\n" + "".join(f"{step},1\n" for step in range(1, max(points))))
    (folder / "config.resolved.yaml").write_text(samples_a_step)


def test_curves_are_averaged_at_equal_samples_and_end_with_the_shortest_run():
    long, short = ([0, 20, 40, 60], [0.0, 0.2, 0.4, 0.6]), ([0, 20, 30], [0.0, 0.4, 0.6])
    samples, means = curves.mean_curve([long, short])
    assert samples == [0, 20, 30]
    assert means == pytest.approx([0.0, 0.3, (0.3 + 0.6) / 2])
    assert curves.mean_curve([long]) == (long[0], pytest.approx(long[1]))


@pytest.mark.parametrize("script", [learning, learning_drawing])
def test_the_picture_shows_that_mean_over_samples(script, tmp_path, monkeypatch):
    write_run(tmp_path / "grpo-1", {0: 0.1, 20: 0.5, 40: 0.9})
    write_run(tmp_path / "grpo-2", {0: 0.1, 20: 0.5, 30: 0.9})
    drawn = []
    monkeypatch.setattr(script.plt.Axes, "plot", lambda axes, *line, **_: drawn.append(line[:2]))
    monkeypatch.setattr(script.plt.Axes, "legend", lambda axes, **_: None)
    script.draw(script.read_all(tmp_path), tmp_path / "curves.png")
    assert drawn == [([0, 640, 960], pytest.approx([0.1, 0.5, 0.8]))] * 2


def test_the_table_counts_samples_to_the_threshold(tmp_path):
    write_run(tmp_path / "grpo-1", {0: 0.1, 20: 0.85, 40: 0.9})
    write_run(tmp_path / "grpo-2", {0: 0.1, 20: 0.5, 40: 0.6})
    row = learning.table(learning.read_all(tmp_path)).splitlines()[-1]
    assert "| 640, not reached |" in row


def test_the_table_of_drawings_says_where_each_run_ends(tmp_path):
    write_run(tmp_path / "awm-1", {0: 0.1, 20: 0.5, 40: 0.9})
    write_run(tmp_path / "awm-2", {0: 0.1, 20: 0.5, 30: 0.9})
    assert "| `awm` | 2 | 1280, 960 |" in learning_drawing.table(learning_drawing.read_all(tmp_path))


def test_the_table_beside_trl_has_no_row_that_one_run_lacks(tmp_path, capsys):
    (tmp_path / "trl-1.json").write_text('{"rewards": %s}' % ([0.5] * 30))
    for name, steps in (("ours-1", 40), ("ours-2", 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("reward_mean\n" + "0.9\n" * steps)
    trl_learn_table.main(tmp_path, 10)
    shown = capsys.readouterr().out
    assert "| 200 to 300 | 0.900 ± 0.000 | 0.500 |" in shown and "300 to 400" not in shown
    (tmp_path / "further-1").mkdir()
    (tmp_path / "further-1" / "metrics.csv").write_text("reward_mean\n" + "0.8\n" * 30)
    trl_learn_table.main(tmp_path, 10, "--more 1")
    shown = capsys.readouterr().out
    assert (
        "reward, ours with --more 1 (1 seeds) |" in shown and "| 200 to 300 | 0.900 ± 0.000 | 0.500 | 0.800 |" in shown
    )
    assert "| until 0.8 over 10 steps | 100, 100 | None | 100 |" in shown
