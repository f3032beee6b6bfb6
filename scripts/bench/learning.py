"""Table and curves of the runs that learning.sh made: python scripts/bench/learning.py FOLDER

FOLDER holds one folder a run, named ALGORITHM-SEED. Writes FOLDER/learning.md and FOLDER/learning.png.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from curves import mean_curve, spread
from omegaconf import OmegaConf

THRESHOLD = 0.8  # of the greedy reward; how many samples a run needs to get there
Run = dict[str, list[float]]  # columns of eval_metrics.csv, and `samples` trained on until each evaluation


def read(path: Path) -> Run:
    """The columns of one run's evaluations, the `samples` until each, and the `seconds` of all its steps."""
    with open(path / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    run = {name: [float(row[name]) for row in rows] for name in ("step", "eval_reward", "eval_reward_greedy")}
    rollout = OmegaConf.load(path / "config.resolved.yaml").rollout
    run["samples"] = [step * rollout.rollout_batch_size * rollout.n_samples_per_prompt for step in run["step"]]
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


def samples_to(run: Run) -> str:
    """Samples until the first evaluation whose greedy reward is at least THRESHOLD."""
    reached = [count for count, reward in zip(run["samples"], run["eval_reward_greedy"]) if reward >= THRESHOLD]
    return f"{reached[0]:.0f}" if reached else "not reached"


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown: sampled and greedy reward before and after, samples to the threshold, seconds of all steps."""
    lines = [
        f"| run | seeds | sampled before, after | greedy before, after | samples to greedy {THRESHOLD} | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in runs.items():
        cells = [
            f"{spread([run[column][0] for run in group])}, {spread([run[column][-1] for run in group])}"
            for column in ("eval_reward", "eval_reward_greedy")
        ]
        samples, seconds = ", ".join(map(samples_to, group)), ", ".join(f"{run['seconds'][0]:.0f}" for run in group)
        lines.append(f"| `{name}` | {len(group)} | {cells[0]} | {cells[1]} | {samples} | {seconds} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[Run]], output: Path) -> None:
    """Greedy and sampled curves side by side, the mean over seeds of each algorithm."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=110, sharey=True)
    for panel, column, title in zip(panels, ("eval_reward_greedy", "eval_reward"), ("greedy", "sampled")):
        for name, group in runs.items():
            curve = mean_curve([(run["samples"], run[column]) for run in group])
            panel.plot(*curve, "o-", markersize=3, linewidth=1, label=name)
        panel.set(xlabel="samples", title=f"held-out reward, {title}", ylim=(0, 1.02))
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
