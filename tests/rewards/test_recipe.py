import pytest

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.recipe import ANY_LABEL, compose_recipe, load_recipe, parse_recipe, recipe_from_components
from lightrft_visual.rewards.settings import engine_arguments

YAML = """
count:
  - [rule, numeric, 1.0, {tolerance: 0.01}]
  - [rule, format, 0.2]
"*":
  - {type: func, key: "rewards.py:score", weight: 0.5, name: mine}
"""


def test_yaml_file_and_inline(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML)
    for recipe in (load_recipe(str(path)), load_recipe(YAML)):
        first = recipe.for_label("count")[0]
        assert (first.type, first.key, first.weight, first.kwargs) == ("rule", "numeric", 1.0, {"tolerance": 0.01})
        assert recipe.for_label("anything")[0].name == "mine" == recipe.for_label(None)[0].name


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "mapping"),
        ({"a": []}, "label 'a'"),
        ({"a": [["rul", "exact", 1]]}, "label 'a', entry 1: type 'rul'; did you mean 'rule'"),
        ({"a": [["rule", "exact"]]}, r"\[type, key, weight\]"),
        ({"a": [["rule", "exact", "much"]]}, "weight 'much'"),
        ({"a": [["rule", "exact", float("nan")]]}, "weight nan"),
        ({"a": [["rule", "exact", True]]}, "weight True"),
        ({"a": [["rule", "exact", 1, 3]]}, "settings are a mapping"),
        ({"a": [{"typ": "rule"}]}, "unknown key 'typ'; did you mean 'type'"),
        ({"a": "rule"}, "label 'a'"),
    ],
)
def test_bad_recipes(raw, words):
    with pytest.raises(ConfigError, match=words):
        parse_recipe(raw)


def test_unknown_label_names_the_nearest():
    recipe = parse_recipe({"colour": [("rule", "exact", 1)]})
    with pytest.raises(ConfigError, match="label 'color'; did you mean 'colour'"):
        recipe.check_labels(["colour", "color"])
    with pytest.raises(ConfigError, match="without a label"):
        recipe.check_labels([None])


def test_a_recipe_that_no_row_needs_names_the_nearest_label():
    recipe = parse_recipe({"conut": [("rule", "numeric", 1)], "*": [("rule", "exact", 1)]})
    with pytest.raises(ConfigError, match="has the label 'conut', which no row of the data has; did you mean 'count'"):
        recipe.check_labels(["count", "name", None])
    with pytest.raises(ConfigError, match="no row has a label: --label_key names its column"):
        recipe.check_labels([None])
    recipe.check_labels([])  # the data are not known yet


def test_labels_of_rows_that_a_run_does_not_use_count_for_a_recipe():
    recipe = parse_recipe({"count": [("rule", "numeric", 1)], "name": [("rule", "exact", 1)]})
    recipe.check_labels(["count"], lambda: {"name", None})
    recipe.check_labels(["count", "name"], lambda: pytest.fail("the files were read for nothing"))
    with pytest.raises(ConfigError, match="has the label 'name', which no row of the data has"):
        recipe.check_labels(["count"], lambda: {"names"})


LABELS = ["yes", "no", "on", "010", "1.10", "1e3", "2024-01-01", "null", "a b"]


def test_labels_are_read_as_they_are_written(tmp_path):
    text = "\n".join(f"{label}: [[rule, exact, 0.5]]" for label in LABELS)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    for recipe in (load_recipe(str(path)), load_recipe(text)):
        assert list(recipe.entries) == LABELS
        recipe.check_labels(LABELS)
    assert list(parse_recipe({3: [("rule", "exact", 1)]}).entries) == ["3"]
    with pytest.raises(ConfigError, match="the label True is a bool; write it in quotes"):
        parse_recipe({True: [("rule", "exact", 1)]})


def test_missing_file_and_bad_yaml(tmp_path):
    with pytest.raises(ConfigError, match="gone.yaml does not exist"):
        load_recipe("gone.yaml")
    with pytest.raises(ConfigError, match="inline reward recipe is not valid YAML"):
        load_recipe("{a: [")
    with pytest.raises(ConfigError, match="'my_recipe': give a .yaml"):
        load_recipe("my_recipe")
    path = tmp_path / "recipe.yaml"
    path.write_text("a:\n  - [rule, exact, 1.0]\nb: [\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml:4: "):
        load_recipe(str(path))
    path.write_text("a:\n  - [rule, exact]\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml: reward recipe, label 'a', entry 1"):
        load_recipe(str(path))
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"recipe.yaml: cannot be read"):
        load_recipe(str(path))


def test_different_components_get_different_names():
    recipe = parse_recipe({"a": [("rule", "exact", 1), ("rule", "exact", 1, {"normalised": False})]})
    assert [entry.name for entry in recipe.components()] == ["exact", "exact_2"]


def test_same_component_under_two_labels_is_one():
    recipe = parse_recipe({"a": [("rule", "exact", 1)], "b": [("rule", "exact", 2)]})
    assert len(recipe.components()) == 1


