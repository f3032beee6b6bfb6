"""What is wrong with a reward function is said before any model is loaded."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rewards.batch import batch_from_media
from lightrft_visual.rewards.registry import Catalogue
from lightrft_visual.rewards.settings import check_references, check_reward_config, engine_arguments, scored_labels


@pytest.fixture
def rewards_file(tmp_path):
    path = tmp_path / "scores.py"
    path.write_text(
        "def plain(completions, difficulty, limit=3):\n    return [float(limit)] * len(completions)\n"
        "def anything(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    return path


def test_a_parameter_that_no_column_fills(rewards_file):
    config = RewardConfig(reward_fn=f"{rewards_file}:plain")
    engine_arguments(config, columns={"difficulty"})
    engine_arguments(config)  # the data are not known yet
    told = "plain asks for 'difficulty'.*did you mean 'dificulty'.*a setting of its own is reward.kwargs.NAME.diffic"
    with pytest.raises(ConfigError, match=told):
        engine_arguments(config, columns={"dificulty", "other"})
    recipe = RewardConfig(reward_recipe=f'{{"*": [[func, "{rewards_file}:plain", 1.0]]}}')
    with pytest.raises(ConfigError, match="asks for 'difficulty'"):
        RewardComputationEngine.from_config(recipe, columns={"other"})


def test_a_function_of_the_scores_beside_servers_asks_for_no_column(tmp_path):
    for name, score in (("a", 3.0), ("b", 5.0)):  # which stand for servers
        (tmp_path / f"{name}.py").write_text(f"def reward_func(queries, prompts, labels):\n    return [{score}]\n")
    path = tmp_path / "scores.py"
    path.write_text(
        "def mix(rewards):\n    return 0.5 * rewards[0] + 0.1 * rewards[1]\n"
        "class Made:\n    def __init__(self, limit):\n        self.limit = limit\n"
    )
    config = RewardConfig(reward_fn=f"{path}:mix", remote_rm_url=f"{tmp_path}/a.py,{tmp_path}/b.py")
    engine = RewardComputationEngine.from_config(config, columns={"level"})
    assert engine.score(batch_from_media(["a red ball"]), 1).score.tolist() == [2.0]
    with pytest.raises(ConfigError, match="mix asks for 'rewards'"):
        engine_arguments(replace(config, remote_rm_url=None), columns={"level"})
    with pytest.raises(ConfigError, match="Made needs the setting 'limit'"):
        engine_arguments(replace(config, reward_fn=f"{path}:Made"), columns={"level"})


@pytest.mark.parametrize("forward", ["sequences", "sequences, attention_mask", "sequences, attention_mask, **more"])
def test_a_torch_module_by_path_beside_another_reward_is_a_model_and_aggregates_nothing(forward, tmp_path):
    (tmp_path / "a.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.5]\n")
    (tmp_path / "m.py").write_text(
        f"import torch\nclass Model(torch.nn.Module):\n    def forward(self, {forward}): ...\nmade = Model()\n"
    )
    config = RewardConfig(reward_fn=f"{tmp_path}/m.py:made", remote_rm_url=f"{tmp_path}/a.py")
    engine = RewardComputationEngine.from_config(config, columns={"level"})
    assert engine.aggregator is None and [type(each).__name__ for each in engine._all] == [
        "CallableSource",
        "TorchModel",
    ]
    with pytest.raises(ConfigError, match="m.py:Model is the class of a reward model"):
        engine_arguments(replace(config, reward_fn=f"{tmp_path}/m.py:Model"), columns={"level"})


def test_a_parameter_named_like_an_input_and_a_column_is_told_once(tmp_path, caplog):
    path = tmp_path / "scores.py"
    path.write_text(
        "def mine(completions, ids, labels, device, frames, turns, level):\n    return [0.0] * len(completions)\n"
    )
    config = RewardConfig(reward_fn=f"{path}:mine")
    for _ in range(2):
        engine_arguments(config, columns={"ids", "labels", "device", "turns", "level", "batch"})
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "reward function mine gets the run's own ids, device; the columns of these names are in metadata"
    ]


def test_kwargs_and_columns_named_like_inputs_that_they_get_are_told(tmp_path, caplog):
    path = tmp_path / "scores.py"
    path.write_text("def mine(completions, device=None, **given):\n    return [0.0] * len(completions)\n")
    columns = {"ids", "labels", "device", "frames", "labels_or_references", "turns", "metadata", "level", "batch"}
    engine_arguments(RewardConfig(reward_fn=f"{path}:mine"), columns=columns)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "reward function mine gets the run's own device, metadata, ids; the columns of these names are in metadata"
    ]


def test_a_setting_that_the_function_does_not_take(rewards_file):
    def recipe(function, settings):
        return RewardConfig(reward_recipe=f'{{"*": [[func, "{rewards_file}:{function}", 1.0, {settings}]]}}')

    check_reward_config(recipe("plain", "{limit: 5}"))
    check_reward_config(recipe("anything", "{limt: 5}"))
    with pytest.raises(ConfigError, match="takes no setting 'limt'.*did you mean 'limit'"):
        check_reward_config(recipe("plain", "{limt: 5}"))


def test_a_class_needs_its_settings_and_what_it_makes_asks_for_references(tmp_path, caplog):
    path = tmp_path / "scores.py"
    path.write_text(
        "class Short:\n"
        "    def __init__(self, words, device):\n        pass\n"
        "    def __call__(self, completions, refs):\n        return [0.0] * len(completions)\n"
    )
    config = RewardConfig(components={"a": 1.0}, kwargs={"a": {"scorer": f"{path}:Short", "words": 1}})
    engine_arguments(config, columns={"level"})
    check_references(config, [SimpleNamespace(labels={None}, columns=set(), has_references=False)], [])
    assert "reward function a asks for refs and gets None" in caplog.messages[-1]
    with pytest.raises(ConfigError, match="reward function Short needs the setting 'words'"):
        engine_arguments(RewardConfig(reward_fn=f"{path}:Short"), columns={"words"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the scorer exact is the reward when none is named.*column 'reference'.*--reference_key"),
        ({"components": {"numeric": 1.0}}, "the scorer numeric compares.*--reference_key"),
        ({"reward_recipe": '{"*": [[rule, math, 1.0]]}'}, "the scorer math compares"),
        ({"reward_recipe": '{"*": [[func, exact, 1.0]]}'}, "the scorer exact compares"),
    ],
)
def test_a_reward_that_compares_needs_references_and_no_other_one(settings, words, rewards_file):
    given, lacking = (SimpleNamespace(labels={None}, columns=set(), has_references=has) for has in (True, False))
    check_references(RewardConfig(**settings), [given], [given])
    for sets in ([lacking], []), ([], [lacking]):
        with pytest.raises(ConfigError, match=words):
            check_references(RewardConfig(**settings), *sets)
    for other in (RewardConfig(reward_fn=f"{rewards_file}:anything"), RewardConfig(components={"format": 1.0})):
        check_references(other, [lacking], [lacking])


def test_a_function_that_asks_for_references_which_no_row_has_is_warned_of(tmp_path, caplog):
    path = tmp_path / "scores.py"
    path.write_text(
        "def short(completions, refs):\n    return [0.0] * len(completions)\n"
        "def strict(completions, references, level):\n    return [0.0] * len(completions)\n"
        "def lenient(completions, references=None, **more):\n    return [0.0] * len(completions)\n"
        "def column(completions, solution):\n    return [0.0] * len(completions)\n"
    )
    given, lacking = (
        SimpleNamespace(labels={None}, columns={"level", "solution"}, has_references=has) for has in (True, False)
    )
    strict = RewardConfig(reward_recipe=f'{{"*": [[func, "{path}:strict", 1.0]]}}')
    for quiet in (RewardConfig(reward_fn=f"{path}:lenient,{path}:column"), strict):
        check_references(quiet, [given], [given])
        check_references(quiet, [given, lacking] if quiet is strict else [lacking], [])  # a column of that name
    assert caplog.messages == []
    for config in (strict, RewardConfig(reward_fn=f"{path}:strict")):
        check_references(config, [lacking], [given])
        check_references(config, [given], [lacking])
    check_references(RewardConfig(reward_fn=f"{path}:short"), [lacking], [given])
    assert "reward function short asks for refs and gets None" in caplog.messages[-1]
    told = "reward function strict asks for references and gets None: no row of {} has a reference; it is read from"
    assert [each.split(" the column")[0] for each in caplog.messages[:-1]] == [
        told.format(data) for data in ("the data", "eval_data") * 2
    ]


def test_references_are_asked_of_the_labels_that_a_data_set_has_and_of_scorers_with_a_weight():
    rules = "{drawing: [[rule, format, 1.0], [rule, exact, 0]], both: [[rule, exact, 0.9], [rule, format, 0.1]], "
    config = RewardConfig(reward_recipe=rules + '"*": [[rule, exact, 1.0]]}')
    of = {
        label: SimpleNamespace(labels={label}, columns=set(), has_references=False)
        for label in ("drawing", "both", "count", None)
    }
    check_references(config, [of["drawing"]], [of["drawing"], of["both"]])  # held-out rows are scored by the other one
    for label in ("both", "count", None):
        with pytest.raises(ConfigError, match="no row of the data has one"):
            check_references(config, [of[label]], [])
    with pytest.raises(ConfigError, match="no row of eval_data has one"):
        check_references(config, [], [of["count"]])


def test_which_labels_a_configuration_scores():
    rule = [["rule", "exact", 1]]
    recipes = {None: "", frozenset("ab"): json.dumps({"a": rule, "b": rule})}
    for labels, recipe in recipes.items():
        assert scored_labels(RewardConfig(reward_recipe=recipe or None)) == labels
    assert scored_labels(RewardConfig(reward_recipe=json.dumps({"a": rule, "*": rule}))) is None


def test_a_second_function_of_one_name_is_no_part_of_the_recipe_by_the_firsts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    functions, recipe = f"{tmp_path}/a.py:score,{tmp_path}/b.py:score", '{"*": [[func, score, 1.0]]}'
    with pytest.raises(ConfigError, match=r"does not use reward_fn; name it there as \[func, score_2, weight\]"):
        check_reward_config(RewardConfig(reward_fn=functions, reward_recipe=recipe))


def test_a_python_file_of_remote_rewards_is_checked_without_actors(rewards_file, monkeypatch):
    """The first rank alone would wait for the others, with which actors are started."""
    monkeypatch.setattr(Catalogue, "_ray_actors", lambda *_: pytest.fail("actors are started"))
    rewards_file.write_text("def reward_func(queries, prompts, labels, difficulty):\n    return [1.0]\n")
    config = RewardConfig(remote_rm_url=str(rewards_file), reward_transport="ray")
    check_reward_config(config)
    with pytest.raises(ConfigError, match="asks for 'difficulty'"):
        RewardComputationEngine.from_config(config, columns={"other"})
