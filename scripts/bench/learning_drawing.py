"""Table and curves of the runs that learning_drawing.sh made: python scripts/bench/learning_drawing.py FOLDER

FOLDER holds one folder a run, named ALGORITHM-SEED. Writes FOLDER/learning_drawing.md and FOLDER/learning_drawing.png.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from curves import mean_curve, spread
from omegaconf import OmegaConf

HALF = 0.5  # of the gap between the start's gold and 1: how many samples a run needs to close so much of it
AIMS = {"diffusion_dpo_offline": 1 / 3}  # share of the gap that a run is asked to close, where it is not half
KEPT = 0.8  # of the start's diversity that a run is asked to keep
BASELINE = "flow_grpo"  # whose final gold the others are asked to reach
SOONER = ("diffusion_nft", "awm")  # asked to reach it with half of its samples, diversity kept


@dataclass
class Run:
    """Evaluations of one run: images trained on until each, gold, diversity and reward; seconds of all its steps."""

    samples: list[float]
    gold: list[float]
    diversity: list[float]
    reward: list[float]
    seconds: float

    @property
    def closed(self) -> float:
        """Share of the gap to 1 that gold has closed at the end."""
        return (self.gold[-1] - self.gold[0]) / (1 - self.gold[0])

    @property
    def kept(self) -> float:
        """Diversity at the end over that of the start."""
        return self.diversity[-1] / self.diversity[0]

    def reaching(self, gold: float) -> int | None:
        """Index of the first evaluation that reaches this gold; None where none does."""
        return next((index for index, value in enumerate(self.gold) if value >= gold), None)


def read(folder: Path) -> Run:
    """One run of the folder's metrics and configuration."""
    with open(folder / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(folder / "metrics.csv", newline="") as file:
        seconds = sum(float(row["time_step"]) for row in csv.DictReader(file))
    sampling = OmegaConf.load(folder / "config.resolved.yaml").sampling
    each = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    columns = ([float(row[name]) for row in rows] for name in ("eval_gold", "eval_diversity", "eval_reward"))
    return Run([float(row["step"]) * each for row in rows], *columns, seconds)


def read_all(folder: Path) -> dict[str, list[Run]]:
    """Finished runs by algorithm, in the order in which they were made."""
    found = sorted(folder.glob("*-*/checkpoint-final"), key=lambda path: path.stat().st_mtime)
    runs: dict[str, list[Run]] = defaultdict(list)
    for path in found:
        runs[path.parent.name.rsplit("-", 1)[0]].append(read(path.parent))
    return runs


def counts(runs: list[Run], golds: list[float]) -> str:
    """Samples of each run until its gold, and the diversity there."""
    cells = []
    for run, gold in zip(runs, golds):
        index = run.reaching(gold)
        there = "" if index is None else f"{run.samples[index]:.0f} ({run.diversity[index] / run.diversity[0]:.0%})"
        cells.append(there or "not reached")
    return ", ".join(cells)


def missed(name: str, runs: list[Run], baseline: list[Run]) -> list[str]:
    """What a run was asked for and has not reached, by the means of its seeds."""
    found, aim = [], AIMS.get(name, HALF)
    closed, kept = mean(run.closed for run in runs), mean(run.kept for run in runs)
    if closed < aim:
        found.append(f"gold: {closed:.0%} of {aim:.0%}")
    if kept < KEPT:
        found.append(f"diversity: {kept:.0%} of {KEPT:.0%}")
    if baseline and name in SOONER:
        gold, most = mean(run.gold[-1] for run in baseline), mean(run.samples[-1] for run in baseline) / 2
        for run in runs:
            index = run.reaching(gold)
            if index is None or run.samples[index] > most or run.diversity[index] < KEPT * run.diversity[0]:
                found.append(f"{BASELINE}'s gold with {most:.0f} samples")
                break
    return found


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown; see the titles of its columns."""
    baseline = runs.get(BASELINE, [])
    aim = mean(run.gold[-1] for run in baseline) if baseline else None
    titles = ["run", "seeds", "samples of each", "gold before, after", "share of its gap", "diversity, of the start's"]
    titles += [
        "reward before, after",
        f"samples to {HALF:.0%} of the gap (diversity there)",
        f"samples to {BASELINE}'s final gold (diversity there)",
        "seconds",
        "missed",
    ]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, group in runs.items():
        halfway = [run.gold[0] + HALF * (1 - run.gold[0]) for run in group]
        cells = [
            f"`{name}`",
            str(len(group)),
            ", ".join(f"{run.samples[-1]:.0f}" for run in group),  # means of other ends are no mean of one run
            f"{spread([run.gold[0] for run in group])}, {spread([run.gold[-1] for run in group])}",
            spread([run.closed for run in group]),
            spread([run.kept for run in group]),
            f"{spread([run.reward[0] for run in group])}, {spread([run.reward[-1] for run in group])}",
            counts(group, halfway),
            "–" if aim is None else counts(group, [aim] * len(group)),
            ", ".join(f"{run.seconds:.0f}" for run in group),
            "; ".join(missed(name, group, baseline)) or "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[Run]], output: Path) -> None:
    """Gold and diversity over samples, the mean over seeds of each algorithm."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=110)
    for panel, column in zip(panels, ("gold", "diversity")):
        for name, group in runs.items():
            curve = mean_curve([(run.samples, getattr(run, column)) for run in group])
            panel.plot(*curve, "o-", markersize=3, linewidth=1, label=name)
        panel.set(xlabel="samples", title=f"held-out captions: {column}")
        panel.grid(alpha=0.3)
    panels[0].set_ylim(0, 1.02)
    panels[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


def main() -> None:
    folder = Path(sys.argv[1])
    runs = read_all(folder)
    if not runs:
        sys.exit(f"{folder}: no finished run")
    text = table(runs)
    (folder / "learning_drawing.md").write_text(text)
    draw(runs, folder / "learning_drawing.png")
    print(text)


if __name__ == "__main__":
    main()
