import numpy as np
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


def test_inline_recipe_is_read_as_a_file_would_be(tmp_path):
    text = "{a: [[rule, numeric, 1e-1, {tolerance: 1e-2}]]}"
    (tmp_path / "recipe.yaml").write_text(text)
    inline, file = load_recipe(text), load_recipe(str(tmp_path / "recipe.yaml"))
    entry = inline.for_label("a")[0]
    assert inline == file and (entry.weight, entry.kwargs) == (0.1, {"tolerance": 0.01})
    with pytest.raises(ConfigError, match="(?s)inline reward recipe is not valid YAML.*duplicate key a"):
        load_recipe("{a: [[rule, exact, 1]], a: [[rule, numeric, 1]]}")


COLOUR = {"colour": [("rule", "exact", 1)]}
CONUT = {"conut": [("rule", "numeric", 1)], "*": [("rule", "exact", 1)]}


@pytest.mark.parametrize(
    ("raw", "labels", "words"),
    [
        (COLOUR, ["colour", "color"], "label 'color'; did you mean 'colour'"),
        (COLOUR, [None], "without a label"),
        (CONUT, ["count", "name", None], "the label 'conut', which no row of the data has; did you mean 'count'"),
        (CONUT, [None], "no row has a label: --label_key names its column"),
    ],
)
def test_recipe_and_labels_of_the_data_that_do_not_fit_name_the_nearest(raw, labels, words):
    with pytest.raises(ConfigError, match=words):
        parse_recipe(raw).check_labels(labels)
    parse_recipe(raw).check_labels([])  # the data are not known yet


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


def test_different_components_get_different_names_and_equal_ones_are_one():
    recipe = parse_recipe({"a": [("rule", "exact", 1), ("rule", "exact", 1, {"normalised": False})]})
    assert [entry.name for entry in recipe.components()] == ["exact", "exact_2"]
    assert len(parse_recipe({"a": [("rule", "exact", 1)], "b": [("rule", "exact", 2)]}).components()) == 1


