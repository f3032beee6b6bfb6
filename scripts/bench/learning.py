"""Table and curves of the runs that learning.sh made: python scripts/bench/learning.py FOLDER

FOLDER holds one folder a run, named ALGORITHM-SEED. Writes FOLDER/learning.md and FOLDER/learning.png.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

THRESHOLD = 0.8  # of the greedy reward; how many samples a run needs to get there
Run = dict[str, list[float]]  # columns of eval_metrics.csv


def read(path: Path) -> Run:
    """The columns of one run's evaluations, and the `seconds` of all its steps."""
    with open(path / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    run = {name: [float(row[name]) for row in rows] for name in ("step", "eval_reward", "eval_reward_greedy")}
    with open(path / "metrics.csv", newline="") as file:
        run["seconds"] = [sum(float(row["time_step"]) for row in csv.DictReader(file))]
    return run


def read_all(folder: Path) -> dict[str, list[Run]]:
    """Finished runs by algorithm, in the order in which they were made."""
    found = sorted(folder.glob("*-*/checkpoint-final"), key=lambda path: path.stat().st_mtime)
    runs: dict[str, list[Run]] = defaultdict(list)
    for path in found:
        runs[path.parent.name.rsplit("-", 1)[0]].append(read(path.parent))
    return runs


def spread(values: list[float]) -> str:
    """Mean and standard deviation over runs."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def steps_to(run: Run) -> str:
    """The first evaluation whose greedy reward is at least THRESHOLD."""
    reached = [step for step, reward in zip(run["step"], run["eval_reward_greedy"]) if reward >= THRESHOLD]
    return f"{reached[0]:.0f}" if reached else "not reached"


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown: sampled and greedy reward before and after, steps to the threshold, seconds of all steps."""
    lines = [
        f"| run | seeds | sampled before, after | greedy before, after | steps to greedy {THRESHOLD} | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in runs.items():
        cells = [
            f"{spread([run[column][0] for run in group])}, {spread([run[column][-1] for run in group])}"
            for column in ("eval_reward", "eval_reward_greedy")
        ]
        steps, seconds = ", ".join(map(steps_to, group)), ", ".join(f"{run['seconds'][0]:.0f}" for run in group)
        lines.append(f"| `{name}` | {len(group)} | {cells[0]} | {cells[1]} | {steps} | {seconds} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[Run]], output: Path) -> None:
    """Greedy and sampled curves side by side, the mean over seeds of each algorithm."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=110, sharey=True)
    for panel, column, title in zip(panels, ("eval_reward_greedy", "eval_reward"), ("greedy", "sampled")):
        for name, group in runs.items():
            length = min(len(run["step"]) for run in group)
            means = [mean(run[column][place] for run in group) for place in range(length)]
            panel.plot(group[0]["step"][:length], means, "o-", markersize=3, linewidth=1, label=name)
        panel.set(xlabel="step", title=f"held-out reward, {title}", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


def main() -> None:
    folder = Path(sys.argv[1])
    runs = read_all(folder)
    if not runs:
        sys.exit(f"{folder}: no finished run")
    text = table(runs)
    (folder / "learning.md").write_text(text)
    draw(runs, folder / "learning.png")
    print(text)


if __name__ == "__main__":
    main()
