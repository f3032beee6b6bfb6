"""Reward functions written for other systems, each as it is there: the tables of docs/coming_from.md."""

import logging
import re
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from reward_rollouts import make_samples

from lightrft_visual.config import registry
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rewards.batch import batch_from_media, batch_from_samples
from lightrft_visual.rewards.local.callables import CallableSource, tell_once
from lightrft_visual.rewards.local.forms import AUTO, choose_form
from lightrft_visual.rewards.settings import engine_arguments
from lightrft_visual.runtime.usercode.calls import LOG_EXTRA, invoke

FOLDER = Path(__file__).parent / "forms"
DOCS = (Path(__file__).parents[3] / "docs/coming_from.md").read_text()
CHAT = [{"role": "user", "content": "red or blue?"}]


def samples():
    rows = [
        {"data_source": "gsm8k", "extra_info": {"index": 1}},
        {"data_source": "geo", "extra_info": {"index": 2}, "prompt": CHAT},
        {"data_source": "geo", "extra_info": {"index": 3}},
    ]
    made = make_samples(["red", "Blue", "x"], ["red", "green", "x"], metadata=rows)
    made.policy_version = 2
    return made


def run(spec, outputs=None, columns=None, **settings):
    names = ",".join(f"{FOLDER}/{part}" for part in spec.split(","))
    config = RewardConfig(reward_fn=names, reward_max_invalid=1.0, **settings)
    engine = RewardComputationEngine.from_config(config, columns={"data_source", "extra_info"} | (columns or set()))
    try:
        return engine.compute_rewards([outputs or samples()])
    finally:
        engine.close()


# function -> (form, rewards, some of its further metrics)
TEXT = {
    "trl_text.py:accuracy": ("trl", [1, 0, 1], {}),
    "trl_text.py:warm_up": ("trl", [1.5, 2, 0.5], {}),
    "trl_text.py:with_logs": ("trl", [1, 1, None], {"length": [3, 4, 1], "mean_length": [8 / 3] * 3}),
    "trl_chat.py:format_reward": ("trl_chat", [0, 0, 0], {}),
    "trl_chat.py:question_in_answer": ("trl_chat", [0, 0, 0], {}),
    "trl_chat.py:later": ("trl_chat", [3, 4, 1], {}),
    "openrlhf.py:reward_func": ("openrlhf", [1, 0, 1], {"right": [1, 0, 1]}),
    "openrlhf.py:with_keywords": ("openrlhf", [1, 0, 1], {}),
    "verl.py:compute_score": ("verl", [1, 0.2, 1], {"acc": [1, 0, 1]}),
    "verl.py:plain": ("verl", [1, 0, 1], {}),
    "verl.py:later": ("verl", [1, 0, 1], {}),
    "verl.py:passed_on": ("verl", [1, 0, 1], {}),
    "verl.py:by_kwargs": ("verl", [1, 0, 3], {}),
    "verl.py:batch_passed_on": ("verl_batch", [1, 0, 1], {}),
    "verl.py:batch_by_kwargs": ("verl_batch", [1, 0, 1], {}),
    "verl.py:batched_plain": ("verl_batch", [1, 0, 1], {}),
    "verl.py:batched": ("verl_batch", [1, 0, 1], {}),
    "easyr1.py:compute_score": ("easyr1", [1, 0, 1], {"format": [1, 0, 1], "accuracy": [1, 0, 1]}),
    "easyr1.py:passed_on": ("easyr1", [1, 0, 1], {"format": [1, 0, 1]}),
    "easyr1.py:sequential": ("easyr1_each", [1, 0, 1], {"format": [1, 0, 1]}),
    "easyr1.py:older": ("easyr1", [1, 0, 1], {"accuracy": [1, 0, 1]}),
    "easyr1.py:oldest": ("easyr1_each", [1, 0, 1], {"accuracy": [1, 0, 1]}),
    "roll.py:single_choice_reward": ("roll", [1, -1, 1], {"format": [1, 0, 1], "correct": [1, 0, 1]}),
    "roll.py:plain": ("roll", [1, 0, 1], {}),
    "roll.py:passed_on": ("roll", [1, 0, 1], {}),
}


def same(values, wanted):
    expected = torch.tensor([float("nan") if each is None else float(each) for each in wanted])
    return torch.allclose(values.float(), expected, equal_nan=True)


@pytest.mark.parametrize("name", TEXT)
def test_a_function_of_another_system_runs_as_it_is(name, caplog):
    caplog.set_level(logging.INFO)
    tell_once.cache_clear()
    form, rewards, metrics = TEXT[name]
    result = [run(name) for _ in range(2)][1]  # as a run asks once before it starts
    assert same(result.score, rewards)
    assert all(same(result.components[key], values) for key, values in metrics.items())
    told = f"{name.partition(':')[2]}: {registry.reward_forms.load(form).told}"
    assert caplog.messages.count(f"reward function {told}; reward_form chooses another") == 1


