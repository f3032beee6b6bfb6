"""Tables and curves of the learning benchmarks: runs of other lengths are compared at equal samples."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import against_trl  # noqa: E402
import learning  # noqa: E402

RUN = "rollout: {rollout_batch_size: 8, n_samples_per_prompt: 4}\nsampling: ${rollout}\n"
COLUMNS = ("eval_reward", "eval_reward_greedy", "eval_gold", "eval_diversity")
UNIFIED = ("eval_reward_greedy_answer", "eval_reward_drawing", "eval_gold_drawing")


def write_run(folder: Path, points: dict[int, float]) -> None:
    """A finished run whose evaluations, in every column, are these by step."""
    (folder / "checkpoint-final").mkdir(parents=True)
    names = [*COLUMNS, *UNIFIED]
    rows = [",".join([str(step), *[str(value)] * len(names)]) for step, value in points.items()]
    (folder / "eval_metrics.csv").write_text("\n".join([",".join(["step", *names]), *rows]) + "\n")
    (folder / "metrics.csv").write_text("step,time_step\n" + "".join(f"{step},1\n" for step in range(1, max(points))))
    (folder / "config.resolved.yaml").write_text(RUN)


@pytest.mark.parametrize("kind", learning.KINDS.values())
def test_the_picture_shows_the_mean_at_equal_samples_until_the_shortest_run_ends(kind, tmp_path, monkeypatch):
    write_run(tmp_path / "grpo-1", {0: 0.1, 20: 0.5, 40: 0.9})
    write_run(tmp_path / "grpo-2", {0: 0.1, 20: 0.5, 30: 0.9})
    drawn = []
    monkeypatch.setattr(learning.plt.Axes, "plot", lambda axes, *line, **_: drawn.append(line[:2]))
    monkeypatch.setattr(learning.plt.Axes, "legend", lambda axes, **_: None)
    runs = learning.finished(kind, tmp_path)
    learning.draw(kind, runs, tmp_path / "curves.png")
    assert drawn == [([0, 640, 960], pytest.approx([0.1, 0.5, 0.8]))] * 2
    title, _, line = learning.table(kind, runs).splitlines()
    assert title.count("|") == line.count("|") and "| `grpo` | 2 | " in line and "0.100 ± 0.000, 0.900 ± 0.000" in line


def test_the_tables_count_samples_to_the_thresholds(tmp_path):
    write_run(tmp_path / "grpo-1", {0: 0.1, 20: 0.85, 40: 0.9})
    write_run(tmp_path / "grpo-2", {0: 0.1, 20: 0.5, 40: 0.4})
    answers, drawings = (
        learning.table(kind, learning.finished(kind, tmp_path)).splitlines()[-1]
        for kind in (learning.KINDS["answers"], learning.KINDS["drawings"])
    )
    assert "| 640, not reached |" in answers
    assert "| 1280, 1280 |" in drawings and "| 640 (850%), not reached |" in drawings


def test_the_table_beside_trl_has_no_row_that_one_run_lacks(tmp_path, capsys):
    (tmp_path / "trl-1.json").write_text(json.dumps({"steps": [{"reward": 0.5}] * 30}))
    for name, steps, reward in (("ours-1", 40, 0.9), ("ours-2", 30, 0.9), ("further-1", 30, 0.8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"reward_mean": {reward}}}\n' * steps)
    against_trl.learning_table(tmp_path, 10, "--more 1")
    shown = capsys.readouterr().out
    assert "reward, ours with --more 1 (1 seeds) |" in shown and "300 to 400" not in shown
    assert "| 200 to 300 | 0.900 ± 0.000 | 0.500 | 0.800 |" in shown
    assert "| until 0.8 over 10 steps | 100, 100 | None | 100 |" in shown
