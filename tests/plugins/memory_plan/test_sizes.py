"""Micro-batch sizes that the plan chooses: as large as there is room for, the same on all ranks."""

from dataclasses import replace

import pytest
import torch

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit, parse_run
from lightrft_visual.config.placement import DEVICES
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.plugins.memory_plan import check as sizes
from lightrft_visual.plugins.memory_plan.check import plan_of
from lightrft_visual.plugins.memory_plan.process import FRAGMENTS

THREE = (
    "--pretrain Qwen/Qwen2.5-VL-3B-Instruct --bf16 --gradient_checkpointing --zero_stage 2 --rollout_batch_size 128 "
    "--n_samples_per_prompt 8 --train_batch_size 1024 --micro_train_batch_size 1 --micro_rollout_batch_size 1 "
    "--generate_max_len 1024 --offload_trainer"
).split()
SMALL = (
    "--n_samples_per_prompt 6 --rollout_batch_size 128 --micro_rollout_batch_size 8 --train_batch_size 192 "
    "--micro_train_batch_size 4"
).split()
CARD = DEVICES["h100-80gb"]
TRAIN, ROLLOUT = ("train", "micro_train_batch_size"), ("rollout", "micro_rollout_batch_size")


def needed(plan, name: str) -> float:
    return next(phase for phase in plan.phases if phase.name == name).total("device")


def test_the_largest_that_leaves_a_tenth_of_the_card_free() -> None:
    config = parse_run(RunConfig, THREE).config
    found = sizes.chosen_sizes(config, CARD, 8, 8)
    assert list(found) == [ROLLOUT, TRAIN] and found[ROLLOUT] > 1 and 1 < found[TRAIN] < 128
    assert config.train.micro_train_batch_size == 1  # only looked at
    config.rollout.micro_rollout_batch_size = found[ROLLOUT]
    for size, fits in ((found[TRAIN], True), (2 * found[TRAIN], False)):
        config.train.micro_train_batch_size = size
        assert (needed(plan_of(config, CARD, 8, 8), "train") <= 0.9 * CARD.memory) is fits


def test_a_small_card_keeps_what_is_given_and_a_large_one_takes_the_whole_step() -> None:
    config = parse_run(RunConfig, [*THREE, "--micro_train_batch_size", "2"]).config
    assert sizes.chosen_sizes(config, DEVICES["rtx4090-24gb"], 8, 8)[TRAIN] == 2
    assert sizes.chosen_sizes(parse_run(RunConfig, SMALL).config, CARD, 2, 2)[TRAIN] == 96


def test_a_size_that_nobody_gave_may_be_smaller_than_its_default() -> None:
    words = "--pretrain embedded --height 64 --width 64 --rollout_batch_size 2 --n_samples_per_prompt 4"
    words += " --rollout_graph_gib 0 --steps_per_forward 1 --train_batch_size 8 --micro_rollout_batch_size 1"
    argv = f"--diffusion_algorithm flow_grpo {words}".split()

    def config_of(*more: str) -> DiffusionRunConfig:
        return parse_run(DiffusionRunConfig, [*argv, *more], preset=None).config

    two, three = (
        needed(plan_of(config_of("--micro_train_batch_size", size), CARD, 1, 1), "train") for size in ("2", "3")
    )
    own = (two + three) / 2 - FRAGMENTS * CARD.memory  # a share of each card stays unused
    card = replace(CARD, memory=own / (0.9 - FRAGMENTS))
    assert sizes.chosen_sizes(config_of(), card, 1, 1)[TRAIN] == 2
    assert sizes.chosen_sizes(config_of("--micro_train_batch_size", "5"), card, 1, 1)[TRAIN] == 5


def test_denoising_steps_are_put_together_where_samples_leave_room() -> None:
    batch = "--pretrain embedded --num_steps 6 --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8"
    least = "--micro_train_batch_size 2 --micro_rollout_batch_size 2 --steps_per_forward 1"
    argv = f"--diffusion_algorithm flow_grpo {batch} {least}".split()
    config = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config
    found = sizes.chosen_sizes(config, CARD, 1, 1)
    assert {name: value for (_, name), value in found.items()} == {
        "micro_rollout_batch_size": 8, "micro_train_batch_size": 8, "steps_per_forward": 5,
    }  # fmt: skip


@pytest.mark.plugin("embedded")
def test_a_dry_run_says_what_it_would_choose(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        config_or_exit(RunConfig, [*SMALL, "--auto_micro_batches", "--plan_device", "h100-80gb", "--dry_run"])
    line = "auto_micro_batches: micro_rollout_batch_size 96, micro_train_batch_size 24"
    assert left.value.code == 0 and line in capsys.readouterr().out


@pytest.mark.plugin("embedded")
@pytest.mark.parametrize(
    "more, told",
    [("--plan_device h100-80gb", True), ("--plan_device cpu", False),
     ("--plan_device h100-80gb --auto_micro_batches false", False), ("--plan_device cpu --auto_micro_batches", True)],
)  # fmt: skip
def test_sizes_are_chosen_for_a_card_unless_told_otherwise(capsys, more: str, told: bool) -> None:
    with pytest.raises(SystemExit):
        config_or_exit(RunConfig, [*SMALL, *more.split(), "--dry_run"])
    assert ("auto_micro_batches: micro_rollout_batch_size" in capsys.readouterr().out) is told


def test_all_ranks_take_the_smallest(monkeypatch) -> None:
    config = parse_run(RunConfig, [*SMALL, "--no_gradient_checkpointing"]).config
    monkeypatch.setattr(sizes, "present", lambda local: CARD)
    other = torch.tensor([-64.0, -8.0], dtype=torch.float64)  # what the other rank has chosen
    monkeypatch.setattr(sizes.collectives, "all_reduce_max", lambda values: torch.maximum(values, other))
    sizes.use_choices(config)
    assert (config.rollout.micro_rollout_batch_size, config.train.micro_train_batch_size) == (64, 8)
