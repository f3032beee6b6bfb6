"""Draw the learning curve of one or several runs: python scripts/plot_curve.py RUN_DIR [RUN_DIR …] -o curve.png

Thin line: reward of each step's rollouts; points: held-out reward, round ones sampled at the
training temperature, square ones greedy (where the run has them). With --by_kind, for a run of a model
that sees and draws: answers and drawings apart, triangles are gold's.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Unreadable(Exception):
    """A file that holds no curve; the text names it."""


def column(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column, rows without a value left out. Raises Unreadable."""
    if not path.is_file():
        raise Unreadable(f"{path}: no such file; a folder that a run wrote has it")
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        for wanted in ("step", name):
            if wanted not in header:
                raise Unreadable(f"{path}: no column {wanted}; it has: {', '.join(header) or 'nothing'}")
        try:
            rows = [(int(row["step"]), float(row[name])) for row in reader if row.get(name)]
        except ValueError as error:
            raise Unreadable(f"{path}: a row without numbers: {error}") from error
    return [step for step, _ in rows], [value for _, value in rows]


def has_greedy(path: Path) -> bool:
    """Whether a run measured the likeliest answers too; one that draws images has none."""
    with open(path, newline="") as file:
        return "eval_reward_greedy" in (csv.DictReader(file).fieldnames or [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("curve.png"))
    parser.add_argument("--by_kind", action="store_true", help="answers and drawings apart; of one run")
    arguments = parser.parse_args()
    if arguments.by_kind and len(arguments.runs) > 1:
        parser.error("--by_kind draws one run")
    try:
        if arguments.by_kind:
            draw_kinds(arguments.runs[0], arguments.output)
        else:
            draw(arguments.runs, arguments.output)
    except Unreadable as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(arguments.output)


def draw(runs: list[Path], output: Path) -> None:
    """Write the picture. Raises Unreadable for a run without figures, OSError for files that cannot be used."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), dpi=110)
    for run in runs:
        steps, rewards = column(run / "metrics.csv", "reward_mean")
        line = axes.plot(steps, rewards, linewidth=0.9, alpha=0.75, label=f"{run.name}: rollouts")[0]
        steps, rewards = column(run / "eval_metrics.csv", "eval_reward")
        colour = line.get_color()
        axes.plot(steps, rewards, "o--", color=colour, markersize=6, label=f"{run.name}: held-out, sampled")
        if has_greedy(run / "eval_metrics.csv"):
            steps, rewards = column(run / "eval_metrics.csv", "eval_reward_greedy")
            axes.plot(steps, rewards, "s:", color=colour, markersize=5, label=f"{run.name}: held-out, greedy")
    save(figure, axes, output)


def draw_kinds(run: Path, output: Path) -> None:
    """As `draw`, of one run of a model that sees and draws."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), dpi=110)
    for kind, colour in (("answer", "tab:blue"), ("drawing", "tab:orange")):
        curves = [
            ("metrics.csv", f"reward_{kind}_mean", {"linewidth": 0.9, "alpha": 0.6}, "rollouts"),
            ("eval_metrics.csv", f"eval_reward_{kind}", {"marker": "o", "linestyle": "--"}, "held out, sampled"),
            ("eval_metrics.csv", f"eval_reward_greedy_{kind}", {"marker": "s", "linestyle": ":"}, "held out, greedy"),
        ]
        if kind == "drawing":
            curves.append(("eval_metrics.csv", "eval_gold_drawing", {"marker": "^", "linestyle": "-."}, "gold"))
        for file, name, style, told in curves:
            axes.plot(*column(run / file, name), color=colour, markersize=5, label=f"{kind}s: {told}", **style)
    save(figure, axes, output)


def save(figure: plt.Figure, axes: plt.Axes, output: Path) -> None:
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()
