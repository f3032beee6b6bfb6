"""Does the quickstart learn every time? Twenty runs: five bases built anew, four seeds each.

python scripts/bench/quickstart_runs.py OUT [--runs N]      N: make no more in all; 0 prints the table alone

The bases are built with other numbers of threads, and from starting weights in float32 or rounded to bfloat16: both
change the last bits of the warm-up's arithmetic. A run is right with a greedy reward of GOOD on held-out questions.
OUT/quickstart_runs.json is written after each run, and a table is printed; a second call goes on with the runs that are
missing. Those that were made here: scripts/bench/results.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASES = ((1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"))  # threads of the warm-up, starting weights
SEEDS = (1, 2, 3, 4)
GOOD = 0.92
BUILD = """
import sys, torch
from lightrft_visual.plugins.embedded import warmup
from lightrft_visual.plugins.embedded.resolve import resolve_checkpoint
from lightrft_visual.config.vl import ModelConfig

torch.set_num_threads(int(sys.argv[1]))
if sys.argv[2] == "bf16":
    fresh = warmup.build_tiny_checkpoint

    def rounded(folder, *arguments, **named):
        fresh(folder, *arguments, **named)
        from transformers import AutoModelForImageTextToText
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).float().save_pretrained(folder)

    warmup.build_tiny_checkpoint = rounded
print(resolve_checkpoint(ModelConfig(), "embedded", "embedded"))
"""


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=len(BASES) * len(SEEDS))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "quickstart_runs.json"
    done = json.loads(file.read_text())["runs"] if file.is_file() else []
    wanted = [(base, seed) for seed in SEEDS for base in range(len(BASES))][: chosen.runs]
    for base, seed in wanted:
        if any((each["base"], each["seed"]) == (base, seed) for each in done):
            continue
        done.append(one_run(chosen.out, base, seed))
        content = {"good": GOOD, "planned": len(BASES) * len(SEEDS), "machine": machine(), "runs": done}
        file.write_text(json.dumps(content, indent=1) + "\n")
    print(table(done))


def one_run(out: Path, base: int, seed: int) -> dict[str, Any]:
    """Build the base where it is missing, train on it, and read what the run wrote."""
    threads, rounding = BASES[base]
    environment = os.environ | {"LIGHTRFT_CACHE": str(out / f"cache_{base}"), "PYTHONPATH": str(ROOT)}
    built = environment | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-c", BUILD, str(threads), rounding], env=built, check=True)
    folder, began = out / f"base{base}_seed{seed}", time.monotonic()
    command = [sys.executable, str(ROOT / "examples" / "train_grpo_vl.py"), "--seed", str(seed), "--output_dir", folder]
    with open(out / f"{folder.name}.txt", "w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    return {
        "base": base, "threads": threads, "weights": rounding, "seed": seed, "exit_code": code,
        "seconds": round(time.monotonic() - began), **rewards(folder / "eval_metrics.csv"),
    }  # fmt: skip


def rewards(file: Path) -> dict[str, float | None]:
    """Greedy and sampled reward of the first and the last evaluation."""
    lines = list(csv.DictReader(file.open())) if file.is_file() else []
    names = {"greedy": "eval_reward_greedy", "sampled": "eval_reward"}
    found: dict[str, float | None] = {}
    for name, column in names.items():
        found[f"{name}_before"] = round(float(lines[0][column]), 4) if lines else None
        found[f"{name}_after"] = round(float(lines[-1][column]), 4) if len(lines) > 1 else None
    return found


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}


def table(done: list[dict[str, Any]]) -> str:
    """Markdown: a line a base, greedy rewards by seed."""
    good = sum((each["greedy_after"] or 0) >= GOOD for each in done)
    lines = [
        f"{len(done)} of {len(BASES) * len(SEEDS)} runs were made; {good} of them ended at {GOOD} greedy or above.",
        "",
        "| base: threads, starting weights | greedy before | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |",
        "|---|" + "---|" * (len(SEEDS) + 1),
    ]
    for base, (threads, rounding) in enumerate(BASES):
        own = {each["seed"]: each for each in done if each["base"] == base}
        before = next((f"{each['greedy_before']:.3f}" for each in own.values() if each["greedy_before"]), "–")
        after = [own[seed]["greedy_after"] if seed in own else None for seed in SEEDS]
        cells = [f"{value:.3f}" if value is not None else "–" for value in after]
        lines.append(f"| {threads}, {rounding} | {before} | {' | '.join(cells)} |")
    seconds = sorted(each["seconds"] for each in done)
    if seconds:
        middle = seconds[len(seconds) // 2]
        lines += ["", f"A run took {seconds[0]} to {seconds[-1]} seconds, in the middle {middle}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
