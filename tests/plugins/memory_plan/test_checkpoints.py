"""Plans of resuming and exporting: what fits, what does not, and what helps then."""

from dataclasses import replace

import pytest

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.placement import DEVICES, GIB
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.plugins.memory_plan.diffusion import DiffusionPlanner, computed_models
from lightrft_visual.plugins.memory_plan.table import HOST, Item, Phase, Plan
from lightrft_visual.plugins.memory_plan.vl import VLPlanner
from lightrft_visual.plugins.memory_plan.vl_shape import shapes_of

CARD = DEVICES["h100-80gb"]
SEVEN = "--pretrain Qwen/Qwen2.5-VL-7B-Instruct --zero_stage 2 --offload_trainer"
WAN = "--pretrain Wan-AI/Wan2.1-T2V-14B-Diffusers --zero_stage 3 --lora_rank 0"
IMAGE = "--pretrain Qwen/Qwen-Image --zero_stage 3 --lora_rank 0"


def planner(settings: str) -> VLPlanner | DiffusionPlanner:
    """Of 8 ranks of a host."""
    schema = RunConfig if "-VL-" in settings else DiffusionRunConfig
    config = parse_run(schema, ["--bf16", *settings.split()]).config
    if schema is RunConfig:
        return VLPlanner(config, shapes_of(config), {}, CARD, 8, 8)
    return DiffusionPlanner(config, computed_models(config), {}, CARD, 8, 8)


def held(phase: Phase) -> dict[str, float]:
    return {item.name: item.bytes for item in phase.items}


@pytest.mark.parametrize(
    ("settings", "numbers", "read", "gathered"),
    [
        (SEVEN, 8_292_166_656, 2 + 12 / 8, 0),
        (WAN, 14_288_491_584, 12 / 8, 2 * 5120 * 30720 * 2),
        (IMAGE, 20_430_401_088, 12 / 8, 2 * 3072 * 18432 * 2),
    ],
    ids=["7B", "Wan 14B", "Qwen-Image"],
)
def test_a_model_trained_in_full_resumes_and_is_exported_on_8_cards(settings, numbers, read, gathered) -> None:
    """Below ZeRO-3 each rank reads all weights. Only rank 0 exports, and it has its host's memory with 7 others."""
    of_run = planner(settings)
    resume, export = of_run._resume(), of_run._export()
    assert Plan("", CARD, 8, 8, (resume, export)).fits
    assert held(resume)["checkpoint that is read"] == read * numbers
    assert held(export)["weights to export"] == 2 * numbers / 8
    assert held(export).get("weights gathered to export", 0) == gathered


@pytest.mark.parametrize(("settings", "phase", "helps"), [(SEVEN, 0, "zero_stage 3"), (WAN, 1, "lora_rank")])
def test_a_host_that_is_too_small_is_told_with_what_helps(settings, phase, helps) -> None:
    of_run = planner(settings)
    asked = (of_run._resume(), of_run._export())[phase]
    small = replace(CARD, host=asked.total(HOST) - GIB)
    assert Plan("", small, 8, 8, (of_run._load(), asked)).fits == (asked.name == "resume")  # of a later run
    told = Plan("", small, 8, 8, (asked,), resumes=True).verdict()
    assert f"phase {asked.name} wants 1.0 GiB more host memory" in told
    assert helps in told


def test_adapters_are_read_and_exported_alone_where_the_base_stays_as_it_is() -> None:
    of_run = planner(f"{WAN} --lora_rank 32")
    trained = of_run.model.trained
    assert held(of_run._resume())["checkpoint that is read"] == 12 * trained / 8
    assert held(of_run._export())["weights to export"] == 2 * trained


def test_a_critic_is_read_after_the_policy() -> None:
    one, both = (planner(f"{SEVEN} {also}")._resume() for also in ("", "--advantage_estimator gae"))
    name = "checkpoint that is read"
    assert held(one)[name] == held(both)[name] and both.total("device") > one.total("device")


def test_moments_of_the_host_stay_where_they_are_read_to() -> None:
    here, away = (planner(f"{WAN} {also}")._resume() for also in ("", "--adam_offload"))
    assert held(here)["checkpoint that is read"] - held(away)["checkpoint that is read"] == 14_288_491_584


def test_the_average_stands_in_for_the_exported_weights_in_their_precision() -> None:
    name = "copy that stands in for the weights"
    plain, averaged = (planner(f"{WAN} --eval_ema {also} --enable_ema")._export() for also in ("false", "true"))
    assert name not in held(plain) and held(averaged)[name] == 2 * 14_288_491_584 / 8
    assert planner(f"{WAN} --eval_ema true --enable_ema --no_bf16")._lent()[0].bytes == 0


def test_what_a_run_does_once_is_no_part_of_a_step() -> None:
    phases = (Phase(name, (Item("weights", GIB),), 1.0) for name in ("load", "train", "sync", "resume", "export"))
    assert Plan("", CARD, 8, 8, tuple(phases)).seconds == 2.0
