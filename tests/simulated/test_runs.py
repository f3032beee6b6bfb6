"""Whole runs on the simulated accelerator: a tensor on the wrong device, or a collective over host memory, ends them.

Vision-language runs generate by the trainer's own model, diffusion runs by diffusers: vLLM knows no such device.
"""

import json
from functools import reduce
from itertools import chain
from pathlib import Path

import pytest
import tiny_families
import torch
from small_pipeline import given_flags
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
)
from whole_runs import ROOT, rows, run_plan

from lightrft_visual.config import registry
from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.models.tiny.diffusion import build_clip_tokenizer
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

DRIVER = ROOT / "tests" / "simulated" / "run_plan.py"
# What the memory plan would choose on an accelerator; two runs below leave it to the plan.
CHOSEN = "--gradient_checkpointing false --auto_micro_batches false"
LEFT_TO_THE_PLAN = "--gradient_checkpointing auto --auto_micro_batches true"
SMALL = (
    f"{CHOSEN} --engine_type hf --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 8 "
    "--generate_max_len 6 --train_batch_size 8 --micro_train_batch_size 8 --max_eval_samples 2 --report false "
    "--max_samples 16 --max_steps 2"
)
DRAW = (
    f"{CHOSEN} --height 32 --width 32 --num_steps 3 --eval_num_steps 3 --guidance_scale 2 --max_sequence_length 5 "
    "--rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 2 --train_batch_size 4 "
    "--micro_train_batch_size 2 --max_eval_samples 2 --lora_rank 4 --learning_rate 1e-2 --report false --max_steps 2"
)
PPO = (
    "--zero_stage 3 --offload_trainer true --advantage_estimator gae --init_kl_coef 0.05 --enable_ema true "
    "--reward_running_norm true --save_steps 1 --max_steps"
)
ONLY_THERE = ("--offload_trainer true", "--offload_reference true", "--cuda_graphs true")
FLOW_GRPO = (
    "--cuda_graphs true --beta 0.1 --enable_ema true --ema_interval 1 --eval_ema true --save_steps 1 --max_steps"
)
REWARD_FL = (
    "--diffusion_algorithm reward_fl --differentiable_reward shape_match --zero_stage 0 --mid_timestep 1 "
    "--final_timestep 2 --warmup_steps 0"
)
SEEING = {
    "moved": "--zero_stage 2 --offload_trainer true --gradient_checkpointing true --reward_running_norm true "
    "--init_kl_coef 0.05 --offload_reference true",
    "rloo_lora": "--advantage_estimator rloo --zero_stage 3 --lora_rank 4 --init_kl_coef 0.05 --dynamic_sampling true "
    "--enable_ema true --freeze_prefix true",
    "bf16": f"{LEFT_TO_THE_PLAN} --max_steps 1 --bf16 true --adam_offload true --parity_every 0 --init_kl_coef 0.05 "
    "--ref_update_steps 1 --ref_update_mixup 0.5",
    "ppo": f"{PPO} 1",
    "ppo_resumed": f"copy:ppo {PPO} 2 --resume_from auto",
    "models": "--max_steps 1 --zero_stage 1 --packing_samples true --reward_pretrain {classifier} "
    "--reward_fn {placed}:score",
}
DRAWING = {
    "flow_grpo": f"{FLOW_GRPO} 1",
    "flow_grpo_resumed": f"copy:flow_grpo {FLOW_GRPO} 2 --resume_from auto",
    "flow_grpo_3": f"{LEFT_TO_THE_PLAN} --max_steps 1 --zero_stage 3 --beta 0.1 --lora_rank 0 --learning_rate 1e-3 "
    "--reward_fn null --components.clip_score 1 --components.placed 1 --kwargs.clip_score.model {clip} "
    "--kwargs.placed.scorer {placed}:drawn",
    "counted_nft": "--max_steps 1 --diffusion_algorithm diffusion_nft --guidance_scale 1 --zero_stage 1 "
    "--micro_train_batch_size 1",
    "reward_fl": f"{REWARD_FL} --gradient_checkpointing true --use_gradient_checkpointing_offload true",
}
# Counted by `sync_counter`: two optimizer steps of 8 micro-batches on each of two ranks, of one rollout.
ONE_ROLLOUT = "--micro_train_batch_size 1 --max_eval_samples 0 --max_steps 1"
OF_8 = f"{ONE_ROLLOUT} --rollout_batch_size 8 --train_batch_size 16 --share_prefix false"
COUNTED_SEEING = {
    "counted_waiting": f"{OF_8} --zero_stage 0",
    "counted_packed": f"{OF_8} --zero_stage 2 --packing_samples true --init_kl_coef 0.05 --use_kl_loss true "
    "--kl_estimator k3 --papo_coef 0.02 --advantage_estimator gae --lora_rank 4",
    "counted_unified": f"{OF_8} --zero_stage 0 --guidance_scale 2 --reward_fn {{placed}}:score "
    "--pretrain {janus} --prompt_data {janus}/rows.jsonl",
}
COUNTED_DRAWING = {
    "counted_flow_grpo": f"{ONE_ROLLOUT} --train_batch_size 4 --num_steps 5 --zero_stage 2 --beta 0.1",
}
COUNTED = (*COUNTED_SEEING, *COUNTED_DRAWING)
COUNTED_REWARD = {"counted_reward_fl": f"{REWARD_FL} {ONE_ROLLOUT} --train_batch_size 8 --max_epochs 2"}
EXPERTS = {  # of Wan, whose samples need now the one, now the other, and which several ranks divide
    "counted_experts": f"{ONE_ROLLOUT} --train_batch_size 4 --pretrain {{wan}} --num_frames 5 --num_steps 5 "
    "--sigmas 1,0.8,0.5,0.3,0.1 --timestep_fraction 0.5 --timestep_choice random --zero_stage 3 --reward_fn "
    "{placed}:clips",
}
COUPLED = {"counted_dgpo": f"{ONE_ROLLOUT} --train_batch_size 4 --num_steps 5 --diffusion_algorithm dgpo"}
DIVIDED = {  # 8 micro-batches
    "counted_sequence": f"{ONE_ROLLOUT} --zero_stage 2 --sp_size 2 --packing_samples true",
    "counted_zero_3": f"{OF_8} --zero_stage 3 --init_kl_coef 0.05",
}
ONE_STEP = ("ppo", "flow_grpo", "bf16", "models", "flow_grpo_3", "counted_nft")
COMPARED = ("moved", "rloo_lora", "flow_grpo", "reward_fl")
RUNS = {
    1: (*COMPARED, "bf16", "flow_grpo_resumed"),
    2: ("ppo", "ppo_resumed", "models", "flow_grpo_3", "counted_nft"),
}
PLACED = """
import numpy

def score(responses, device):
    assert str(device).startswith("sim"), f"reward models would run on {device}"
    return [0.0] * len(responses)

def drawn(images, device):
    return score(images, device)

def clips(frames):
    return [float(numpy.asarray(clip[0]).mean()) / 255 for clip in frames]
"""
METRICS = ("loss", "policy_loss", "grad_norm", "reward", "reward_mean", "kl", "entropy", "value_loss")