@pytest.mark.parametrize("weight", [np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_a_weight_may_be_a_number_of_numpy(weight):
    (entry,) = parse_recipe({"a": [("rule", "exact", weight)]}).components()
    assert entry.weight == weight and type(entry.weight) is float


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


def shipped_ocr(*settings):
    argv = ["--config", "experiment/diffusion/sd3_5/online_grpo_ocr", *settings]
    return engine_arguments(parse_run(DiffusionRunConfig, argv).config.reward)["reward_recipe"].entries[ANY_LABEL]


def test_components_and_settings_on_the_command_line_of_a_shipped_recipe():
    (entry,) = shipped_ocr("reward.components.ocr=1.0", "reward.kwargs.ocr.mode=7")
    assert (entry.key, entry.weight, entry.kwargs) == ("ocr", 1.0, {"mode": 7})
    (entry,) = shipped_ocr("reward.kwargs.ocr.mode=7")
    assert (entry.key, entry.weight, entry.kwargs) == ("ocr", 1.0, {"mode": 7})
    added = shipped_ocr("reward.components.look=0.3", "reward.kwargs.look.scorer=hpsv2", "reward.components.ocr=0.5")
    assert [(entry.name, entry.key, entry.weight) for entry in added] == [("ocr", "ocr", 0.5), ("look", "hpsv2", 0.3)]
    assert [entry.key for entry in shipped_ocr("--reward_recipe", "{'*': [[rule, exact, 1.0]]}")] == ["exact"]


LABELLED = {
    "count": [("rule", "numeric", 1.0, {"tolerance": 0.01, "absolute": 2}), ("rule", "format", 0.2)],
    "*": [("rule", "exact", 1.0), ("func", "numeric", 0.5), ("remote", "judge", 1.0)],
}


def test_components_change_weights_where_they_stand_and_are_added_to_every_label():
    recipe = compose_recipe(parse_recipe(LABELLED), {"format": 0.4, "choice": 2.0}, {"choice": {"letters": "AB"}})
    weights = {label: [(e.name, e.weight) for e in rows] for label, rows in recipe.entries.items()}
    assert weights == {
        "count": [("numeric", 1.0), ("format", 0.4), ("choice", 2.0)],
        "*": [("exact", 1.0), ("numeric_2", 0.5), ("judge", 1.0), ("choice", 2.0)],
    }
    assert recipe.average and recipe.entries["*"][-1].kwargs == {"letters": "AB"}


def test_settings_are_laid_over_those_of_the_recipe():
    kwargs = {"numeric": {"absolute": 3}, "numeric_2": {"tolerance": 1}, "judge": {"score_key": "tone"}}
    recipe = compose_recipe(parse_recipe(LABELLED), {}, kwargs)
    first, (_, second, judge) = recipe.entries["count"][0], recipe.entries["*"]
    assert first.kwargs == {"tolerance": 0.01, "absolute": 3} and second.kwargs == {"tolerance": 1}
    assert (second.type, second.name, judge.score_key) == ("func", "numeric_2", "tone") and not recipe.average
    other = compose_recipe(parse_recipe(LABELLED), {}, {"numeric": {"scorer": "choice", "letters": "AB"}})
    assert (other.entries["count"][0].key, other.entries["count"][0].kwargs) == ("choice", {"letters": "AB"})


def http(**more):
    return {"transport": "http", **more}


def composed(**kwargs):
    return compose_recipe(parse_recipe(LABELLED), {}, kwargs)


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        (parse_recipe, ({"a": [["rul", "exact", 1]]},), "label 'a', entry 1: type 'rul'; did you mean 'rule'"),
        (parse_recipe, ({"a": [["rule", "exact"]]},), r"\[type, key, weight\]"),
        (parse_recipe, ({"a": [["rule", "exact", "much"]]},), "weight 'much'"),
        (parse_recipe, ({"a": [["rule", "exact", 1, 3]]},), "settings are a mapping"),
        (parse_recipe, ({"a": [{"typ": "rule"}]},), "unknown key 'typ'; did you mean 'type'"),
        (parse_recipe, ({"a": [["func", "a.py:time", 1]]},), "label 'a', entry 1: reward/time is a metric of the run"),
        (recipe_from_components, ({"invalid_share": 1.0},), "reward/invalid_share is a metric of the run"),
        (load_recipe, ("gone.yaml",), "gone.yaml does not exist"),
        (load_recipe, ("{a: [",), "inline reward recipe is not valid YAML"),
        (recipe_from_components, ({"ocr": 1.0}, {"orc": {}}), "kwargs.orc.*did you mean 'ocr'"),
        (recipe_from_components, ({"ocr": 1.0}, {"ocr": http()}), "needs url"),
        (recipe_from_components, ({"j": 1.0}, {"j": http(url="http://h", mode=1)}), "server's own setting"),
        (lambda: composed(numerc={"tolerance": 1}), (), "kwargs.numerc.*did you mean 'numeric'"),
        (lambda: composed(judge={"mode": 1}), (), "kwargs.judge.*is a remote.*no setting 'mode'"),
        (lambda: composed(numeric=http(url="http://h")), (), "server's own setting"),
    ],
)
def test_what_is_no_recipe_or_contradicts_one_is_refused(read, given, words):
    with pytest.raises(ConfigError, match=words):
        read(*given)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a:\n  - [rule, exact, 1.0]\nb: [\n", "recipe.yaml:4: "),
        ("a:\n  - [rule, exact]\n", "recipe.yaml: reward recipe, label 'a', entry 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, words):
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_recipe(str(tmp_path / "recipe.yaml"))


def test_settings_need_something_they_belong_to():
    with pytest.raises(ConfigError, match="reward.components or of the reward_recipe"):
        RewardConfig(kwargs={"ocr": {"mode": 7}})
