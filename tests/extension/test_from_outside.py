"""A choice of every kind is added by one file outside of the package, and runs. A term of the loss and a hook with
state are one file each; runs are made with them, and with callbacks from Python."""

import csv
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import run_alone

from lightrft_visual.algorithms.advantages import get_advantage_calculator
from lightrft_visual.config import registry
from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.config.recipes import load_plugins
from lightrft_visual.config.vl import AlgorithmConfig, DataConfig, RolloutConfig
from lightrft_visual.data.forms import read_form
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.rewards.local.callables import CallableSource
from lightrft_visual.rollout.environments import Action, environment_factory
from lightrft_visual.trainer.vl.maker import ExperienceMaker

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
MINE = HERE / "my_choices.py"


def runs(kind: str, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp(kind)
    run_alone(HERE / "outside_runs.py", kind, folder, limit=800, PYTHONPATH=str(ROOT))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, cache_root) -> Path:
    return runs("choices", tmp_path_factory)


@pytest.fixture(scope="module")
def featured(tmp_path_factory, cache_root) -> Path:
    return runs("features", tmp_path_factory)


def rows(folder: Path) -> list[dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value and "time" not in name} for row in found]


def facts(folder: Path, run: str) -> dict:
    return json.loads((folder / "facts.json").read_text())[run]


def test_a_vision_language_run_is_made_of_them(made):
    found = rows(made / "vl")
    assert len(found) == 2
    # An estimator without a critic, the engine, the adapter of the model's family.
    assert facts(made, "vl") == {"trainer": "VLTrainer", "engine": "TwoTokens", "family": "CalmQwen"}
    for step, row in enumerate(found):
        assert row["my_tokens"] == 1.0 and row["my_steps_before"] == step  # a term of the loss, a hook
        assert row["my_loss_seen"] == 0.25  # the loss, and a metric of the loss
        assert row["response_length"] == 2  # the engine
        assert row["reward/my_letters"] == pytest.approx(row["reward_mean"])  # the scorer
        mean, std = row["reward_mean"], row["reward_std"]
        assert row["my_reward_square"] == pytest.approx(mean**2 + std**2, rel=1e-4)  # a metric
        assert row["advantage_abs"] in {0.0, *(n / 8 for n in range(9))}  # the estimator: 0 or ±1 each
        assert "tis_weight" in row and "kl_loss" in row and "my_gains_frac" in row and row["grad_norm"] >= 0
    assert any(row["grad_norm"] > 0 for row in found)


def test_a_diffusion_run_is_made_of_them(made):
    found = rows(made / "diffusion")
    known = facts(made, "diffusion")
    assert [row["my_steps_before"] for row in found] == [0, 1]
    assert all(row["my_weight"] > 0 and row["grad_norm"] > 0 for row in found)
    assert (known["family"], known["loss"], known["red"]) == ("QueriesOnly", "Imitation", 2.0)
    assert known["adapted"] and all(name.endswith("attn.to_q") for name in known["adapted"])


def test_the_plugin_stands_in_the_resolved_configuration(made):
    assert "my_choices.py" in (made / "vl" / "config.resolved.yaml").read_text()


@dataclass(frozen=True)
class MySampling(SamplingSettings):
    min_p: float = 0.0


@dataclass
class MyRollout(RolloutConfig):
    min_p: float = 0.1


def test_a_sampling_parameter_is_a_field_and_a_setting():
    """From the setting into what the engine is asked for, and into the arguments of make_experience_list."""
    settings = MySampling.from_config(MyRollout(temperature=0.5, n_samples_per_prompt=3))
    assert (settings.min_p, settings.temperature, settings.n) == (0.1, 0.5, 3)
    maker = SimpleNamespace(settings=SimpleNamespace(sampling=replace(settings, top_k=5)))
    changed, _ = ExperienceMaker._split(maker, {"min_p": 0.2, "gamma": 1.0})
    assert (changed.min_p, changed.top_k) == (0.2, 5)


def test_forms_are_recognised_and_environments_and_masks_found_by_name(monkeypatch):
    for kind in KINDS:
        monkeypatch.setattr(getattr(registry, kind), "_entries", dict(getattr(registry, kind)._entries))
    load_plugins(str(MINE))
    row = read_form({"asked": "how many?"}, DataConfig())
    assert (row.form, row.columns["prompt"]) == ("my_rows", "how many?")
    assert CallableSource(lambda said: [1.0] * len(said)).form.told == "my form"
    assert CallableSource(lambda completions: [1.0] * len(completions)).form.told == ""
    echo = environment_factory(EpisodeConfig(environment="my_echo"))()
    assert echo.step(Action("so", [], [])) == ("so", 0.5, False, {})
    inputs, config = SimpleNamespace(advantages=torch.tensor([[1.0, -1.0]])), SimpleNamespace(policy_loss="my_loss")
    assert registry.policy_masks.load("my_gains")(inputs, config).tolist() == [[True, False]]


KINDS = [name for name, value in vars(registry).items() if isinstance(value, registry.Registry)]
PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("## To add")[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_choice_has_a_dummy_and_is_documented(kind):
    assert f"registry.{kind}.register(" in MINE.read_text()
    assert f"`{kind}`" in PAGE


def test_the_example_of_the_page_works(monkeypatch):
    kind = registry.advantage_estimators
    monkeypatch.setattr(kind, "_entries", dict(kind._entries))
    exec(compile(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], "docs/architecture.md", "exec"), {})
    assert get_advantage_calculator("sign", AlgorithmConfig(advantage_estimator="sign")).grouped


def records(folder: Path, step: int) -> list[dict]:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_term_of_the_loss_brings_its_part_of_the_forward_its_share_and_its_metric(featured):
    for row in rows(featured / "term"):
        assert row["calm"] > 0
        assert row["loss"] - row["policy_loss"] == pytest.approx(0.5 * row["calm"], rel=1e-4)
    assert all("calm" not in row for row in rows(featured / "callbacks"))


def test_a_hook_changes_rewards_and_goes_on_exactly_after_a_resume(featured):
    whole, resumed = rows(featured / "hook"), rows(featured / "hook_resumed")
    assert [row["dice_thrown"] for row in whole] == [8, 16, 24, 32]
    assert all(row["reward_mean"] > 1 for row in whole)  # a throw is 1 at least, a length less than that
    assert resumed == whole[2:]
    assert [records(featured / "hook", step) for step in (3, 4)] == [
        records(featured / "hook_resumed", step) for step in (3, 4)
    ]
    weights = [
        hashlib.sha256((featured / name / "checkpoint-final" / "model.safetensors").read_bytes()).hexdigest()
        for name in ("hook", "hook_resumed")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("name", "planned", "samples"), [("callbacks", 4, 8), ("diffusion", 3, 4)])
def test_callbacks_follow_a_run_and_end_it(featured, name, planned, samples):
    told = facts(featured, name)
    step = [f"scores of {samples}", "update, applied True"]
    assert told == [f"setup of {planned} steps", *step, *step, "closed"]
    assert len(rows(featured / name)) == 2
    assert (featured / name / "checkpoint-000002").is_dir() and (featured / name / "checkpoint-final").is_dir()
