"""What checkpointing keeps by the plan, and which the plan chooses."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit, parse_run
from lightrft_visual.config.placement import DEVICES
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.memory_plan import check
from lightrft_visual.plugins.memory_plan.diffusion import Computed
from lightrft_visual.plugins.memory_plan.pipelines import pipeline_policy
from lightrft_visual.plugins.memory_plan.shapes import language_model
from lightrft_visual.plugins.memory_plan.vl_shape import MicroBatch, VLShape
from lightrft_visual.trainer import start

HOW = ("none", "attention", "full")
CARD = DEVICES["h100-80gb"]
SEVEN = (
    "--pretrain Qwen/Qwen2.5-VL-7B-Instruct --bf16 --zero_stage 2 --packing_samples --rollout_batch_size 128 "
    "--n_samples_per_prompt 16 --generate_max_len 2048 --offload_trainer --gradient_checkpointing auto"
).split()


def config_of(*argv: str) -> RunConfig:
    return parse_run(RunConfig, [*SEVEN, *argv]).config


def test_a_layer_keeps_its_input_and_with_attention_that_and_a_number_for_each_head():
    kept, length = {}, 1537
    for how in HOW:
        config = config_of("--gradient_checkpointing", how)
        shape = VLShape(config, language_model(config.model))
        shape.trained.train()
        kept[how] = shape._decoded(MicroBatch(1, length, 700, 1, [length]), True).kept
    text = shape.text
    heads = text.num_attention_heads
    result = length * (text.hidden_size * 2 + heads * 4)  # bfloat16, and float32 norms
    assert kept["attention"] - kept["full"] == text.num_hidden_layers * result
    assert kept["full"] < kept["attention"] < 0.1 * kept["none"]


def test_a_drawing_model_keeps_more_than_in_full_and_less_than_without():
    kept = {}
    for how in HOW:
        argv = f"--pretrain embedded --lora_rank 3 --gradient_checkpointing {how}".split()
        config = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET).config
        kept[how] = Computed(config, pipeline_policy(config)).denoised(3, 1.0, True).kept
    assert kept["full"] < kept["attention"] < 0.7 * kept["none"], kept


@pytest.mark.parametrize("size,how", [(1, "none"), (4, "attention"), (16, "full")])
def test_auto_is_the_first_that_leaves_a_tenth_of_the_card_free(made_plans, size, how):
    made_plans({"none": 40, "attention": 10, "full": 1})
    config = config_of("--micro_train_batch_size", str(size), "--auto_micro_batches", "false")
    assert check.Planner(CARD, 8, 8).checkpointing(config) == how and config.model.gradient_checkpointing == "auto"


@pytest.mark.parametrize("call,how", [(1.0, "attention"), (0.1, "none")])
def test_auto_leaves_what_fits_for_what_lets_a_whole_step_be_one_micro_batch_where_it_is_quicker(made_plans, call, how):
    """128 samples of a step: four forwards of 32, or one in which attention's results alone are kept."""
    made_plans({"none": 2, "attention": 0.5, "full": 0.1}, {"none": 10, "attention": 12, "full": 14}, call)
    config = config_of("--train_batch_size", "1024", "--micro_train_batch_size", "1")
    assert check.Planner(CARD, 8, 8).checkpointing(config) == how


def test_auto_skips_attention_that_cannot_be_kept(made_plans):
    made_plans({"none": 40, "attention": 10, "full": 1})
    eager = config_of("--micro_train_batch_size", "4", "--attn_implementation", "eager")
    assert check.Planner(CARD, 8, 8).checkpointing(eager) == "full"


def test_auto_is_full_where_there_is_no_plan():
    unknown = parse_run(RunConfig, ["--pretrain", "someone/unheard-of", "--gradient_checkpointing", "auto"]).config
    assert check.Planner(CARD, 1, 1).checkpointing(unknown) == "full"


@pytest.mark.plugin("embedded")
def test_a_dry_run_says_what_it_would_choose(capsys):
    argv = ["--gradient_checkpointing", "auto", "--plan_device", "h100-80gb", "--dry_run"]
    with pytest.raises(SystemExit) as left:
        config_or_exit(RunConfig, argv)
    assert left.value.code == 0 and "# gradient_checkpointing auto: none" in capsys.readouterr().out


@pytest.mark.plugin("embedded")
def test_all_ranks_take_what_holds_least(monkeypatch):
    config = parse_run(RunConfig, ["--gradient_checkpointing", "auto", "--auto_micro_batches", "false"]).config
    monkeypatch.setattr(check, "present", lambda local: CARD)
    monkeypatch.setattr(check.collectives, "all_reduce_max", lambda value: torch.maximum(value, torch.tensor(1.0)))
    check.use_choices(config)
    assert config.model.gradient_checkpointing == "attention"


@pytest.mark.parametrize("schema", [RunConfig, SFTRunConfig])
@pytest.mark.parametrize("device,how", [("cpu", "none"), ("cuda", "full")])
def test_without_a_plan_auto_is_full_on_a_card_and_none_on_the_cpu(monkeypatch, caplog, schema, device, how):
    service = registry.service
    monkeypatch.setattr(registry, "service", lambda name: None if name == "memory_plan" else service(name))
    monkeypatch.setattr(start, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    config = parse_run(schema, [], preset=None).config
    assert config.model.gradient_checkpointing == "auto"
    with caplog.at_level(logging.WARNING):
        start._use_plan(config)
    assert config.model.gradient_checkpointing == how
    told = [record.getMessage() for record in caplog.records]  # supervised runs have no plan
    line = "gradient_checkpointing auto needs the plug-in memory_plan: it is full"
    assert told == [line] * (schema is RunConfig and device == "cuda")


@pytest.mark.plugin("embedded")
def test_a_model_without_checkpointing_is_trained_without(monkeypatch):
    planned = check.Planner._of_model

    def refused(planner, config):
        if config.model.gradient_checkpointing != "none":
            raise ConfigError("this model has none")
        return planned(planner, config)

    monkeypatch.setattr(check.Planner, "_of_model", refused)
    assert check.Planner(CARD, 1, 1).checkpointing(parse_run(RunConfig, []).config) == "none"
