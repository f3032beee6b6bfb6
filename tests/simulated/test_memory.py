"""What a rank holds on its device, counted by the simulated one's allocator. The ranks try the device itself first."""

import json
from pathlib import Path

import pytest
from launched import run_ranks

SLACK = 64 * 1024  # bytes of buffers, numbers of steps and what a collective needs
SMALL = 4096  # bytes of scalars that are yet to be collected


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("memory")
    run_ranks(Path(__file__).with_name("memory_ranks.py"), str(root), timeout=840)  # may compile the device
    return [json.loads((root / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("stage", (2, 3))
def test_states_and_weights_leave_the_device_and_come_back(ranks, stage):
    for rank in ranks:
        seen = rank[f"stage_{stage}"]
        # Adam's two states and the fp32 weights are divided over both ranks.
        assert seen["after"] - seen["states_away"] >= 1.5 * seen["weights"] - SLACK
        assert seen["all_away"] <= SLACK
        assert abs(seen["next"] - seen["after"]) <= SLACK and abs(seen["again"] - seen["after"]) <= SLACK
        # A saved state takes the place of the present one, beside at most one tensor, the largest of 512 x 256.
        assert seen["loading"] <= seen["after"] + 512 * 256 * 4 + SLACK
        assert seen["counted_on"]  # where one kernel of AdamW reads them


@pytest.mark.plugin("memory_plan")
@pytest.mark.parametrize("stage", (2, 3))
def test_a_resumed_engine_and_an_export_hold_what_the_plan_says(ranks, stage):
    from lightrft_visual.config.shared import DistributedConfig
    from lightrft_visual.plugins.memory_plan.zero import Model, Zero

    plan = Zero(DistributedConfig(zero_stage=stage), ranks=2, on_cpu=False)
    numbers = ranks[0][f"stage_{stage}"]["weights"] // 4
    model = Model(numbers, 0, 512 * 256, 512 * 256, width=4)
    items = [plan.weights(model), *plan.optimizer(model), *plan.kept(model)]
    small = (64 * 512 + 512 + 256) * 4 if stage == 3 else 0  # weights that ZeRO-3 keeps whole
    for rank in ranks:
        assert abs(rank[f"stage_{stage}"]["loading"] - sum(item.bytes for item in items) - small) <= SMALL
        assert rank["exported"]["peak"] >= 512 * 512 * 4  # one weight of the model, whose bound is below


def test_what_is_at_home_on_the_host_is_on_the_device_only_while_it_is_used(ranks):
    for number, rank in enumerate(ranks):
        guest, taken, exported = rank["guest"], rank["taken_along"], rank["exported"]
        assert guest["home"] <= SMALL and guest["again"] <= SMALL
        assert guest["inside"] - guest["home"] >= guest["size"]  # a run before may free some bytes while it comes home
        assert taken["inside"] >= taken["size"] and taken["again"] <= SMALL
        assert taken["same"] == 2  # its weights are not copied back
        # A divided model is written from the host, and no device holds it whole.
        assert exported["peak"] <= 0.75 * exported["whole"]  # of four weights two or three may meet
        assert (exported["same"], exported["on_host"]) == ((8, True) if number == 0 else (0, False))
