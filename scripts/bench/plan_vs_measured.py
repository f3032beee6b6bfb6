"""The plan of a run against what it takes, on the CPU: the largest resident memory of each phase of a real run.

    python scripts/bench/plan_vs_measured.py [--shapes tiny_vlm vlm_100m vlm_110m sd3_90m] [--limit 0.15]

Every shape runs in a process of its own: libraries are imported and the resident memory is noted (the baseline, which
the plan calls 'Python and its libraries'); then two steps are trained, and the process's resident memory is read every
ten milliseconds with the phase that it is in. glibc is told to give freed memory back, as it would else keep some for
later. Exits with 1 where a shape's largest phase is off by more than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
PHASES = {
    "load": "load",
    "generate": "generate",
    "reward": "score",
    "forward": "score",
    "train": "train",
    "sync": "sync",
}
VL = "--max_eval_samples 0 --parity_every 0 --max_steps 2 --no_report --no_save_trajectories".split()
SHAPES = ("tiny_vlm", "vlm_100m", "vlm_110m", "sd3_90m")


def vision_language(folder: Path, hidden: int, layers: int, rows: tuple[int, int, int]) -> list[str]:
    """Settings of a run of a VLM with random weights; rows: prompts, samples of each, tokens of a response."""
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    from shapes import TEXTS, questions
    from transformers import AutoProcessor

    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    prompts, samples, tokens = rows
    model = build_tiny_checkpoint(folder / "model", "qwen2_5_vl", texts=TEXTS, hidden=hidden, layers=layers)
    data = questions(folder / "data", 2 * prompts, 112)
    message = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many circles are there?"}]}
    ]
    processor = AutoProcessor.from_pretrained(model)
    length = len(processor.tokenizer(processor.apply_chat_template(message, add_generation_prompt=True))["input_ids"])
    batch = f"--train_batch_size {prompts * samples} --rollout_batch_size {prompts} --n_samples_per_prompt {samples}"
    return [
        *["--pretrain", str(model), "--prompt_data", str(data), *VL],
        *["--prompt_max_len", str(length + 15), "--generate_max_len", str(tokens), "--min_new_tokens", str(tokens)],
        *["--max_pixels", str(112 * 112), "--limit_mm_image_per_prompt", "1", *batch.split()],
        *f"--micro_train_batch_size {prompts * samples} --micro_rollout_batch_size {prompts * samples}".split(),
    ]


def drawing(folder: Path) -> list[str]:
    """Settings of a run of an SD3 with random weights, all of which train."""
    from lightrft_visual.models.diffusion.policy import save_text_length
    from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline

    model = folder / "model"
    build_pipeline(TinyDiffusionSettings(layers=4, heads=12, head_dim=64)).save_pretrained(model)
    save_text_length(model, TEXT_LENGTH)
    (folder / "prompts.jsonl").write_text('{"prompt": "a red circle"}\n' * 8)
    return [
        *["--pretrain", str(model), "--prompt_data", f"{folder}/prompts.jsonl", "--lora_rank", "0"],
        *["--reward_recipe", '{"*": [["rule", "shape_match", 1.0]]}', "--max_steps", "2"],
        *["--no_report", "--no_save_trajectories"],
        *"--height 32 --width 32 --num_steps 3 --rollout_batch_size 2 --n_samples_per_prompt 4".split(),
        *"--train_batch_size 8 --micro_train_batch_size 8 --micro_rollout_batch_size 8 --beta 0.01".split(),
    ]


def settings_of(shape: str, folder: Path) -> list[str]:
    """The settings of a shape's run; its model and data are made in the folder."""
    if shape == "tiny_vlm":
        return [*vision_language(folder, 128, 2, (8, 8, 16)), "--init_kl_coef", "0.01"]
    if shape == "vlm_100m":
        return [*vision_language(folder, 1024, 10, (2, 4, 24)), "--engine_type", "hf", "--init_kl_coef", "0.01"]
    if shape == "vlm_110m":  # longer answers of more samples: activations count for more
        return [*vision_language(folder, 1024, 12, (4, 4, 64)), "--engine_type", "hf", "--init_kl_coef", "0.01"]
    return drawing(folder)


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


def child(shape: str, folder: Path) -> dict:
    """One run: its plan, and the largest resident memory of each phase."""
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    arguments = [*settings_of(shape, folder), "--output_dir", str(folder / "run")]
    import deepspeed  # noqa: F401
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.plugins.memory_plan.check import plan_of
    from lightrft_visual.plugins.memory_plan.process import cpu
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    config = load_config(DiffusionRunConfig if shape.startswith("sd3") else RunConfig, arguments)
    if shape == "tiny_vlm":
        from lightrft_visual.rollout.vllm.arguments import prepare_environment

        prepare_environment()
        import vllm.model_executor.models.qwen2_5_vl  # noqa: F401
    plan = plan_of(config, cpu(1), 1, 1)
    baseline, sampler = resident(), Sampler()
    sampler.start()
    trainer = (build_diffusion_trainer if shape.startswith("sd3") else build_trainer)(config)
    sampler.phase = lambda: trainer.timer.current
    trainer.fit()
    sampler.going = False
    program = next(item.bytes for item in plan.phases[0].items if item.name == "Python and its libraries")
    planned = {phase.name: plan.needed(phase)[0][1] - program for phase in plan.phases}
    table = (folder / "run" / "metrics.csv").read_text().splitlines()
    steps = [dict(zip(table[0].split(","), row.split(","))) for row in table[1:]]
    if any(float(step["skipped_steps"]) for step in steps):
        raise SystemExit("an optimizer step was skipped: the optimizer's memory would not be measured")
    return {
        "baseline": baseline,
        "program": program,
        "planned": planned,
        "measured": sampler.peaks,
        "text": plan.text(),
    }


def compare(shape: str, found: dict, limit: float) -> bool:
    """Print a shape's table; whether its largest phase is within the limit."""
    baseline, program = found["baseline"], found["program"]
    print(f"\n{shape}: baseline {baseline / MIB:.0f} MiB (the plan takes {program / MIB:.0f})")
    print(f"{'phase':>10} {'planned':>9} {'measured':>9} {'ratio':>6}   without baseline")
    for name, planned in found["planned"].items():
        whole, measured = planned + program, found["measured"].get(name, 0)
        own = measured - baseline
        ratio = f"{planned / own:.2f}" if own > 0 else "-"
        columns = f"{whole / MIB:>9.0f} {measured / MIB:>9.0f} {whole / max(measured, 1):>6.2f}"
        print(f"{name:>10} {columns}   {planned / MIB:.0f} against {own / MIB:.0f}: {ratio}")
    planned, measured = max(found["planned"].values()) + program, max(found["measured"].values())
    off = planned / measured - 1
    print(f"{'largest':>10} {planned / MIB:>9.0f} {measured / MIB:>9.0f} {1 + off:>6.2f}")
    return abs(off) <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--show", action="store_true", help="print the plans too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        shape, folder = arguments.child
        Path(folder, "found.json").write_text(json.dumps(child(shape, Path(folder))))
        os._exit(0)  # the engine's threads would wait
    fine = True
    keep = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", shape, folder]
            subprocess.run(command, env=os.environ | keep, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(Path(folder, "found.json").read_text())
        fine = compare(shape, found, arguments.limit) and fine
        if arguments.show:
            print(found["text"])
    print(f"\nwithin {arguments.limit:.0%}: {fine}")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