@pytest.fixture(scope="module")
def given(tmp_path_factory, cache_root) -> dict[str, str]:
    """A drawing pipeline with its prompts and reward, reward models of texts and of images, and functions that fail
    where reward models would run on the host."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = AutoTokenizer.from_pretrained(registry.checkpoint_folder(ModelConfig(), "embedded", "embedded"))
    layers = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "pad_token_id": tokenizer.pad_token_id}
    BertForSequenceClassification(BertConfig(num_labels=1, **sizes, **layers)).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")
    drawn = build_clip_tokenizer()
    ends = {f"{name}_token_id": getattr(drawn, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {"vocab_size": len(drawn), "max_position_embeddings": 16} | layers | ends
    clip = CLIPConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 16} | layers, projection_dim=16)
    CLIPModel(clip).save_pretrained(folder / "clip")
    size = {"height": 32, "width": 32}
    CLIPProcessor(CLIPImageProcessor(size=size, crop_size=size), drawn).save_pretrained(folder / "clip")
    (folder / "placed.py").write_text(PLACED)
    build_tiny_checkpoint(folder / "janus", "janus")
    torch.manual_seed(0)
    tiny_families.wan_two_experts().save_pretrained(folder / "wan")
    texts = [{"prompt": f"how many {number}", "draw": number % 2 == 0} for number in range(16)]
    (folder / "janus" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    named = {name: str(folder / name) for name in ("classifier", "clip", "janus", "wan")} | {
        "placed": f"{folder}/placed.py"
    }
    return {"drawing": " ".join(given_flags(folder))} | named


def launched(folder: Path, cache: Path, device: str, names: tuple[str, ...], ranks: int, given: dict[str, str]) -> Path:
    runs, seeing = {}, SEEING | COUNTED_SEEING | DIVIDED
    for name in names:
        flags = (seeing | DRAWING | COUNTED_DRAWING | COUNTED_REWARD | COUPLED | EXPERTS)[name]
        if device == "cpu":
            flags = reduce(lambda left, flag: left.replace(flag, ""), ONLY_THERE, flags)
        words = flags.format(**given).split()
        copies = [word for word in words if word.startswith("copy:")]
        first = SMALL.split() if name in seeing else ["diffusion", *DRAW.split(), *given["drawing"].split()]
        runs[name] = [*copies, *first, *(word for word in words if word not in copies)]
    driver = folder / "driver.py"
    driver.write_text(
        f"import runpy, sys\nsys.argv = [sys.argv[0], {device!r}, *sys.argv[1:]]\n"
        f"sys.path.insert(0, {str(DRIVER.parent)!r})\nrunpy.run_path({str(DRIVER)!r}, run_name='__main__')\n"
    )
    return run_plan(runs, folder, cache, ranks, driver=driver)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory, cache_root, given) -> dict[int, Path]:
    return {
        ranks: launched(tmp_path_factory.mktemp(f"sim_{ranks}"), cache_root, "sim", names, ranks, given)
        for ranks, names in ((1, RUNS[1]), (2, (*RUNS[2], *COUNTED, *COUNTED_REWARD, *COUPLED, *DIVIDED, *EXPERTS)))
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache_root, given) -> Path:
    return launched(tmp_path_factory.mktemp("cpu"), cache_root, "cpu", COMPARED, 1, given)


@pytest.mark.parametrize("ranks,name", [(ranks, name) for ranks in RUNS for name in RUNS[ranks]])
def test_the_run_makes_its_steps(simulated, ranks, name):
    folder = simulated[ranks] / name
    steps = rows(folder)
    assert len(steps) == (1 if name in ONE_STEP else 2)
    assert rows(folder, "eval_metrics.csv") and (folder / "checkpoint-final").is_dir()


def waits(folder: Path, name: str, phase: str) -> list[list[dict]]:
    """By rank, of each span; see `sync_counter`."""
    return [json.loads((folder / name / f"waits_{rank}.json").read_text())[phase] for rank in (0, 1)]


@pytest.mark.parametrize("name", (*COUNTED, "counted_nft"))
def test_between_two_optimizer_steps_are_one_collective_and_two_reads_of_the_device(simulated, name):
    """In `counted_waiting` the loop over micro-batches reads each loss, which is counted by its line. `counted_packed`
    trains a critic too."""
    for spans in waits(simulated[2], name, "train"):
        assert len(spans) == (4 if name == "counted_packed" else 2)
        assert all(span["micro_batches"] >= (6 if name == "counted_nft" else 8) for span in spans)
        for span in spans:
            assert sum(span["collectives"].values()) == 1, span
            reads = sorted(span["reads"].values())
            assert name != "counted_waiting" or reads.pop() == 8, span
            assert sum(reads) <= 2, span
        assert any(span["reads"] for span in spans)


def test_an_update_by_the_rewards_gradient_reads_the_device_as_often_as_drawing_and_training(simulated):
    """Once each, and once for new prompts, in the first of two passes."""
    for spans in waits(simulated[2], "counted_reward_fl", "train"):
        assert len(spans) == 2
        for span, most in zip(spans, (3, 2)):
            assert span["micro_batches"] == 4 and sum(span["collectives"].values()) == 1, span
            assert 1 <= sum(span["reads"].values()) <= most, span


def test_a_loss_of_whole_groups_asks_the_device_once_an_update_and_the_other_ranks_twice(simulated):
    """The groups are cut by forward passes. What gathering itself reads stands on the gathers' own lines."""
    for spans in waits(simulated[2], "counted_dgpo", "train"):
        assert len(spans) == 2 and all(span["micro_batches"] >= 6 for span in spans)
        for span in spans:
            assert sum(span["collectives"].values()) == 3, span
            assert 1 <= sum(n for line, n in span["reads"].items() if line not in span["collectives"]) <= 2, span


