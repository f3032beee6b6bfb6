"""What a rank holds on its device, counted by the simulated one's allocator. The ranks try the device itself first."""

import json
from pathlib import Path

import pytest
from launched import run_ranks

SLACK = 64 * 1024  # bytes of buffers, numbers of steps and what a collective needs


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
        assert seen["loading"] <= seen["after"] + SLACK  # a saved state takes the place of the present one
        assert seen["counted_on"]  # where one kernel of AdamW reads them


def test_a_guest_is_on_the_device_for_its_visits_only(ranks):
    for rank in ranks:
        seen = rank["guest"]
        assert seen["home"] <= 1024 and seen["inside"] >= seen["size"] and seen["again"] <= 1024


def test_a_module_of_the_host_works_on_the_device_and_its_weights_are_not_copied_back(ranks):
    for rank in ranks:
        seen = rank["taken_along"]
        assert seen["inside"] >= seen["size"] and seen["again"] <= 1024 and seen["same"] == 2


def test_a_divided_model_is_written_from_the_host_and_no_device_holds_it_whole(ranks):
    for number, rank in enumerate(ranks):
        seen = rank["exported"]
        assert seen["peak"] <= 0.5 * seen["whole"]
        assert (seen["same"], seen["on_host"]) == ((8, True) if number == 0 else (0, False))
