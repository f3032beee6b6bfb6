"""The plan of a run against what it takes: memory and seconds of each phase.

    OMP_NUM_THREADS=1 python scripts/bench/plan_vs_measured.py [--shapes vlm_100m ...] [--limit 0.15]
    python scripts/bench/plan_vs_measured.py --card

On this host every shape runs in a process of its own: libraries are imported and the resident memory is noted (the
baseline, which the plan calls 'Python and its libraries'); then four steps are trained, and the process's resident
memory is read every ten milliseconds with the phase that it is in. glibc is told to give freed memory back, as it would
else keep some for later. Seconds are of the processor, which other programs on the machine disturb less, the first step
left out. Exit code 1 where a shape's largest phase is off by more than the limit.

--card: the rows of cards (docs/benchmarks.md) are written down here with the settings and the lengths of their runs;
nothing is run for them, and their models are configurations without weights. A factor is planned by measured. Phases
marked 'calibrates' gave a number of plugins/memory_plan/times.py; the others check it. `peak` is in GiB, of PyTorch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu")]
MIB = 2**20
LEAST = 0.02  # seconds of a phase, below which it is not compared
PHASES = {
    "load": "load", "generate": "generate", "reward": "score", "forward": "score", "train": "train", "sync": "sync",
    "save": "export",
}  # fmt: skip
SHORT = "--report false --save_trajectories false --max_eval_samples 0 --max_steps 4 --save_steps -1".split()


def vision_language(folder: Path) -> list[str]:
    """Settings of a run of a VLM with random weights."""
    from shapes import TEXTS, questions

    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    model = build_tiny_checkpoint(folder / "model", "qwen2_5_vl", texts=TEXTS, hidden=1024, layers=10)
    return (
        f"--pretrain {model} --prompt_data {questions(folder / 'data', 4, 112)} --prompt_max_len 42 "
        f"--generate_max_len 24 --min_new_tokens 24 --max_pixels {112 * 112} --limit_mm_image_per_prompt 1 "
        "--limit_mm_video_per_prompt 0 "
        "--init_kl_coef 0.01 --train_batch_size 8 --rollout_batch_size 2 --n_samples_per_prompt 4 "
        "--micro_train_batch_size 8 --micro_rollout_batch_size 8 --parity_every 0 --engine_type hf"
    ).split()


def drawing(folder: Path) -> list[str]:
    """Settings of a run of an SD3 with random weights, all of which train."""
    from lightrft_visual.models.diffusion.opening import save_text_length
    from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline

    model = folder / "model"
    build_pipeline(TinyDiffusionSettings(layers=4, heads=12, head_dim=64)).save_pretrained(model)
    save_text_length(model, TEXT_LENGTH)
    (folder / "prompts.jsonl").write_text('{"prompt": "a red circle"}\n' * 8)
    return [
        *f"--pretrain {model} --prompt_data {folder}/prompts.jsonl --lora_rank 0 --reward_recipe".split(),
        '{"*": [["rule", "shape_match", 1.0]]}',
        *"--height 32 --width 32 --num_steps 3 --rollout_batch_size 2 --n_samples_per_prompt 4".split(),
        *"--train_batch_size 8 --micro_train_batch_size 8 --micro_rollout_batch_size 8 --beta 0.01".split(),
    ]


EMBEDDED = (
    "--engine_type hf --rollout_batch_size 8 --n_samples_per_prompt 8 --micro_rollout_batch_size 64 "
    "--generate_max_len 32 --min_new_tokens 32 --train_batch_size 64 --micro_train_batch_size 64"
).split()
EMBEDDED_DRAWING = (
    "--diffusion_algorithm flow_grpo --rollout_batch_size 8 --n_samples_per_prompt 8 --num_steps 10 "
    "--train_batch_size 64"
).split()
SHAPES = {
    "vlm_100m": vision_language,
    "sd3_90m": drawing,
    "embedded_vlm": lambda folder: EMBEDDED,
    "embedded_sd3": lambda folder: EMBEDDED_DRAWING,
}
CALIBRATE = ("embedded_vlm", "vlm_100m")


class Sampler(threading.Thread):
    """Reads this process's resident memory; the largest value of each phase is in `peaks`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = {}
        self.phase = lambda: "load"
        self.going = True

    def run(self) -> None:
        while self.going:
            phase = PHASES.get(self.phase() or "")
            if phase:
                self.peaks[phase] = max(self.peaks.get(phase, 0), resident())
            time.sleep(0.01)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prepared(shape: str, folder: Path) -> tuple[Any, Any]:
    """(configuration, what builds its trainer) of a shape, with the libraries that it needs imported."""
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    words = [*SHAPES[shape](folder), *SHORT, "--output_dir", str(folder / "run")]
    import deepspeed  # noqa: F401
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.spellings import DIFFUSION_PRESET
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.trainer import start
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    start.PhaseTimer = partial(start.PhaseTimer, clock=time.process_time)
    if "sd3" in shape:
        preset = DIFFUSION_PRESET if shape.startswith("embedded") else None
        return load_config(DiffusionRunConfig, words, preset=preset), build_diffusion_trainer
    return load_config(RunConfig, words), build_trainer


