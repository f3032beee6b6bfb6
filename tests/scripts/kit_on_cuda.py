"""Run by one process: every command line of the GPU kit, at its real size, as a host with one H100 would take it.

    python kit_on_cuda.py FOLDER OUTPUT.json

The parts themselves make their commands; what would run them notes them instead, and shapes are written without
weights. Then an example script plans the largest run of each part, and vLLM checks each engine, CUDA claimed.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "gpu"), str(ROOT / "tests" / "rollout")]

import claimed_cuda  # noqa: E402
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
CARD = "--plan_device h100-80gb --plan_world_size 1 --auto_micro_batches false --dry_run".split()
LARGEST = {"packing": "padded", "sleep": "engine_awake"}  # runs; of other parts the first one is


class Noted:
    """Takes the place of a run: notes its command line; all its numbers are 1."""

    commands: dict[str, list[str]] = {}
    peak = "1 GiB"
    measured = {"flops": 1.0, "again": 0.0, "computed_tokens": 1.0, "busy_seconds": 1.0}

    def __init__(self, script: str, folder: Path, flags: str, ranks: int = 1):
        self.commands[f"{folder.name} {len(self.commands)}"] = [script, *flags.split()]
        self.steps = [{"loss": 1.0}]

    def median(self, name: str, skip: int = 1) -> float:
        return 1.0

    def phases(self) -> str:
        return ""


def planned(script: str, words: list[str], folder: Path) -> str:
    """What the example script shows under --dry_run on the card, and its exit code."""
    sys.argv = [script, *words, "--output_dir", str(folder), *CARD]
    shown, code = io.StringIO(), None
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    lines = [line for line in shown.getvalue().splitlines() if "fit" in line or "rror" in line or "no plan" in line]
    return f"{code}: {lines[-1] if lines else shown.getvalue()[-500:]}"


def engine(words: list[str]) -> str:
    """'ok', or what vLLM says about the engine of a command."""
    config = parse_run(RunConfig, words).config
    checkpoint = open_checkpoint(config.model.pretrain, ModelConfig(), DataConfig())
    try:
        checked(engine_arguments(VLLMSettings.from_config(config, checkpoint), on_cpu=False))
    except ConfigError as error:
        return str(error)
    return "ok"


def main(folder: Path, out: Path) -> None:
    prepare_environment("float32")
    parts.Run = Noted
    results: dict[str, dict] = {}
    for name, (part, _) in parts.PARTS.items():
        before = set(Noted.commands)
        with shapes.without_weights():
            rows = list(part(folder, "real"))
        results[name] = {"rows": len(rows), "runs": {each: {} for each in Noted.commands if each not in before}}
    for part, each in results.items():
        name = next(name for name in each["runs"] if name.startswith(LARGEST.get(part, "")))
        script, *words = Noted.commands[name]
        if part != "engines":  # checkpointing `auto` is `full` where nothing else fits, and takes several plans
            words = ["full" if word == "auto" else word for word in words]
        each["plan"] = planned(script, words, folder / "planned")
    runs = {name: run for each in results.values() for name, run in each["runs"].items()}
    claimed_cuda.claim_cuda(str(folder / "models" / "tiny_qwen2"))
    for name, run in runs.items():
        script, *words = Noted.commands[name]
        if script == "train_grpo_vl.py":
            run["engine"] = engine(words)
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
