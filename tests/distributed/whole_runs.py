"""Starts whole runs and reads what they wrote."""

import contextlib
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
from forked import free_port, run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests" / "distributed" / "run_many.py"
LIMIT = 840.0  # seconds of one launch; a busy machine takes many times what an idle one does
EXAMPLE = ROOT / "examples" / "train_grpo_vl.py"

# A step of 8 prompts x 4 samples on the embedded task; every rollout is kept, so that runs can be compared. A constant
# rate: half a run then is the first half of the whole one.
SMALL = (
    "--rollout_batch_size 8 --n_samples_per_prompt 4 --micro_rollout_batch_size 8 --train_batch_size 32 "
    "--micro_train_batch_size 8 --max_eval_samples 0 --num_trajectories_to_save 32 --report false "
    "--save_steps -1 --eval_steps -1 --lr_scheduler constant_with_warmup"
).split()


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LIGHTRFT_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def launcher(script: Path, arguments: list[str], ranks: int) -> list[str]:
    """The command line of a run; `sys.executable -m` would hide the launcher that users call."""
    program = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    return [program, "--num_gpus", str(ranks), "--master_port", str(free_port()), str(script), *arguments]


def start(script: Path, arguments: list[str], cache: Path, ranks: int = 1) -> subprocess.Popen:
    command, pipe = launcher(script, arguments, ranks), subprocess.PIPE
    return subprocess.Popen(command, env=environment(cache), cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    """The process and everything it started."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: subprocess.Popen) -> None:
    for each in tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def run_plan(
    runs: dict[str, list[str]], folder: Path, cache: Path, ranks: int = 1, timeout: float = LIMIT, driver: Path = DRIVER
) -> Path:
    """All runs in one launch, each into its own folder of `folder`, which is returned.

    The first word of a run's list may be "copy:NAME" or "copy:NAME@STEP": it then starts in a copy of that run's
    folder, or of what that was when it had saved the step, with no checkpoint behind it.
    """
    plan = []
    for name, argv in runs.items():
        kind, _, other = argv[0].partition(":")
        copied, _, step = other.partition("@") if kind == "copy" else ("", "", "")
        plan.append(
            {
                "argv": argv[1:] if copied else argv, "folder": str(folder / name),
                "copy_of": str(folder / copied) if copied else None, "step": int(step) if step else None,
            }
        )  # fmt: skip
    path = folder / f"plan_{ranks}.json"
    path.write_text(json.dumps(plan))
    run_on_ranks(driver, [str(path)], environment(cache), ranks, timeout)
    return folder


def rows(folder: Path, name: str = "metrics.csv") -> list[dict[str, float]]:
    """Rows of a metrics file without times, empty cells left out. Fails where the run failed."""
    failed = folder / "failed.txt"
    assert not failed.exists(), failed.read_text()
    with open(folder / name, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    times = [key for key in (found[0] if found else ()) if key.startswith("time_") or key == "reward/time"]
    return [{key: float(value) for key, value in row.items() if value != "" and key not in times} for row in found]


def rollouts(folder: Path) -> list[list[dict]]:
    """The records of each step's rollouts, by sample."""
    steps = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in steps]


def weights(folder: Path) -> str:
    """Their hash: what differs in megabytes is nothing to print."""
    return hashlib.sha256((folder / "checkpoint-final" / "model.safetensors").read_bytes()).hexdigest()