def seconds_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians by the plan's phases."""
    found: dict[str, float] = {}
    for phase, planned_as in PHASES.items():
        seconds = statistics.median(step.get(f"time_{phase}", 0.0) for step in steps)
        found[planned_as] = found.get(planned_as, 0.0) + seconds
    return {phase: seconds for phase, seconds in found.items() if seconds >= LEAST}


def child(shape: str, folder: Path) -> dict[str, Any]:
    """One run: its plan, the largest resident memory and the seconds of each phase."""
    from lightrft_visual.plugins.memory_plan.check import Planner
    from lightrft_visual.plugins.memory_plan.process import cpu
    from lightrft_visual.runtime.files import read_jsonl

    config, build = prepared(shape, folder)
    plan = Planner(cpu(1), 1, 1).plan(config)
    baseline, sampler = resident(), Sampler()
    sampler.start()
    trainer = build(config)
    sampler.phase = lambda: trainer.timer.current
    trainer.fit()
    sampler.going = False
    program = next(item.bytes for item in plan.phases[0].items if item.name == "Python and its libraries")
    steps = read_jsonl(folder / "run" / "metrics.jsonl")
    if any(step["skipped_steps"] for step in steps):
        raise SystemExit("an optimizer step was skipped: the optimizer's memory would not be measured")
    if "sd3" not in shape:  # seconds of prompts as long as they were, where the settings allow more
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        tokens = statistics.median(step["tokens"] for step in steps[1:]) / samples
        config.rollout.prompt_max_len = round(tokens - config.rollout.generate_max_len)
    return {
        "baseline": baseline,
        "program": program,
        "planned": {
            phase.name: plan.needed(phase)[0][1] - program for phase in plan.phases if phase.name in PHASES.values()
        },
        "measured": sampler.peaks,
        "seconds": seconds_of(steps[1:]),
        "planned_seconds": {phase.name: phase.seconds for phase in Planner(cpu(1), 1, 1).plan(config).phases},
    }


def compare(shape: str, found: dict, limit: float) -> bool:
    """Print a shape's memory; whether its largest phase is within the limit."""
    baseline, program = found["baseline"], found["program"]
    print(f"\n{shape}: baseline {baseline / MIB:.0f} MiB (the plan takes {program / MIB:.0f})")
    print(f"{'phase':>10} {'planned':>9} {'measured':>9} {'ratio':>6}")
    both = [found[each] | {"largest": max(found[each].values())} for each in ("planned", "measured")]
    for name in [each for each in both[0] if each in both[1]]:  # a phase may be too short to be seen
        planned, measured = both[0][name] + program, both[1][name]
        ratio = planned / measured
        print(f"{name:>10} {planned / MIB:>9.0f} {measured / MIB:>9.0f} {ratio:>6.2f}")
    return abs(ratio - 1) <= limit


def print_seconds(name: str, measured: dict[str, float], planned: dict[str, float], notes: dict[str, str]) -> None:
    for phase, seconds in measured.items():
        factor = planned[phase] / seconds
        print(f"| {name} | {phase} | {seconds:.3g} | {planned[phase]:.3g} | {factor:.2f} | {notes.get(phase, '')} |")


def on_this_host(shapes: list[str], limit: float) -> bool:
    fine, found = True, {}
    keep = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", shape, folder]
            subprocess.run(command, env=os.environ | keep, check=True, stdout=subprocess.DEVNULL)
            found[shape] = json.loads(Path(folder, "found.json").read_text())
        fine = compare(shape, found[shape], limit) and fine
    print(f"\nwithin {limit:.0%}: {fine}\n\n{TITLES}")
    for shape, each in found.items():
        notes = dict.fromkeys(each["seconds"], "calibrates") if shape in CALIBRATE else {}
        print_seconds(shape, each["seconds"], each["planned_seconds"], notes)
    return fine


TITLES = "| run | phase | measured | planned | factor | |\n|---|---|---|---|---|---|"
PROMPT = 282  # tokens: 256 of the image of 448 x 448, and the question
VL = (
    f"--n_samples_per_prompt 8 --rollout_batch_size 16 --train_batch_size 128 --generate_max_len 256 --prompt_max_len "
    f"{PROMPT} --limit_mm_image_per_prompt 1 --gradient_checkpointing true --bf16 true --lora_rank 32 "
    "--engine_mem_util 0.25 --engine_enforce_eager true --engine_type vllm"
)
H200_VL, WHOLE = "--engine_enforce_eager false", "--micro_rollout_batch_size 16"
COMMON = "--guidance_scale 1 --lora_rank 32 --max_sequence_length 5 --bf16 true --gradient_checkpointing true"
DRAWN = (
    f"{COMMON} --n_samples_per_prompt 4 --height 512 --width 512 --num_steps 10 --rollout_batch_size 4 "
    "--train_batch_size 16 --micro_train_batch_size 4 --micro_rollout_batch_size 8"
)
FILM = (
    f"{COMMON} --n_samples_per_prompt 1 --height 256 --width 448 --num_frames 17 --num_steps 8 --mid_timestep 6 "
    "--final_timestep 7 --rollout_batch_size 2 --micro_rollout_batch_size 1 --train_batch_size 2 "
    "--micro_train_batch_size 1 --diffusion_algorithm reward_fl"
)