def test_components_form():
    kwargs = {
        "text": {"scorer": "ocr", "mode": 7, "score_key": "x"},
        "judge": {"transport": "http", "url": "http://h/r"},
    }
    recipe = recipe_from_components({"text": 1.0, "judge": 0.5}, kwargs)
    text, judge = recipe.for_label("any")
    assert (text.type, text.key, text.kwargs, text.score_key, text.name) == ("rule", "ocr", {"mode": 7}, "x", "text")
    assert (judge.type, judge.key, judge.weight, judge.name) == ("remote", "http://h/r", 0.5, "judge")
    assert recipe.average and list(recipe.entries) == [ANY_LABEL]


@pytest.mark.parametrize(
    ("components", "kwargs", "words"),
    [
        ({}, {}, "empty"),
        ({"ocr": 1.0}, {"orc": {}}, "kwargs.orc.*did you mean 'ocr'"),
        ({"ocr": 1.0}, {"ocr": 7}, "kwargs.ocr: settings are a mapping"),
        ({"ocr": 1.0}, {"ocr": {"transport": "http"}}, "needs url"),
        ({"ocr": 1.0}, {"ocr": {"transport": "smoke"}}, "transport 'smoke'"),
        ({"j": 1.0}, {"j": {"transport": "http", "url": "http://h", "mode": 1}}, "server's own setting"),
    ],
)
def test_bad_components(components, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        recipe_from_components(components, kwargs)


def shipped_ocr(*settings):
    argv = ["--config", "experiment/diffusion/sd3_5/online_grpo_ocr", *settings]
    return engine_arguments(parse_run(DiffusionRunConfig, argv).config.reward)["reward_recipe"].entries[ANY_LABEL]


def test_components_and_settings_on_the_command_line_of_a_shipped_recipe():
    (entry,) = shipped_ocr("reward.components.ocr=1.0", "reward.kwargs.ocr.mode=7")
    assert (entry.key, entry.weight, entry.kwargs) == ("ocr", 1.0, {"mode": 7})
    (entry,) = shipped_ocr("reward.kwargs.ocr.mode=7")
    assert (entry.key, entry.weight, entry.kwargs) == ("ocr", 1.0, {"mode": 7})
    added = shipped_ocr("reward.components.look=0.3", "reward.kwargs.look.scorer=pixel", "reward.components.ocr=0.5")
    assert [(entry.name, entry.key, entry.weight) for entry in added] == [("ocr", "ocr", 0.5), ("look", "pixel", 0.3)]
    assert [entry.key for entry in shipped_ocr("--reward_recipe", "{'*': [[rule, exact, 1.0]]}")] == ["exact"]


LABELLED = {
    "count": [("rule", "numeric", 1.0, {"tolerance": 0.01, "absolute": 2}), ("rule", "format", 0.2)],
    "*": [("rule", "exact", 1.0), ("func", "numeric", 0.5), ("remote", "judge", 1.0)],
}


def test_components_change_weights_where_they_stand_and_are_added_to_every_label():
    recipe = compose_recipe(parse_recipe(LABELLED), {"format": 0.4, "pixel": 2.0}, {"pixel": {"rule": "red"}})
    weights = {label: [(e.name, e.weight) for e in rows] for label, rows in recipe.entries.items()}
    assert weights == {
        "count": [("numeric", 1.0), ("format", 0.4), ("pixel", 2.0)],
        "*": [("exact", 1.0), ("numeric_2", 0.5), ("judge", 1.0), ("pixel", 2.0)],
    }
    assert recipe.average and recipe.entries["*"][-1].kwargs == {"rule": "red"}


def test_settings_are_laid_over_those_of_the_recipe():
    kwargs = {"numeric": {"absolute": 3}, "numeric_2": {"tolerance": 1}, "judge": {"score_key": "tone"}}
    recipe = compose_recipe(parse_recipe(LABELLED), {}, kwargs)
    first, (_, second, judge) = recipe.entries["count"][0], recipe.entries["*"]
    assert first.kwargs == {"tolerance": 0.01, "absolute": 3} and second.kwargs == {"tolerance": 1}
    assert (second.type, second.name, judge.score_key) == ("func", "numeric_2", "tone") and not recipe.average
    other = compose_recipe(parse_recipe(LABELLED), {}, {"numeric": {"scorer": "choice", "letters": "AB"}})
    assert (other.entries["count"][0].key, other.entries["count"][0].kwargs) == ("choice", {"letters": "AB"})


@pytest.mark.parametrize(
    ("components", "kwargs", "words"),
    [
        ({}, {"numerc": {"tolerance": 1}}, "kwargs.numerc.*did you mean 'numeric'"),
        ({"pixel": 1.0}, {"pixl": {}}, "kwargs.pixl.*did you mean 'pixel'"),
        ({}, {"judge": {"mode": 1}}, "kwargs.judge.*is a remote.*no setting 'mode'"),
        ({}, {"numeric": {"transport": "http", "url": "http://h"}}, "server's own setting"),
        ({"numeric": float("nan")}, {}, "weight nan"),
    ],
)
def test_what_contradicts_a_recipe(components, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        compose_recipe(parse_recipe(LABELLED), components, kwargs)


def test_settings_need_something_they_belong_to():
    with pytest.raises(ConfigError, match="reward.components or of the reward_recipe"):
        RewardConfig(kwargs={"ocr": {"mode": 7}})