def test_in_a_process_of_its_own_too():
    _, rewards, metrics = TEXT["trl_text.py:with_logs"]
    result = run("trl_text.py:with_logs", reward_fn_timeout=60.0)
    assert same(result.score, rewards)
    assert all(same(result.components[key], values) for key, values in metrics.items())


def test_texts_given_to_log_extra_are_not_kept_and_that_is_said(caplog):
    assert "text" not in run("trl_text.py:with_logs").components
    assert "log_extra: column 'text' holds more than numbers" in caplog.text


@pytest.mark.parametrize(
    "values", [torch.tensor([1.0, 0.0]), np.array([True, False]), [np.True_, np.False_], [torch.tensor(1), 0]]
)
def test_numbers_given_to_log_extra_are_kept_whatever_holds_them(values):
    said = invoke(lambda log_extra: log_extra("right", values), {"log_extra": LOG_EXTRA})
    assert said == (None, {"right": [1, 0]})


def test_several_functions_in_one_setting_are_summed():
    result = run("trl_text.py:accuracy,trl_text.py:warm_up")
    assert same(result.score, [2.5, 2, 1.5]) and list(result.components) == ["accuracy", "warm_up"]


def test_settings_of_a_recipe_reach_functions_of_other_systems():
    recipe = f'{{"*": [[func, "{FOLDER}/easyr1.py:compute_score", 1.0, {{format_weight: 0.5}}]]}}'
    engine = RewardComputationEngine.from_config(RewardConfig(reward_recipe=recipe))
    assert engine.compute_rewards([make_samples(["abc"], ["x"])]).score.tolist() == [0.5]


def test_lightrft_aggregates_by_the_names_of_the_rewards():
    labelled = make_samples(["red", "Blue"], ["red", "green"], labels=["brevity", None])
    result = run("lightrft.py:exactness,lightrft.py:brevity,lightrft.py:reward_fn", labelled)
    assert same(result.score, [1 / 3, 0]) and same(result.components["first"], [1, 0])


