"""What one model learns of answering and of drawing: each reward alone, both at once; equal samples of a kind a step.

    python scripts/bench/unified.py OUT [--steps 300] [--seed 42] [--runs drawings questions both] [further settings]

Trains the embedded Janus by GRPO and evaluates every run on both kinds of held-out rows. Writes OUT/unified.md: for
each run the greedy share of right answers, the reward of drawn images and the gold judge's mean of them, before and
after. A run that is there is not repeated. `--eval_split dev` and other settings are passed on.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

from lightrft_visual.embedded.unified import unified_task

ROOT = Path(__file__).resolve().parents[2]
FILES = {"drawings": "drawings_train.jsonl", "questions": "questions_train.jsonl", "both": "train.jsonl"}


def train(name: str, folder: Path, prompts: int, arguments: argparse.Namespace, further: list[str]) -> None:
    """One run. prompts: of each kind a step."""
    task = unified_task()
    count = prompts * (2 if name == "both" else 1)
    flags = {
        "prompt_data": task.folder / FILES[name],
        "eval_data": task.held_out("test"),
        "rollout_batch_size": count,
        "train_batch_size": count * 8,
        "max_steps": arguments.steps,
        "eval_steps": arguments.steps,
        "seed": arguments.seed,
        "output_dir": folder,
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, str(ROOT / "examples" / "train_unified.py"), *words, *further]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def measured(folder: Path) -> list[dict[str, float]]:
    """Greedy answers, reward of drawings and gold of drawings, at the first and at the last evaluation."""
    with open(folder / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {
            "answers": float(row["eval_reward_greedy_answer"]),
            "drawings": float(row["eval_reward_drawing"]),
            "gold": float(row["eval_gold_drawing"]),
        }
        for row in (rows[0], rows[-1])
    ]


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Rows of runs, columns of what is measured: before -> after."""
    lines = ["| trained on | greedy answers | reward of drawings | gold of drawings |", "|---|---|---|---|"]
    for name, (first, last) in runs.items():
        lines.append(f"| {name} | " + " | ".join(f"{first[key]:.2f} -> {last[key]:.2f}" for key in first) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--runs", nargs="+", choices=FILES, default=list(FILES))
    arguments, further = parser.parse_known_args()
    runs = {}
    for name in arguments.runs:
        folder = arguments.out.resolve() / name
        if not (folder / "checkpoint-final").exists():
            train(name, folder, arguments.prompts, arguments, further)
        runs[name] = measured(folder)
    text = table(runs)
    (arguments.out / "unified.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
