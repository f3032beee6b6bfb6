"""A GRPO step beside TRL 1.16: the same embedded model, prompts and machine, runs alternating. Prints markdown tables.

    python scripts/bench/against_trl.py [--learn] [--rounds N] [--steps N] [--ours FLAGS]

Seconds of a step by default: 3 rounds of 10 steps after a warm-up of 3, of each of --cases (prompts x samples x tokens
@ image size / micro-batch). --learn: the training reward against the number of samples, on the embedded questions with
one image: 3 rounds, each with another seed, of 160 steps with 32 x 8 samples; --further: flags of a second run of our
side for each seed, which TRL has nothing like (empty: none).

TRL, pinned, gets an environment of its own (--env) that shares this one's torch, vLLM and transformers, so that both
sides run on the same libraries; what TRL needs to run there is said in trl_side.py. OMP_NUM_THREADS: default 2.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from itertools import pairwise
from pathlib import Path
from typing import Any

from learning import deviation

from lightrft_visual.runtime.files import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3  # steps, as in step_time.py
WINDOW, WANTED, SAMPLES = 10, 0.8, 256  # steps of a mean; the reward whose samples are counted; samples of a step


def other_python(env: Path) -> str:
    """TRL's environment, made where it is missing: the packages of this one, and TRL."""
    python = env / "bin" / "python"
    if not python.exists():
        venv.create(env, with_pip=True)
        packages = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        own, its = (subprocess.check_output([each, "-c", packages], text=True) for each in (sys.executable, python))
        Path(its.strip(), "project.pth").write_text(own)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "trl==1.16.0"], check=True)
    return str(python)


