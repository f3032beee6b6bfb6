"""`trl_learn_table.py FOLDER SAMPLES [FLAG ...]`: the sides of `against_trl.sh --learn` as one markdown table.

SAMPLES: of a step; the flags: of our second side."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

from curves import spread

WINDOW, WANTED = 10, 0.8  # steps of a mean; the reward whose samples are counted


def samples_to(rewards: list[float], samples: int) -> int | None:
    """Samples drawn until the mean of the last WINDOW steps was WANTED for the first time."""
    for step in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[step - WINDOW : step]) >= WANTED:
            return step * samples
    return None


def main(folder: Path, samples: int, further: str = "") -> None:
    ours, other = [rewards_of(sorted(folder.glob(f"{name}-*/metrics.csv"))) for name in ("ours", "further")]
    theirs = [json.loads(path.read_text())["rewards"] for path in sorted(folder.glob("trl-*.json"))]
    sides = {"ours": ours, "TRL": theirs} | ({f"ours with {further}": other} if other else {})
    heads = " | ".join(f"reward, {name} ({len(runs)} seeds)" for name, runs in sides.items())
    print(f"| samples | {heads} |\n|---{'|---' * len(sides)}|")
    steps = min(
        len(run) for runs in sides.values() for run in runs
    )  # rows hold every run, or their means would be of others
    for start in [*range(0, steps - WINDOW, 2 * WINDOW), steps - WINDOW]:
        cells = [spread([statistics.mean(run[start : start + WINDOW]) for run in side]) for side in sides.values()]
        print(f"| {start * samples} to {(start + WINDOW) * samples} | {' | '.join(cells)} |")
    reached = [", ".join(str(samples_to(run, samples)) for run in side) for side in sides.values()]
    print(f"| until {WANTED} over {WINDOW} steps | {' | '.join(reached)} |")


def rewards_of(paths: list[Path]) -> list[list[float]]:
    found = []
    for path in paths:
        with open(path, newline="") as file:
            found.append([float(row["reward_mean"]) for row in csv.DictReader(file)])
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), " ".join(sys.argv[3:]))
