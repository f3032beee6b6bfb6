"""Every command line of the GPU kit is taken today: by the schema, by vLLM on CUDA, the largest ones by the plan of an
80 GB card.

A visit to a card is short: a flag that has been renamed since must not be found there.
"""

import json
import sys
from pathlib import Path

import pytest
from forked import run_alone

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "scripts" / "gpu"))

import node  # noqa: E402
import parts  # noqa: E402

RUNS = [name for name in node.PARTS if name not in ("bandwidth", "killed_rank")]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("kit")
    out = folder / "results.json"
    run_alone(HERE / "kit_on_cuda.py", folder / "work", out, limit=900)
    return json.loads(out.read_text())


@pytest.mark.parametrize("part", [*parts.PARTS, *(f"node {name}" for name in RUNS)])
def test_a_parts_commands_are_taken_and_fit_on_the_card(results, part):
    found = results[part]
    assert found["runs"] and found["rows"] > 0, found
    assert all(plan.startswith("0: # it fits") for plan, _ in found["plans"]), found
    for name, run in found["runs"].items():
        assert run.get("engine", "ok") == "ok", (name, run)


def test_parts_with_language_models_have_their_engines_checked(results):
    checked = {part for part, each in results.items() if all("engine" in run for run in each["runs"].values())}
    assert checked == {*parts.PARTS, *(f"node {name}" for name in RUNS)} - {"flow_grpo", "reward_fl", "node flow_grpo"}


@pytest.mark.parametrize("part", RUNS)
def test_a_part_of_several_ranks_has_more_time_than_its_runs_take_by_their_plans(results, part):
    plans = results[f"node {part}"]["plans"]
    assert sum(seconds for _, seconds in plans) < node.PARTS[part][1], plans
