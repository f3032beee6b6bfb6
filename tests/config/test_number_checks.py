"""Numbers that no run can work with are refused when the configuration is read, by the name of the setting."""

from __future__ import annotations

import re

import pytest

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError

FLOATS = [
    pytest.param(root, leaf, id=leaf.path)
    for root in ROOTS
    for leaf in names_of(root.schema).leaves.values()
    if "float" in leaf.type_name
]


def refused(root, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(root.schema, list(argv), preset=root.preset)
    return str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("root", "leaf"), FLOATS)
def test_no_setting_takes_nan_or_infinity(root, leaf, value: str) -> None:
    text = {"list": f"{value},0.5", "mapping": f"{{a: .{value}}}".replace(".-", "-.")}.get(leaf.kind, value)
    assert re.search(rf"\b{leaf.name}\b", refused(root, f"{leaf.path}={text}"))


@pytest.mark.parametrize(
    "flags",
    [
        "--adam_betas 2 3",
        "--adam_betas 0.9 1",
        "--adam_betas -0.1 0.9",
        "--max_norm -1",
        "--l2 -1",
        "--lora_alpha 0 --lora_rank 4",
        "--lora_alpha -16 --lora_rank 4",
        "--prompt_data_probs nan,0.5",
        "--prompt_data_probs inf,0.5",
        "--prompt_data_probs 0,0.5",
        "--prompt_data_probs=-1,-1",
        "--prompt_data_probs a,0.5",
        "--prompt_data_probs 1e308,1e308",
        "--prompt_data_probs 1e-300,1e300",
        "--parity_tolerance -1",
        "--overlong_buffer_penalty_factor -1",
        "--cpgd_alpha -1",
        "--limit_mm_video_per_prompt -1",
        "--max_image_pixels 0",
        "--min_pixels 0",
        "--max_pixels 0",
        "--min_pixels 200 --max_pixels 100",
    ],
)
def test_values_that_cannot_work_are_refused_by_name(flags: str) -> None:
    name = re.match(r"--(\w+)", flags)[1]
    assert name in refused(ROOTS[0], *flags.split())


def test_the_edges_that_work_are_taken() -> None:
    def taken(flags: str) -> RunConfig:
        return parse_run(RunConfig, flags.split(), preset=None).config

    train = taken("--adam_betas 0 0.9 --max_norm 0 --l2 0 --lora_alpha 0 --prompt_data_probs 7,3").train
    assert (train.adam_betas, train.max_norm, train.l2) == ([0.0, 0.9], 0.0, 0.0)
