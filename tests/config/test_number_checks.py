"""Numbers that no run can work with are refused when the configuration is read, by the name of the setting."""

import math
import re
from dataclasses import replace
from functools import reduce

import pytest

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.errors import ConfigError


def refused(root, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(root.schema, list(argv), preset=root.preset)
    return str(caught.value)


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_no_setting_of_any_section_takes_nan_or_infinity(root) -> None:
    leaves = [leaf for leaf in names_of(root.schema).leaves.values() if "float" in leaf.type_name]
    assert len(leaves) > (5 if root.kind == "sft" else 30)
    for leaf in leaves:
        section = reduce(getattr, leaf.path.split(".")[:-1], root.schema())
        for number in (math.nan, -math.inf):
            value = {"list": [number, 0.5], "mapping": {"a": number}}.get(leaf.kind, number)
            with pytest.raises(ConfigError, match=rf"\b{leaf.name}\b"):
                replace(section, **{leaf.name: value})


@pytest.mark.parametrize("typed", ["top_p=-inf", "adam_betas=nan,0.5", "reward.components={a: .inf}"])
def test_nan_and_infinity_are_refused_as_they_are_typed(typed: str) -> None:
    assert typed.partition("=")[0].rpartition(".")[2] in refused(ROOTS[0], typed)


@pytest.mark.parametrize(
    "flags",
    [
        "--adam_betas 2 3",
        "--adam_betas 0.9 1",
        "--max_norm -1",
        "--seed 99999999999999999999",
        "--lora_alpha 0 --lora_rank 4",
        "--prompt_data_probs nan,0.5",
        "--prompt_data_probs 0,0.5",
        "--prompt_data_probs a,0.5",
        "--prompt_data_probs 1e308,1e308",
        "--max_image_pixels 0",
        "--min_pixels 200 --max_pixels 100",
    ],
)
def test_values_that_cannot_work_are_refused_by_name(flags: str) -> None:
    name = re.match(r"--(\w+)", flags)[1]
    assert name in refused(ROOTS[0], *flags.split())
