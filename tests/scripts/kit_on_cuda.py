"""Run by one process: every command line of the GPU kit, at its real size, as a host with H100s would take it.

    python kit_on_cuda.py FOLDER OUTPUT.json

The parts themselves make their commands; what would run them notes them instead, and shapes are written without
weights. Then an example script plans the largest run of each part, of those of several ranks each run, and vLLM checks
each engine, CUDA claimed.
"""

import contextlib
import io
import json
import math
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "gpu"), str(ROOT / "tests" / "rollout")]
os.environ["GPU_CHECK_RANKS"] = "8"

import claimed_cuda  # noqa: E402
import node  # noqa: E402
import parts  # noqa: E402
import shapes  # noqa: E402

from lightrft_visual.config.load import parse_run  # noqa: E402
from lightrft_visual.config.vl import DataConfig, ModelConfig, RunConfig  # noqa: E402
from lightrft_visual.errors import ConfigError  # noqa: E402
from lightrft_visual.models.loading import open_checkpoint  # noqa: E402
from lightrft_visual.rollout.vllm.arguments import (  # noqa: E402
    VLLMSettings,
    checked,
    engine_arguments,
    prepare_environment,
)

# A run takes larger micro-batches where they fit: what must fit are those that it is given.
CARD = "--plan_device h100-80gb --auto_micro_batches false --dry_run --plan_world_size".split()
PHASE = r"^# (\w+) +[\d.]+ +[\d.]+ +([\d.]+)$"  # of a plan, and its seconds
OTHERS = ("bandwidth", "killed_rank")  # parts of several ranks that are no run to its end
LARGEST = {"packing": "padded", "sleep": "engine_awake"}  # runs; of other parts the first one is


METRICS = ("loss", "grad_norm", "reward_mean", "time_step", "time_save")


class Noted:
    """Takes the place of a run: notes its command line; all its numbers are 1."""

    commands: dict[str, list[str]] = {}
    ranks: dict[str, int] = {}
    peak = "1 GiB"
    measured = {"flops": 1.0, "again": 0.0, "computed_tokens": 1.0, "busy_seconds": 1.0}

    def __init__(self, script: str, folder: Path, flags: str, ranks: int = 1):
        name = f"{folder.name} {len(self.commands)}"
        self.commands[name], self.ranks[name] = [script, *flags.split()], ranks
        self.steps, self.folder = [dict.fromkeys(METRICS, 1.0)], folder
        (folder / "checkpoint-1").mkdir(parents=True, exist_ok=True)

    def median(self, name: str, skip: int = 1) -> float:
        return 1.0

    def phases(self) -> str:
        return ""


def planned(name: str, folder: Path) -> tuple[str, float]:
    """What the example script shows of a run under --dry_run on the card, with its exit code; seconds of its steps."""
    script, *words = Noted.commands[name]
    if not name.startswith("vllm_"):  # checkpointing `auto` is `full` where nothing else fits, and takes several plans
        words = ["full" if word == "auto" else word for word in words]
    sys.argv = [script, *words, "--output_dir", str(folder), *CARD, str(Noted.ranks[name])]
    shown, code = io.StringIO(), None
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    text = shown.getvalue()
    lines = [line for line in text.splitlines() if "fit" in line or "rror" in line or "no plan" in line]
    steps, phases = int(words[words.index("--max_steps") + 1]), re.findall(PHASE, text, re.M)
    times = {"load": 1, "resume": int("--resume_from" in words), "export": 1}  # others are of a step
    seconds = sum(float(took) * times.get(phase, steps) for phase, took in phases)
    return f"{code}: {lines[-1] if lines else text[-500:]}", seconds


def engine(words: list[str]) -> str:
    """'ok', or what vLLM says about the engine of a command."""
    config = parse_run(RunConfig, words).config
    checkpoint = open_checkpoint(config.model.pretrain, ModelConfig(), DataConfig())
    try:
        checked(engine_arguments(VLLMSettings.from_config(config, checkpoint), on_cpu=False))
    except ConfigError as error:
        return str(error)
    return "ok"


def noted(part: Callable, folder: Path) -> dict:
    """The rows of a part, and names of its runs."""
    before = set(Noted.commands)
    with shapes.without_weights():
        rows = list(part(folder, "real"))
    return {"rows": len(rows), "runs": {each: {} for each in Noted.commands if each not in before}}


def main(folder: Path, out: Path) -> None:
    prepare_environment("float32")
    parts.Run, parts.ROOMY = Noted, math.inf
    results = {name: noted(part, folder) for name, (part, _) in parts.PARTS.items()}
    for part, each in results.items():
        largest = next(run for run in each["runs"] if run.startswith(LARGEST.get(part, "")))
        each["plans"] = [planned(largest, folder / "planned")]
    for name, (part, _) in node.PARTS.items():
        if name not in OTHERS:
            results[f"node {name}"] = found = noted(part, folder)
            found["plans"] = [planned(run, folder / "planned") for run in found["runs"]]
    runs = {name: run for each in results.values() for name, run in each["runs"].items()}
    claimed_cuda.claim_cuda(str(folder / "models" / "tiny_qwen2"))
    for name, run in runs.items():
        script, *words = Noted.commands[name]
        if script == "train_grpo_vl.py":
            run["engine"] = engine(words)
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
