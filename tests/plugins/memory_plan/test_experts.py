"""The plan of a mixture of experts: weights of all experts, activations of those that a token goes through."""

from __future__ import annotations

import pytest
from moe import KIND
from stock_families import STOCK

from lightrft_visual.config.vl import ModelConfig, RunConfig
from lightrft_visual.plugins.memory_plan.vl_shape import MicroBatch, VLShape

BATCH = MicroBatch(rows=2, length=128, actions=16, prompts=2)


def shape_of(experts: int, active: int, bf16: bool = False) -> VLShape:
    config, _, _ = STOCK[KIND]()
    config.text_config.num_experts, config.text_config.num_experts_per_tok = experts, active
    return VLShape(RunConfig(model=ModelConfig(bf16=bf16)), config)


def test_weights_are_those_of_all_experts():
    few, many = shape_of(8, 2), shape_of(24, 2)
    each = 3 * 64 * 48 + 64  # gate, up and down, and a row of the router, in each of two layers
    assert many.base - few.base == 2 * 16 * each


@pytest.mark.parametrize("bf16", [False, True])
def test_activations_are_those_of_the_active_experts(bf16):
    width, tokens, layers = (2 if bf16 else 4), 256, 2
    kept = {(experts, active): shape_of(experts, active, bf16)._decoded(BATCH, backward=True).kept
            for experts, active in ((8, 2), (8, 4), (24, 2))}  # fmt: skip
    one = tokens * width * (64 + 4 * 48)  # what a token's way through an expert keeps at least: input, gate, up, both
    assert kept[8, 4] - kept[8, 2] >= 2 * layers * one
    assert kept[24, 2] - kept[8, 2] <= layers * tokens * 16 * 16  # scores of the routers alone
