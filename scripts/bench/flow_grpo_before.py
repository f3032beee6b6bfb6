"""A Flow-GRPO iteration of an earlier version beside today's: the same weights, noise, prompts and reward; alternating.

    git worktree add --detach /tmp/first ebf6c37
    python scripts/bench/flow_grpo_before.py /tmp/first [--rounds 3] [--iterations 6] [key=value ...]
    git worktree remove /tmp/first

Both versions train the embedded SD3 of this one, with LoRA weights that are drawn here, on 8 prompts x 8 images x 10
steps, one update an iteration. Noise comes from one generator a sample in both, named by iteration and sample. Prints
the median seconds of an iteration without the first, of the wall and of the processor, and how far rewards, losses,
gradient norms and the trained weights lie apart. Further arguments go to today's configuration only, such as
`train.steps_per_forward=1`; OMP_NUM_THREADS (default: 2) is the number of threads of both.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
METRICS = ("reward_mean", "loss", "grad_norm")


def settings(options: argparse.Namespace, model: str, prompts: str) -> list[str]:
    """The whole configuration, as far as versions may differ in their defaults."""
    samples = options.prompts * options.images
    return [
        "diffusion_algorithm=flow_grpo", f"pretrain={model}", f"prompt_data={prompts}",
        'reward_recipe={"*": [["rule", "shape_match", 1.0]]}',
        f"rollout_batch_size={options.prompts}", f"n_samples_per_prompt={options.images}",
        f"num_steps={options.steps}", "scheduler=flow_match_euler", "flow_shift=1.0", "guidance_scale=1.0",
        "height=32", "width=32", "max_sequence_length=5", f"micro_rollout_batch_size={samples}",
        f"train_batch_size={samples}", f"micro_train_batch_size={samples}", "learning_rate=1e-3", "l2=0.0",
        f"max_steps={options.iterations}", "max_eval_samples=0", "report=false", "save_trajectories=false", "seed=42",
    ]  # fmt: skip


def run_side(arguments: list[str], out: Path) -> None:
    """Train with whichever version is imported; JSON of seconds and metrics of the iterations, and of the weights."""
    import torch

    names = ("lightrft_visual.config.diffusion", "lightrft_visual.config.diffusion_schema")
    name = next(name for name in names if importlib.util.find_spec(name) is not None)
    schema = importlib.import_module(name).DiffusionRunConfig
    from lightrft_visual.config.load import config_or_exit
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.strategy.deepspeed import DeepspeedStrategy
    from lightrft_visual.trainer.diffusion import build, stages

    def generators(run_seed: int, step: int, indices: list[int], purpose: str = "noise") -> list[torch.Generator]:
        return [torch.Generator().manual_seed(10**6 * (step + 1) + int(index)) for index in indices]

    def prepare(strategy: Any, module: torch.nn.Module, *others: Any) -> Any:
        for key, weight in trained(module).items():
            if "lora_A" in key:
                generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
                weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[0])
        return own_prepare(strategy, module, *others)

    def trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {key: weight for key, weight in module.named_parameters() if weight.requires_grad}

    own_prepare, DeepspeedStrategy.prepare = DeepspeedStrategy.prepare, prepare
    stages.sample_generators = generators
    config = config_or_exit(schema, [*arguments, f"output_dir={out.with_suffix('')}"], preset=None)
    quiet_libraries()
    trainer = build.build_diffusion_trainer(config)
    begins = "train_step" if hasattr(trainer, "train_step") else "collect"  # the latter in versions before
    clocks, begin = [], getattr(trainer, begins)

    def timed() -> Any:
        clocks.append((time.perf_counter(), time.process_time()))
        return begin()

    setattr(trainer, begins, timed)
    trainer.fit()
    clocks.append((time.perf_counter(), time.process_time()))
    trainer.close()
    with open(out.with_suffix("") / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = [{key: float(row[key]) for key in METRICS} for row in csv.DictReader(file)]
    spent = [{"wall": b[0] - a[0], "cpu": b[1] - a[1]} for a, b in zip(clocks, clocks[1:])]
    weights = {key: weight.detach().flatten().tolist() for key, weight in trained(trainer.parts.policy).items()}
    iterations = [row | seconds for row, seconds in zip(rows, spent)]
    out.write_text(json.dumps({"iterations": iterations, "weights": weights}))


def called(checkout: Path, arguments: list[str], out: Path) -> dict[str, Any]:
    """What a run of the version at `checkout` writes."""
    environment = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"} | os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--side", str(out), "--", *arguments]
    subprocess.run(command, env=environment, cwd=checkout, check=True, stdout=sys.stderr)
    return json.loads(out.read_text())


def report(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Seconds of both and their ratio; the largest relative distance of each metric over the iterations."""
    lines = ["| an iteration | before | after | ratio |", "|---|---|---|---|"]
    for key, said in (("wall", "seconds of the wall"), ("cpu", "seconds of the processor")):
        every = ([row[key] for run in side for row in run["iterations"][1:]] for side in (before, after))
        old, new = map(statistics.median, every)
        lines.append(f"| {said} | {old:.3f} | {new:.3f} | {new / old:.2f} |")
    lines += ["", "| metric | before, by iteration | after | largest distance |", "|---|---|---|---|"]
    for key in METRICS:
        old, new = ([row[key] for row in side[0]["iterations"]] for side in (before, after))
        apart = max(abs(a - b) for a, b in zip(old, new))
        lines.append(f"| {key} | {shown(old)} | {shown(new)} | {apart:.1e} |")
    first, last = before[0]["weights"], after[0]["weights"]
    apart = max(abs(a - b) for key, values in first.items() for a, b in zip(values, last[key]))
    largest = max(abs(value) for values in first.values() for value in values)
    lines += ["", f"trained weights at the end: at most {apart:.1e} apart, the largest is {largest:.2g}"]
    return "\n".join(lines)


def shown(values: list[float]) -> str:
    """The first four of them."""
    return ", ".join(f"{value:.6g}" for value in values[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path)
    numbers = {"prompts": 8, "images": 8, "steps": 10, "rounds": 3, "iterations": 6}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.side is not None:
        run_side(sys.argv[sys.argv.index("--") + 1 :], options.side)
        return
    from lightrft_visual.embedded.captions import embedded_prompts
    from lightrft_visual.embedded.resolve import embedded_folder
    from lightrft_visual.embedded.warmup import cache_root

    common = settings(options, str(embedded_folder()), str(embedded_prompts(cache_root())[0]))
    sides: tuple[list, list] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, checkout, more, runs in (
                ("before", options.checkout.resolve(), [], sides[0]), ("after", HERE, overrides, sides[1])
            ):  # fmt: skip
                runs.append(called(checkout, [*common, *more], Path(folder) / f"{name}{number}.json"))
    print(report(*sides))


if __name__ == "__main__":
    main()
