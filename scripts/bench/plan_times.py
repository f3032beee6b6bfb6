"""The plan's seconds of each phase against measured ones: of one H100 (docs/benchmarks.md), and of runs on this host.

    OMP_NUM_THREADS=1 python scripts/bench/plan_times.py [--only h100|host] [--json FILE]

The H100's rows are written down here with the settings and the lengths of their runs; nothing is run for them, and
their models are configurations without weights. On this host three runs are made, of one thread, and their phases are
timed by the processor's clock, which other programs on the machine disturb less. A factor is planned by measured.
Rows marked 'calibrates' gave a number of plugins/memory_plan/times.py; the others check it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu"), str(ROOT / "scripts" / "bench")]
CARD = "h100-80gb"
LEAST = 0.02  # seconds of a phase, below which it is not compared
PROMPT = 282  # tokens: 256 of the image of 448 x 448, and the question
VL = (
    f"--n_samples_per_prompt 8 --rollout_batch_size 16 --train_batch_size 128 --generate_max_len 256 --prompt_max_len "
    f"{PROMPT} --limit_mm_image_per_prompt 1 --gradient_checkpointing true --bf16 true --lora_rank 32 "
    "--engine_mem_util 0.25 --engine_enforce_eager true --engine_type vllm"
)
DRAWN = (
    "--n_samples_per_prompt 4 --guidance_scale 1 --lora_rank 32 --max_sequence_length 5 --bf16 true "
    "--gradient_checkpointing true --height 512 --width 512 --num_steps 10 --rollout_batch_size 4 "
    "--train_batch_size 16 --micro_train_batch_size 4"
)
FILM = (
    "--n_samples_per_prompt 1 --guidance_scale 1 --lora_rank 32 --max_sequence_length 5 --bf16 true "
    "--gradient_checkpointing true --height 256 --width 448 --num_frames 17 --num_steps 8 --mid_timestep 6 "
    "--final_timestep 7 --rollout_batch_size 2 --micro_rollout_batch_size 1 --train_batch_size 2 "
    "--micro_train_batch_size 1 --diffusion_algorithm reward_fl"
)


class Row(NamedTuple):
    """Seconds by phase; those of `calibrates` gave a number. said: what else ran, or how the code differed."""

    name: str
    model: str
    settings: str
    measured: dict[str, float]
    calibrates: tuple[str, ...] = ()
    said: str = ""


# The first rows' code started more operations than today's (docs/benchmarks.md as of the visit): 18,450 and 42,510
# views a padded micro-batch, today 16,030 and 35,930.
ROWS = (
    Row("GRPO 3B, padded, micro-batches of 4", "vl",
        f"{VL} --micro_train_batch_size 4 --micro_rollout_batch_size 8 --share_prefix false",
        {"generate": 10.8, "score": 6.1, "train": 50.0}, ("generate", "train"), "1.17 times as many operations"),
    Row("GRPO 3B, prompts once, micro-batches of 32", "vl",
        f"{VL} --micro_train_batch_size 32 --micro_rollout_batch_size 32",
        {"generate": 13.6, "score": 7.8, "train": 15.7, "sync": 0.8}, ("sync",),
        "its first step; two runs beside it; attention once a sample"),
    Row("Flow-GRPO SD3.5 medium", "sd3", f"{DRAWN} --micro_rollout_batch_size 8",
        {"generate": 3.6, "train": 17.2}, (), "one run beside it"),
    Row("the same, 1 step a forward", "sd3", f"{DRAWN} --micro_rollout_batch_size 8", {"train": 20.6}, (),
        "two runs beside it"),
    Row("the same, 5 steps a forward", "sd3", f"{DRAWN} --micro_rollout_batch_size 8 --steps_per_forward 5",
        {"train": 6.9}, ("train",), "two runs beside it"),
    Row("Reward FL Wan 1.3B", "wan", FILM, {"train": 4.5}),
)  # fmt: skip


def shaped(kind: str, folder: Path) -> Path:
    """A folder with the configurations of a model of the GPU kit, without weights."""
    import shapes

    from lightrft_visual.models.tiny.vlm import build_tokenizer

    model = folder / kind
    if kind == "vl":
        shapes.qwen_3b(build_tokenizer(shapes.TEXTS)).save_pretrained(model)
        return model
    with shapes.without_weights():
        return (shapes.stable_diffusion_3 if kind == "sd3" else shapes.wan)(model, "real")


def planned(kind: str, arguments: list[str], device: str) -> dict[str, float]:
    """Seconds by phase."""
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import parse_run
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.plugins.memory_plan.check import named_device, plan_of

    words = [*arguments, "--plan_device", device, "--plan_world_size", "1"]
    config = parse_run(RunConfig if kind == "vl" else DiffusionRunConfig, words).config
    return {phase.name: phase.seconds for phase in plan_of(config, *named_device(config.plan)).phases}


def of_the_card() -> Iterator[tuple[Row, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        models = {kind: shaped(kind, Path(folder)) for kind in ("vl", "sd3", "wan")}
        for row in ROWS:
            yield row, planned(row.model, ["--pretrain", str(models[row.model]), *row.settings.split()], CARD)


HOST_FLAGS = "--report false --save_trajectories false --max_eval_samples 0 --max_steps 4 --save_steps -1".split()
HOST = {
    "embedded GRPO, engine hf": ("vl",
        "--rollout_batch_size 8 --n_samples_per_prompt 8 --micro_rollout_batch_size 64 --generate_max_len 32 "
        "--min_new_tokens 32 --train_batch_size 64 --micro_train_batch_size 64 --engine_type hf"),
    "VLM of 100 million weights, engine hf": ("vl", "10 2,4,24"),
    "embedded Flow-GRPO": ("sd3",
        "--diffusion_algorithm flow_grpo --rollout_batch_size 8 --n_samples_per_prompt 8 --num_steps 10 "
        "--train_batch_size 64"),
    "VLM of 110 million weights, engine hf": ("vl", "12 4,4,64"),
}  # fmt: skip
PHASES = {"generate": "generate", "reward": "score", "forward": "score", "train": "train", "sync": "sync"}


def run_here(name: str, folder: Path) -> dict[str, Any]:
    """One run of this host: its measured and planned seconds by phase."""
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.spellings import DIFFUSION_PRESET
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.plugins.memory_plan.check import plan_of
    from lightrft_visual.plugins.memory_plan.process import cpu
    from lightrft_visual.trainer.diffusion import build as drawing
    from lightrft_visual.trainer.vl import build as seeing
    from lightrft_visual.trainer.vl.trainer import build_trainer

    kind, settings = HOST[name]
    vl, words = kind == "vl", settings.split()
    if name.startswith("VLM"):
        from plan_vs_measured import vision_language

        layers, numbers = words
        words = vision_language(folder, 1024, int(layers), tuple(map(int, numbers.split(","))))
        words += "--engine_type hf --init_kl_coef 0.01".split()
    words += [*HOST_FLAGS, "--output_dir", str(folder / "run")]
    config = load_config(RunConfig, words) if vl else load_config(DiffusionRunConfig, words, preset=DIFFUSION_PRESET)
    for module in (drawing, seeing):
        module.PhaseTimer = partial(module.PhaseTimer, clock=time.process_time)
    trainer = (build_trainer if vl else drawing.build_diffusion_trainer)(config)
    trainer.fit()
    with open(folder / "run" / "metrics.csv", newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))[1:]
    measured: dict[str, float] = {}
    for phase, planned_as in PHASES.items():
        seconds = statistics.median(float(step.get(f"time_{phase}") or 0) for step in steps)
        measured[planned_as] = measured.get(planned_as, 0.0) + seconds
    if vl:  # prompts as long as they were, where the settings allow more
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        tokens = statistics.median(float(step["tokens"]) for step in steps) / samples
        config.rollout.prompt_max_len = round(tokens - config.rollout.generate_max_len)
    found = {phase.name: phase.seconds for phase in plan_of(config, cpu(1), 1, 1).phases}
    return {"measured": measured, "planned": found}


def of_this_host() -> Iterator[tuple[Row, dict[str, float]]]:
    """Each run in a process of its own."""
    for name in HOST:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", name, folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(Path(folder, "found.json").read_text())
        measured = {phase: seconds for phase, seconds in found["measured"].items() if seconds >= LEAST}
        calibrates = tuple(measured) if name in list(HOST)[:2] else ()
        yield Row(name, "", "", measured, calibrates), found["planned"]


def table(found: list[tuple[Row, dict[str, float]]]) -> str:
    lines = ["| run | phase | measured s | planned s | factor | |", "|---|---|---|---|---|---|"]
    for row, seconds in found:
        for phase, measured in row.measured.items():
            notes = ["calibrates"] * (phase in row.calibrates) + [row.said] * bool(row.said)
            lines.append(
                f"| {row.name} | {phase} | {measured:.3g} | {seconds[phase]:.3g} | {seconds[phase] / measured:.2f} | "
                f"{'; '.join(notes)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("h100", "host"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, folder = arguments.child
        Path(folder, "found.json").write_text(json.dumps(run_here(name, Path(folder))))
        os._exit(0)
    sources = {"h100": of_the_card, "host": of_this_host}
    found = [each for kind, rows in sources.items() if arguments.only in (None, kind) for each in rows()]
    print(table(found))
    if arguments.json:
        text = json.dumps([row._asdict() | {"planned": seconds} for row, seconds in found], indent=1)
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