def test_ranks_that_share_a_sequence_read_the_device_twice_an_update_and_exchange_for_attention_alone(simulated):
    for spans in waits(simulated[2], "counted_sequence", "train"):
        for span in spans:
            assert span["micro_batches"] == 8 and sum(span["reads"].values()) <= 2, span
            others = [n for line, n in span["collectives"].items() if not line.startswith("runtime.sequence:")]
            assert sum(others) == 1 < len(span["collectives"]), span
        assert any(span["reads"] for span in spans)


def test_ranks_that_divide_weights_agree_on_media_once_a_phase(simulated):
    """Before, each forward asked the other rank which towers it runs."""
    for span in chain.from_iterable(waits(simulated[2], "counted_zero_3", "train")):
        assert span["micro_batches"] >= 8 and sum(span["collectives"].values()) == 1, span
        assert sum(span["reads"].values()) <= 2, span
    for span in chain.from_iterable(waits(simulated[2], "counted_zero_3", "score")):
        assert sum(span["collectives"].values()) == 1 and sum(span["reads"].values()) <= 2, span


def test_ranks_agree_on_the_experts_that_run_once_an_update(simulated):
    """Before, each forward asked the other rank, and read which samples go through which."""
    for span in chain.from_iterable(waits(simulated[2], "counted_experts", "train")):
        assert span["micro_batches"] >= 4 and sum(span["collectives"].values()) == 2, span
        assert sum(span["reads"].values()) <= 2, span


@pytest.mark.parametrize(
    "name,phase,most",
    [("counted_packed", "score", 1), ("counted_flow_grpo", "sample", 2), ("counted_experts", "sample", 2)],
)
def test_scoring_and_drawing_wait_for_the_device_once_and_once_for_new_prompts(simulated, name, phase, most):
    for (span,) in waits(simulated[2], name, phase):
        assert not span["collectives"] and 1 <= sum(span["reads"].values()) <= most, span


@pytest.mark.parametrize("name", COMPARED)
def test_the_metrics_are_those_of_the_cpu_where_nothing_is_moved(simulated, plain, name):
    mine, theirs = rows(simulated[1] / name), rows(plain / name)
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs):
        shared = [metric for metric in METRICS if metric in one and metric in other]
        assert len(shared) >= 2
        assert [one[each] for each in shared] == pytest.approx([other[each] for each in shared], rel=1e-4, abs=1e-4)