def image_rows(source: Path, folder: Path, size: int, count: int) -> Path:
    """The first rows with one image, which is resized to size x size."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row.get("images") or []) == 1][:count]
    for number, row in enumerate(rows):
        Image.open(source.parent / row["images"][0]).convert("RGB").resize((size, size)).save(folder / f"{number}.png")
        row["images"] = [f"{number}.png"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def samples_to(rewards: list[float], samples: int) -> int | None:
    """Samples drawn until the mean of the last WINDOW steps was WANTED for the first time."""
    for step in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[step - WINDOW : step]) >= WANTED:
            return step * samples
    return None


def learning_table(folder: Path, samples: int, further: str = "") -> None:
    """Of the runs in a folder; further: the flags of our second side."""
    own = {side: sorted(folder.glob(f"{side}-*/metrics.jsonl")) for side in ("ours", "further")}
    ours, other = ([[row["reward_mean"] for row in read_jsonl(path)] for path in own[side]] for side in own)
    found = [json.loads(path.read_text())["steps"] for path in sorted(folder.glob("trl-*.json"))]
    theirs = [[step["reward"] for step in steps] for steps in found]
    sides = {"ours": ours, "TRL": theirs} | ({f"ours with {further}": other} if other else {})
    heads = " | ".join(f"reward, {name} ({len(runs)} seeds)" for name, runs in sides.items())
    print(f"| samples | {heads} |\n|---{'|---' * len(sides)}|")
    # Lines hold every run, or their means would be of others.
    steps = min(len(run) for runs in sides.values() for run in runs)
    for start in [*range(0, steps - WINDOW, 2 * WINDOW), steps - WINDOW]:
        cells = [deviation([statistics.mean(run[start : start + WINDOW]) for run in side]) for side in sides.values()]
        print(f"| {start * samples} to {(start + WINDOW) * samples} | {' | '.join(cells)} |")
    reached = [", ".join(str(samples_to(run, samples)) for run in side) for side in sides.values()]
    print(f"| until {WANTED} over {WINDOW} steps | {' | '.join(reached)} |")


class Comparison:
    """Runs of both sides, in processes of their own."""

    def __init__(self, asked: argparse.Namespace, work: Path):
        from lightrft_visual.plugins.embedded.warmup import WarmUp, embedded_checkpoint, embedded_task

        self.asked, self.work, self.ours = asked, work, asked.ours.split()
        self.theirs = other_python(asked.env)
        self.model = str(embedded_checkpoint(WarmUp()))
        self.data = Path(embedded_task().train)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "50000"}
        self.environment.setdefault("OMP_NUM_THREADS", "2")

    def run(self, python: str, *words: Any) -> None:
        command = [python, *map(str, words)]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdout=sys.stderr)

    def trl(self, rows: Path, out: Path, *words: Any) -> None:
        self.run(self.theirs, "scripts/bench/trl_side.py", self.model, rows, out, *words, *self.asked.theirs.split())

    def questions(self, steps: int) -> tuple[Path, list[str]]:
        """Rows, and the settings of our run on them."""
        rows = image_rows(self.data, self.work / "rows", 56, 10_000)
        settings = "--config examples/configs/embedded_vl.yaml --reward.components.exact 1.0 --max_eval_samples 0"
        words = ["--pretrain", self.model, "--prompt_data", str(rows), "--max_steps", str(steps), "--eval_steps", "0"]
        return rows, [*settings.split(), *words, *self.ours]

    def learn(self, rounds: int, steps: int) -> None:
        rows, settings = self.questions(steps)
        sides = {"ours": []} | ({"further": self.asked.further.split()} if self.asked.further else {})
        for seed in range(self.asked.first, self.asked.first + rounds):
            for side, more in sides.items():
                out = self.work / f"{side}-{seed}"
                own = [*settings, "--seed", seed, "--output_dir", out, *more]
                self.run(sys.executable, "examples/train_grpo_vl.py", *own)
            self.trl(rows, self.work / f"trl-{seed}.json", "--steps", steps, "--seed", seed)
        learning_table(self.work, SAMPLES, self.asked.further)

    def time(self, rounds: int, steps: int) -> None:
        print("| case | ours | TRL 1.16 | ratio | our sync | weight load of TRL |\n|---|---|---|---|---|---|")
        for case in self.asked.cases:
            prompts, samples, tokens, size, micro = map(int, case.replace("@", "x").replace("/", "x").split("x"))
            rows, own, theirs = image_rows(self.data, self.work / str(size), size, 128), [], []
            for _ in range(rounds):
                flags = (
                    f"--pretrain {self.model} --prompt_data {rows} --rollout_batch_size {prompts} "
                    f"--n_samples_per_prompt {samples} --generate_max_len {tokens} "
                    f"--min_new_tokens {tokens} --prompt_max_len 512 "
                    f"--train_batch_size {prompts * samples} --micro_rollout_batch_size {micro} "
                    f"--micro_train_batch_size {micro} --init_kl_coef 0 --actor_learning_rate 1e-6"
                )
                out = self.work / "seconds.json"
                script = ("scripts/bench/step_time.py", "vl", "--steps", steps, "--json", out)
                self.run(sys.executable, *script, *flags.split(), *self.ours)
                own.append(json.loads(out.read_text())["medians"])
                timed = ("--steps", steps + WARM_UP, "--timed", prompts, samples, tokens, micro)
                self.trl(rows, out, *timed)
                found = json.loads(out.read_text())
                seconds = [end - start for start, end in pairwise(found["ends"][WARM_UP - 1 :])]
                theirs.append((statistics.median(seconds), statistics.median(found["weights"][WARM_UP:] or [0.0])))
            step, sync = (statistics.median(each[name] for each in own) for name in ("step", "sync"))
            other, load = map(statistics.median, zip(*theirs))
            print(f"| {case} | {step:.2f} s | {other:.2f} s | {step / other:.2f} | {sync:.3f} s | {load:.3f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--first", type=int, default=1, help="seed of --learn")
    parser.add_argument("--cases", nargs="+", default=["8x8x32@56/64", "4x16x64@448/16"])
    compiled = "--engine_enforce_eager false"  # as TRL has vLLM do
    parser.add_argument("--ours", default=compiled, help="further flags for our side; default: %(default)s")
    parser.add_argument("--theirs", default="", help="--theirs=--transformers: TRL generates by transformers, not vLLM")
    parser.add_argument("--further", default="--selective_replay 512")
    parser.add_argument("--env", type=Path, default=ROOT / "outputs" / "bench" / "trl")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        both = Comparison(asked, Path(work))
        if asked.learn:
            both.learn(asked.rounds, asked.steps or 160)
        else:
            both.time(asked.rounds, asked.steps or 10)


if __name__ == "__main__":
    main()
