"""What one model learns of answering and of drawing: each alone, both at once, in turns; equal samples of each kind.

    python scripts/bench/unified.py OUT [--split test] [--steps 240] [--seeds 42 1 2] [--runs drawings ...] [settings]

Trains the embedded Janus by GRPO and evaluates every run on both kinds of held-out prompts. Writes OUT/unified.md: for
each run the greedy share of right answers, the reward of drawn images and the gold judge's mean of them, before and
after, means over the seeds; and the share of its own run's gain that each kind has. A run that is there is not
repeated. Settings that the script does not know are passed on.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from lightrft_visual.plugins.unified.task import unified_task

ROOT = Path(__file__).resolve().parents[2]
MEASURED = {
    "greedy answers": "eval_reward_greedy_answer",
    "reward of drawings": "eval_reward_drawing",
    "gold of drawings": "eval_gold_drawing",
}
OWN = {"questions": "greedy answers", "drawings": "gold of drawings"}  # a run of one kind -> what it is to gain


@dataclass(frozen=True)
class Run:
    """kinds: of each batch or, in turns, of the run. homogeneous: an optimizer step for each kind, not one for both."""

    kinds: tuple[str, ...]
    mixing: str = "even"
    homogeneous: bool = False

    def flags(self, prompts: int, steps: int) -> dict[str, int | float | str]:
        """prompts: of each kind, in each of `steps` steps."""
        turns = len(self.kinds) if self.mixing == "turns" else 1
        size = prompts * len(self.kinds) // turns
        return {
            "prompt_mixing": self.mixing,
            "rollout_batch_size": size,
            "train_batch_size": size * 8 // (len(self.kinds) if self.homogeneous else 1),
            "homogeneous_batches": self.homogeneous,
            "max_steps": steps * turns,
        }


RUNS = {
    "drawings": Run(("drawings",)),
    "questions": Run(("questions",)),
    "both": Run(("drawings", "questions")),
    "both, a step each": Run(("drawings", "questions"), homogeneous=True),
    "in turns": Run(("drawings", "questions"), "turns"),
}


def train(name: str, seed: int, folder: Path, arguments: argparse.Namespace, further: list[str]) -> None:
    """One run."""
    task, run = unified_task(), RUNS[name]
    files = {"drawings": task.drawings(arguments.split), "questions": task.questions()}
    flags = run.flags(arguments.prompts, arguments.steps)
    flags["eval_steps"] = flags["max_steps"] // arguments.evaluations
    flags |= {
        "prompt_data": ",".join(str(files[kind]) for kind in run.kinds),
        "eval_data": task.held_out(arguments.split),
        "seed": seed,
        "output_dir": folder,
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, str(ROOT / "examples" / "train_unified.py"), *words, *further]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def measured(folder: Path) -> list[dict[str, float]]:
    """What is measured, at the first and at the last evaluation."""
    with open(folder / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(row[column]) for name, column in MEASURED.items()} for row in (rows[0], rows[-1])]


def table(runs: dict[str, dict[int, list[dict[str, float]]]]) -> str:
    """Rows of runs, columns of what is measured (before -> after, means of the seeds), and of shares of own gains."""
    head = [*MEASURED, *(f"share of {name}' own gain" for name in OWN if name in runs)]
    lines = [f"| trained on | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name, seeds in runs.items():
        cells = []
        for what in MEASURED:
            first, last = ([each[when][what] for each in seeds.values()] for when in (0, 1))
            cells.append(f"{mean(first):.3f} -> {mean(last):.3f}" + _range(last))
        for own, what in ((own, what) for own, what in OWN.items() if own in runs):
            cells.append(_share(runs[own], seeds, what))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range(values: list[float]) -> str:
    return f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""


def _share(own: dict[int, list[dict[str, float]]], seeds: dict[int, list[dict[str, float]]], what: str) -> str:
    """Of the own run's gain over the seeds that both have."""
    both = own.keys() & seeds.keys()
    gains = [sum(each[seed][1][what] - each[seed][0][what] for seed in both) for each in (seeds, own)]
    return f"{gains[0] / gains[1]:.0%}" if both else ""


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--evaluations", type=int, default=4)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    arguments, further = parser.parse_known_args()
    runs: dict[str, dict[int, list[dict[str, float]]]] = {}
    for seed in arguments.seeds:
        for name in arguments.runs:
            folder = arguments.out.resolve() / f"{name.replace(',', '').replace(' ', '_')}-{seed}"
            if not (folder / "checkpoint-final").exists():
                train(name, seed, folder, arguments, further)
            runs.setdefault(name, {})[seed] = measured(folder)
    text = table(runs)
    (arguments.out / "unified.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