class CardRun(NamedTuple):
    """Seconds by phase, and `peak`; `calibrates` gave a number. said: what else ran, or how the code differed."""

    name: str
    model: str
    settings: str
    measured: dict[str, float]
    calibrates: tuple[str, ...] = ()
    said: str = ""
    card: str = "h100-80gb"


# The first rows' code started more operations than today's (docs/benchmarks.md as of the visit): 18,450 and 42,510
# views a padded micro-batch, today 16,030 and 35,930.
ON_THE_CARD = (
    CardRun("GRPO 3B, padded, micro-batches of 4", "vl",
            f"{VL} --micro_train_batch_size 4 --micro_rollout_batch_size 8 --share_prefix false",
            {"generate": 10.8, "score": 6.1, "train": 50.0}, ("generate",),
            "1.17 times as many operations, 16 threads"),
    CardRun("GRPO 3B, prompts once, micro-batches of 32", "vl",
            f"{VL} --micro_train_batch_size 32 --micro_rollout_batch_size 32",
            {"generate": 13.6, "score": 7.8, "train": 15.7, "sync": 0.8}, ("sync",),
            "its first step; two runs beside it; attention once a sample"),
    CardRun("Flow-GRPO SD3.5 medium, 1 step a forward", "sd3", DRAWN, {"train": 20.6}, (), "two runs beside it"),
    CardRun("the same, 5 steps a forward", "sd3", f"{DRAWN} --steps_per_forward 5", {"train": 6.9}, (),
            "two runs beside it"),
    CardRun("GRPO 3B, all weights, micro-batches of 128", "vl",
            f"{VL} --lora_rank 0 --gradient_checkpointing attention {H200_VL} --micro_train_batch_size 128 "
            "--micro_rollout_batch_size 128",
            {"generate": 2.49, "score": 1.55, "train": 2.95, "sync": 0.49}, card="h200-141gb"),
    CardRun("GRPO 3B, LoRA, micro-batches of 32", "vl",
            f"{VL} {H200_VL} --micro_train_batch_size 32 --micro_rollout_batch_size 32",
            {"generate": 1.71, "score": 1.94, "train": 3.14, "sync": 0.51}, card="h200-141gb"),
    CardRun("Flow-GRPO SD3.5 medium, nothing again, micro-batches of 16, 2 steps a forward", "sd3",
            f"{DRAWN} {WHOLE} --gradient_checkpointing none --micro_train_batch_size 16 --steps_per_forward 2",
            {"generate": 1.48, "train": 2.31, "peak": 53.3}, card="h200-141gb"),
    CardRun("Flow-GRPO SD3.5 medium, 5 steps a forward", "sd3", f"{DRAWN} {WHOLE} --steps_per_forward 5",
            {"generate": 1.54, "train": 3.52, "peak": 9.2}, card="h200-141gb"),
    CardRun("Reward FL Wan 1.3B", "wan", FILM, {"train": 3.37, "peak": 8.6}, card="h200-141gb"),
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


def torch_peak(plan: Any) -> float:
    """Bytes of the fullest phase that PyTorch counts."""
    others = ("left unused by the allocator", "driver and NCCL")
    return max(
        sum(item.bytes for item in phase.items if item.where == "device" and item.name not in others)
        for phase in plan.phases
    )


def on_the_card() -> None:
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import parse_run
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.plugins.memory_plan.check import Planner, named_device

    print(TITLES)
    with tempfile.TemporaryDirectory() as folder:
        models = {kind: shaped(kind, Path(folder)) for kind in ("vl", "sd3", "wan")}
        for run in ON_THE_CARD:
            given = f"--pretrain {models[run.model]} {run.settings}"
            words = f"{given} --plan_device {run.card} --plan_world_size 1".split()
            config = parse_run(RunConfig if run.model == "vl" else DiffusionRunConfig, words).config
            plan = Planner(*named_device(config)).plan(config)
            planned = {phase.name: phase.seconds for phase in plan.phases} | {"peak": torch_peak(plan) / 2**30}
            notes = {
                phase: "; ".join(["calibrates"] * (phase in run.calibrates) + [run.said] * bool(run.said))
                for phase in run.measured
            }
            print_seconds(f"{run.card}: {run.name}", run.measured, planned, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--card", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        shape, folder = asked.child
        Path(folder, "found.json").write_text(json.dumps(child(shape, Path(folder))))
        os._exit(0)  # the engine's threads would wait
    if asked.card:
        on_the_card()
        return 0
    return int(not on_this_host(asked.shapes, asked.limit))


if __name__ == "__main__":
    raise SystemExit(main())