def test_the_form_can_be_chosen():
    assert same(run("trl_text.py:warm_up", reward_form="native").score, [1.5, 2, 0.5])
    with pytest.raises(RewardError, match="accuracy raised AssertionError"):
        run("trl_text.py:accuracy", reward_form="trl_chat")
    with pytest.raises(ConfigError, match="there is no reward_form 'verrl'; did you mean 'verl'"):
        engine_arguments(RewardConfig(reward_form="verrl"))


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("solution_str, ground_truth, dificulty", "asks for 'dificulty'.*did you mean 'difficulty'"),
        (
            "environments, **kwargs",
            "asks for environments, which have ended by now: leave it out where it reads their",
        ),
    ],
)
def test_a_parameter_that_nothing_fills_is_found_before_the_run(tmp_path, parameters, told):
    (tmp_path / "mine.py").write_text(f"def score({parameters}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=told):
        engine_arguments(RewardConfig(reward_fn=f"{tmp_path}/mine.py:score"), columns={"difficulty"})


def test_a_native_function_that_reads_replies_of_a_server_stays_native(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "def reply(text):\n    return {'choices': [{'message': {'content': text}}]}\n"
        "def score(completions):\n"
        "    return [float(len(reply(c)['choices'][0]['message']['content'])) for c in completions]\n"
    )
    caplog.set_level(logging.INFO)
    engine = RewardComputationEngine.from_config(RewardConfig(reward_fn=f"{tmp_path}/mine.py:score"))
    assert engine.compute_rewards([make_samples(["ab"])]).score.tolist() == [2] and "form" not in caplog.text


@pytest.mark.parametrize(
    ("name", "rewards", "metrics"),
    [
        ("jpeg_size", None, {}),
        ("redness", [1, 0], {}),
        ("multi", [1, 0.5], {"red": [1, 0], "colors_accuracy": [1, None], "position_accuracy": [None, None]}),
        ("geneval", [0.5, 0.5], {"accuracy": [1, 1], "strict_accuracy": [0, 0]}),
    ],
)
def test_scorers_of_flow_grpo(name, rewards, metrics, caplog):
    caplog.set_level(logging.INFO)
    engine = RewardComputationEngine.from_config(RewardConfig(reward_fn=f"{FOLDER}/flow_grpo.py:{name}"))
    red, green = torch.zeros(2, 3, 8, 8)
    red[0], green[1] = 1, 1
    result = engine.score_media(["a", "b"], images=[red, green])
    assert result.valid.all() if rewards is None else same(result.score, rewards)
    assert all(same(result.components[key], values) for key, values in metrics.items())
    assert f"reward function {name}: flow_grpo's form" in caplog.text


def test_chat_messages_are_recognised_in_partials_and_methods():
    class Lengths:
        def score(self, completions, least=0, **kwargs):
            return [float(len(completion[0]["content"])) for completion in completions]

    batch = batch_from_samples([make_samples(["abc"])])
    for function in (Lengths().score, partial(Lengths().score, least=1)):
        assert CallableSource(function).score(batch).values.tolist() == [3]


def decorated(function):
    @wraps(function)
    def of_texts(completions, **kwargs):
        return function([completion[0]["content"] for completion in completions], **kwargs)

    return of_texts


def last(completion):
    return completion[-1]["content"]


@decorated
def by_decorator(completions, **kwargs):
    return [float(len(text)) for text in completions]


def by_default(completions, read=last, **kwargs):
    return [float(len(read(completion))) for completion in completions]


# fmt: off
LAMBDAS = [by_default, lambda completions, **kwargs: [-float(len(text)) for text in completions]]
ON_ITS_LINE = dict(
    chat=lambda completions, **kwargs: [float(len(completion[0]["content"])) for completion in completions])
# fmt: on


@pytest.mark.parametrize(
    ("function", "score"), [(by_decorator, 3), (by_default, 3), (LAMBDAS[1], -3), (ON_ITS_LINE["chat"], 3)]
)
def test_chat_messages_are_recognised_in_decorators_defaults_and_lambdas_but_not_in_their_neighbours(function, score):
    batch = batch_from_samples([make_samples(["abc"])])
    assert CallableSource(function).score(batch).values.tolist() == [score]


def test_a_function_that_reads_messages_or_mappings_of_another_column_is_given_texts():
    def reads(completions, history, docs):
        told = zip(completions, history, docs, strict=True)
        return [
            len(text) + (turns[-1]["role"] == "user") + (found[0].get("content") in text) for text, turns, found in told
        ]

    row = {"history": [{"role": "user", "content": "q"}], "docs": [{"content": "b"}]}
    batch = batch_from_samples([make_samples(["abc"], metadata=[row])])
    assert CallableSource(reads).score(batch).values.tolist() == [5]


def test_a_function_that_reads_a_text_as_messages_is_told_of_the_form():
    def loop(completions):
        return [float(len(message["content"])) for completion in completions for message in completion]

    batch = batch_from_samples([make_samples(["abc"])])
    with pytest.raises(RewardError, match="chat messages: .*or --reward_form trl_chat") as told:
        CallableSource(loop).score(batch)
    assert "string indices must be integers" in str(told.value)
    assert CallableSource(loop, form="trl_chat").score(batch).values.tolist() == [3]
    with pytest.raises(RewardError) as told:
        CallableSource(lambda completions: completions[0].text, form="trl").score(batch)
    batch.references = ["abc"]
    with pytest.raises(RewardError, match="string indices") as other:
        CallableSource(lambda references: references[0]["x"]).score(batch)
    assert "trl_chat" in str(told.value) and "trl_chat" not in str(other.value)


def test_flow_grpo_scores_videos_as_one_tensor():
    engine = RewardComputationEngine.from_config(RewardConfig(reward_fn=f"{FOLDER}/flow_grpo.py:video"))
    assert same(engine.score_media(["a"], videos=[torch.ones(3, 12, 4, 4)]).score, [1])


def test_flow_grpo_is_given_the_first_image_that_each_was_made_from():
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (3, 2), "blue")
    edits = batch_from_media(["p", "q"], images=[red, red], source_images=[[blue], [red, blue]])
    first = CallableSource(lambda images, prompts, metadata, ref_images: [image.width for image in ref_images])
    assert first.score(edits).values.tolist() == [3, 2]


def test_a_function_with_more_names_of_ours_is_not_taken_for_flow_grpos():
    forms = [
        choose_form(AUTO, lambda: None, SimpleNamespace(names=names.split(), takes_all=False))
        for names in ("images prompts metadata ids", "images prompts metadata", "images prompts metadatas only_strict")
    ]
    flow_grpo = registry.reward_forms.load("flow_grpo").told
    assert [form.told for form in forms] == ["", flow_grpo, flow_grpo]


def test_a_factory_cannot_run_in_a_process_of_its_own():
    config = RewardConfig(reward_fn=f"{FOLDER}/flow_grpo.py:redness", reward_fn_timeout=5.0)
    with pytest.raises(ConfigError, match="makes its scorer at the start"):
        RewardComputationEngine.from_config(config)


def test_every_form_is_documented_and_every_function_of_the_forms_has_a_test():
    defined = {
        f"{path.name}:{name}"
        for path in FOLDER.glob("*.py")
        for name in re.findall(r"^(?:async )?def ([a-z]\w*)", path.read_text(), re.M)
    }
    assert defined - {"trl_chat.py:text_of"} == {
        *TEXT, *(f"flow_grpo.py:{n}" for n in ("jpeg_size", "redness", "multi", "geneval", "video")),
        *(f"lightrft.py:{n}" for n in ("reward_fn", "exactness", "brevity")),
    }  # fmt: skip
    assert all(f"`{form}`" in DOCS for form in (AUTO, *registry.reward_forms.names()))
