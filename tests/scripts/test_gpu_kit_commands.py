"""Every command line of the GPU kit is taken today: by the schema, by the plan of one 80 GB card, by vLLM on CUDA.

A visit to a card is short: a flag that has been renamed since must not be found there.
"""

import json
import sys
from pathlib import Path

import pytest
from waiting import finished

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "scripts" / "gpu"))

import parts  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("kit")
    out = folder / "results.json"
    process = finished([sys.executable, str(HERE / "kit_on_cuda.py"), str(folder / "work"), str(out)], limit=900)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("part", parts.PARTS)
def test_a_parts_commands_are_taken_and_fit_on_the_card(results, part):
    runs = results[part]["runs"]
    assert runs and results[part]["rows"] > 0
    for name, run in runs.items():
        assert run["plan"].startswith("0: # it fits"), (name, run)
        assert run.get("engine", "ok") == "ok", (name, run)


def test_parts_with_language_models_have_their_engines_checked(results):
    checked = {part for part, each in results.items() if all("engine" in run for run in each["runs"].values())}
    assert checked == set(parts.PARTS) - {"flow_grpo", "reward_fl"}
