"""The examples and the pieces of docs/rewards.md work as they stand."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from reward_rollouts import make_samples
from waiting import finished

from lightrft_visual.config import registry
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.rewards import RewardComputationEngine, load_recipe, load_reward_fn, parse_recipe
from lightrft_visual.rewards.functions.judge import TEMPLATE
from lightrft_visual.rewards.remote.wire import decode_reply, decode_request
from lightrft_visual.rewards.settings import engine_arguments

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "rewards.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.S)


@pytest.fixture(autouse=True)
def in_project_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_rule_example():
    engine = RewardComputationEngine(reward_fn=load_reward_fn("examples/rewards/rule.py:score"))
    result = engine.compute_rewards([make_samples(["Two", "two dogs", "x", "y"], ["two", "two", "two", None])])
    assert result.score[:3].tolist() == pytest.approx([1.0, 0.2, 0.0]) and result.valid.tolist()[3] is False
    assert result.components["answer_length"].tolist() == [3, 8, 1, 1]


def test_composed_example():
    engine = RewardComputationEngine.from_config(RewardConfig(reward_recipe="examples/rewards/composed.yaml"))
    result = engine.compute_rewards([make_samples(["it is 3", "red"], ["3", "red"], ["count", None])])
    assert result.score.tolist() == pytest.approx([1.1, 1.1])


def test_judge_example_is_a_sound_recipe():
    engine_arguments(RewardConfig(reward_recipe="examples/rewards/judge.yaml"), ["any", None])


def test_aggregate_example():
    function = load_reward_fn("examples/rewards/aggregate.py:reward_fn")
    engine = RewardComputationEngine(
        custom_reward_func=[lambda completions: [1.0, 5.0], lambda queries: [3.0, 2.0]], reward_fn=function
    )
    result = engine.compute_rewards([make_samples(["a", "b"])])
    assert result.score.tolist() == [1, 2] and result.components["spread"].tolist() == [2, 3]


def test_picture_example_on_made_pictures():
    engine = RewardComputationEngine(reward_fn=load_reward_fn("examples/rewards/picture.py:score"))
    noise = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    result = engine.score_media(["a", "b"], [noise, torch.ones(3, 16, 16)])
    assert result.score[0] > 0.5 and result.score[1] == 0


@pytest.mark.slow
def test_remote_example_starts_a_server_and_hands_over_its_address(tmp_path):
    """With a stand-in for the launcher that asks the server once."""
    launcher = tmp_path / "deepspeed"
    body = '{"queries": ["qred"], "prompts": ["q"], "references": ["red"]}'
    ask = f"curl -s -H 'Content-Type: application/json' -d '{body}' \"$3\""
    launcher.write_text(f'#!/usr/bin/env bash\n{ask}\necho " $@"\n')
    launcher.chmod(0o755)
    script = (ROOT / "examples/rewards/remote.sh").read_text().replace('"$PWD/.venv/bin:$PATH"', f'"{tmp_path}:$PATH"')
    script = script.replace('cd "$(dirname "${BASH_SOURCE[0]}")/../.."', f'cd "{ROOT}"')
    (tmp_path / "remote.sh").write_text(script)
    environment = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    done = finished(["bash", tmp_path / "remote.sh", "--seed", "1"], 120, env=environment)
    assert done.stdout.startswith('{"rewards":[1.0]}') and "--remote_rm_url http://127.0.0.1:" in done.stdout
    assert done.stdout.rstrip().endswith("--seed 1") and done.returncode == 0


def test_json_of_the_docs():
    request, reply, *_ = (json.loads(block) for block in blocks("json"))
    batch = decode_request(request, 10, 10)
    scores = decode_reply(reply, len(batch))
    assert len(batch) == 2 and scores.failed.tolist() == [False, True]


def test_yaml_of_the_docs():
    given = [yaml.safe_load(block) for block in blocks("yaml")]
    templates = [each for each in given if "question" in each]
    assert len(templates) == 1 and set(templates[0]) <= set(TEMPLATE)
    recipes = [each for each in given if each not in templates]
    assert recipes
    for recipe in recipes:
        assert parse_recipe(recipe).components()
        assert load_recipe(yaml.safe_dump(recipe)).components()


def test_python_of_the_docs(monkeypatch):
    monkeypatch.setattr(registry.scorers, "_entries", dict(registry.scorers._entries))
    for block in blocks("python"):
        exec(compile(block, "docs/rewards.md", "exec"), {"__name__": "docs"})
