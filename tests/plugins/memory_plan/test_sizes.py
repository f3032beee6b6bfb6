"""Micro-batch sizes that the plan chooses: as large as there is room for, the same on all ranks."""

from dataclasses import replace

import pytest
import torch

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit, parse_run
from lightrft_visual.config.placement import DEVICES
from lightrft_visual.config.shared import PlanConfig
from lightrft_visual.config.spellings import DIFFUSION_PRESET, VL_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.memory_plan import check as sizes

SMALL = (
    "--n_samples_per_prompt 6 --rollout_batch_size 128 --micro_rollout_batch_size 8 --train_batch_size 192 "
    "--micro_train_batch_size 4"
).split()
CARD = DEVICES["h100-80gb"]
TRAIN, ROLLOUT = ("train", "micro_train_batch_size"), ("rollout", "micro_rollout_batch_size")


def config_of(*argv: str) -> RunConfig:
    """128 samples of a step for each of 8 ranks."""
    given = "--gradient_checkpointing none --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024"
    return parse_run(RunConfig, [*given.split(), *argv], preset=None).config


@pytest.mark.parametrize(
    ("kept", "given", "memory", "chosen"),
    [(0.9, 1, 1, 64), (0.5, 3, 0.05, 3), (0.5, 3, 1, 128), (30, None, 1, 2), (30, 5, 1, 5)],
    ids=["a part", "a small card", "the whole step", "less than the default", "not less than what is given"],
)
def test_the_largest_that_leaves_a_tenth_of_the_card_free(made_plans, kept, given, memory, chosen) -> None:
    made_plans({"none": kept})
    argv = [] if given is None else ["--micro_train_batch_size", str(given)]
    config = config_of(*argv, "--micro_rollout_batch_size", "1")
    size = config.train.micro_train_batch_size
    found = sizes.Planner(replace(CARD, memory=memory * CARD.memory), 8, 8).sizes(config)
    assert found[TRAIN] == chosen and (memory < 1 or found[ROLLOUT] == 128)
    assert config.train.micro_train_batch_size == size > (2 if given is None else 0)  # only looked at


def test_denoising_steps_are_put_together_where_samples_leave_room() -> None:
    batch = "--pretrain embedded --num_steps 6 --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8"
    least = "--micro_train_batch_size 2 --micro_rollout_batch_size 2 --steps_per_forward 1"
    argv = f"--diffusion_algorithm flow_grpo {batch} {least}".split()
    config = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config
    found = sizes.Planner(CARD, 1, 1).sizes(config)
    assert {name: value for (_, name), value in found.items()} == {
        "micro_rollout_batch_size": 8, "micro_train_batch_size": 8, "steps_per_forward": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "preset"), [(RunConfig, VL_PRESET), (DiffusionRunConfig, DIFFUSION_PRESET)], ids=["vl", "diffusion"]
)
def test_ranks_that_share_a_sequence_have_as_many_times_its_samples(schema, preset) -> None:
    argv = "--pretrain embedded --rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 128 --sp_size"
    limits = [sizes.Planner(CARD, 8, 8).limits(parse_run(schema, [*argv.split(), size], preset=preset).config)
              for size in ("1", "4")]  # fmt: skip
    assert [each["train", "micro_train_batch_size"] for each in limits] == [16, 64]


@pytest.mark.plugin("embedded")
def test_a_dry_run_says_what_it_would_choose(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        config_or_exit(RunConfig, [*SMALL, "--auto_micro_batches", "--plan_device", "h100-80gb", "--dry_run"])
    line = "auto_micro_batches: micro_rollout_batch_size 96, micro_train_batch_size 24"
    assert left.value.code == 0 and line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schema", "preset"), [(RunConfig, VL_PRESET), (DiffusionRunConfig, DIFFUSION_PRESET)], ids=["vl", "diffusion"]
)
def test_accumulation_is_of_the_ranks_that_a_dry_run_names(schema, preset) -> None:
    """On 8 ranks micro-batches of 2 are 64 samples of an update, 8 of each rank."""
    argv = "--pretrain embedded --rollout_batch_size 32 --n_samples_per_prompt 8 --gradient_accumulation_steps 4"
    named = "--micro_train_batch_size 2 --plan_device h100-80gb --plan_world_size 8"
    config = parse_run(schema, f"{argv} {named}".split(), preset=preset).config
    assert config.train.train_batch_size == 8
    text, _ = sizes.dry_run(config)
    assert config.train.train_batch_size == 64 and "gradient_accumulation_steps 4: an update of 64 samples" in text
    assert config.train.micro_train_batch_size == 8


def test_accumulation_on_the_ranks_of_a_dry_run_is_no_more_than_a_rollout_and_divides_it(made_plans) -> None:
    made_plans({"none": 0.1})
    named = "--plan_device h100-80gb --plan_world_size 6 --auto_micro_batches false".split()
    config = config_of("--gradient_accumulation_steps", "128", *named)
    sizes.dry_run(config)
    assert config.train.train_batch_size == 1024
    with pytest.raises(ConfigError, match="1024 samples do not divide into updates of train_batch_size 48"):
        sizes.dry_run(config_of("--gradient_accumulation_steps", "1", *named))


def test_sizes_are_chosen_for_a_card_unless_told_otherwise() -> None:
    found = [PlanConfig(auto_micro_batches=told).sizes_micro_batches(cpu) for told in (None, False, True)
             for cpu in (False, True)]  # fmt: skip
    assert found == [True, False, False, False, True, True]


def test_all_ranks_take_the_smallest(monkeypatch) -> None:
    config = parse_run(RunConfig, [*SMALL, "--no_gradient_checkpointing"]).config
    monkeypatch.setattr(sizes, "present", lambda local: CARD)
    other = torch.tensor([-64.0, -8.0], dtype=torch.float64)  # what the other rank has chosen
    monkeypatch.setattr(sizes.collectives, "all_reduce_max", lambda values: torch.maximum(values, other))
    sizes.use_choices(config)
    assert (config.rollout.micro_rollout_batch_size, config.train.micro_train_batch_size) == (64, 8)
