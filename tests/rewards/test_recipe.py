import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.recipe import ANY_LABEL, load_recipe, parse_recipe, recipe_from_components

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


def test_missing_file_and_bad_yaml():
    with pytest.raises(ConfigError, match="gone.yaml does not exist"):
        load_recipe("gone.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_recipe("{a: [")


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
        ({"ocr": 1.0}, {"ocr": {"transport": "http"}}, "needs url"),
        ({"ocr": 1.0}, {"ocr": {"transport": "smoke"}}, "transport 'smoke'"),
        ({"j": 1.0}, {"j": {"transport": "http", "url": "http://h", "mode": 1}}, "server's own setting"),
    ],
)
def test_bad_components(components, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        recipe_from_components(components, kwargs)
