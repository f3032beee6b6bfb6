"""Which engine a run has, how it says so, which it refuses, and what an engine must give."""

from dataclasses import replace

import pytest
import torch
from tiny_models import checkpoint_of, text_prompts

from lightrft_visual.config import registry
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.experience.rollouts import Completion, PromptFeatures, SamplingSettings
from lightrft_visual.rollout.engine import (
    RolloutEngine,
    RolloutStage,
    build_engine,
    check_completions,
    check_engine,
    engine_in_words,
)
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor


def test_a_run_says_which_engine_it_has_and_why(root):
    kinds = {kind: checkpoint_of(root, kind) for kind in ("janus", "qwen2")}
    said = {
        (engine, kind): engine_in_words(parse_run(RunConfig, ["--engine_type", engine]).config, checkpoint)
        for engine in ("vllm", "hf")
        for kind, checkpoint in kinds.items()
    }
    assert said == {
        ("vllm", "janus"): "vllm: vLLM has no model of type janus",
        ("vllm", "qwen2"): "vllm",
        ("hf", "janus"): "hf: vLLM has no model of type janus",
        ("hf", "qwen2"): "hf",
    }


@pytest.fixture
def writer():
    registry.engines.register("writer", about="writes text")(lambda config, checkpoint, actor: None)
    yield "writer"
    registry.engines.remove("writer")


def test_an_engine_that_is_none_is_named(writer):
    config = parse_run(RunConfig, ["--engine_type", writer]).config
    with pytest.raises(ConfigError, match="rollout engine 'writer' is a NoneType; it must be a RolloutEngine"):
        build_engine(config, None, None)


@pytest.mark.plugin("unified")
def test_an_engine_that_only_writes_is_refused_for_a_model_that_draws(root, writer):
    config = parse_run(RunConfig, ["--engine_type", writer]).config
    with pytest.raises(ConfigError, match="engine writer only writes, and this model also draws: use --engine_type hf"):
        check_engine(config, checkpoint_of(root, "janus"))
    check_engine(config, checkpoint_of(root, "qwen2"))


@pytest.mark.plugin("unified")
def test_a_response_that_may_be_an_image_is_made_at_once(root):
    words = ["--engine_type", "hf", "--placement", "split", "async.max_staleness=1", "async.partial_rollouts=true"]
    config = parse_run(RunConfig, words).config
    with pytest.raises(ConfigError, match="partial_rollouts are for responses in text, and this model draws"):
        check_engine(config, checkpoint_of(root, "janus"))
    check_engine(config, checkpoint_of(root, "qwen2"))


class Counts(RolloutEngine):
    """Gives as many completions of a prompt more than asked for as `more` says, of `prompts` more prompts."""

    def __init__(self, more: int = 0, prompts: int = 0, streams: bool = False):
        self.more, self.prompts, self.streams = more, prompts, streams

    def generate(self, prompts, settings, finished=None):
        one = [Completion([5], [-0.5], "x", False, list(each.token_ids)) for each in prompts]
        for number, each in enumerate(one if finished else ()):
            finished(number, [each] * (settings.n + self.more))
        made = [[each] * (settings.n + (0 if self.streams else self.more)) for each in one]
        return (made + made)[: len(made) + self.prompts]


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"more": -3}, "gave 1 of each of 2"),
        ({"more": 2}, "gave 6 of each of 2"),
        ({"prompts": -1}, "gave 4 of each of 1"),
        ({"prompts": 1}, "gave 4 of each of 3"),
        ({"more": -3, "streams": True}, "gave 1 of each of 1"),
    ],
)
def test_an_engine_that_gives_another_number_of_completions_is_an_error(root, wrong, told):
    checkpoint = checkpoint_of(root, "qwen2")
    stage = RolloutStage(Counts(**wrong), MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 256), 3)
    requests = stage.requests(text_prompts().select([0, 1]))
    with pytest.raises(RolloutError, match=f"Counts was asked for 4 completions of each of . prompts, and {told}"):
        stage.draw(requests, SamplingSettings(n=4), finished=lambda first, made: None)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"text": "red"}, "a dict whose token_ids are a NoneType, not a list"),
        ({"token_ids": torch.tensor([5, 6])}, "a Completion whose token_ids are a Tensor"),
        ({"token_ids": [5, 6.0]}, "token ids that are no whole numbers from 0 on, such as 6.0"),
        ({"token_ids": [5, None]}, "token ids that are no whole numbers from 0 on, such as None"),
        ({"token_ids": [5, -1]}, "token ids that are no whole numbers from 0 on, such as -1"),
        ({"log_probs": [-0.5]}, "1 log-probs for 2 tokens"),
        ({"token_ids": [5] * 4, "log_probs": None}, "4 tokens, 3 are the most"),
    ],
)
def test_a_response_that_cannot_be_trained_on_is_refused_by_the_name_of_its_engine(made, told):
    prompt, settings = PromptFeatures("", [1], 7), SamplingSettings(max_new_tokens=3)
    right = Completion([5, 6], [-0.5, -0.5], "", False, [1])
    drawn, never_begun = replace(right, token_ids=[5] * 4, log_probs=None, image="a picture"), replace(right)
    never_begun.token_ids, never_begun.log_probs = [], None
    for each in (right, drawn, never_begun):
        check_completions(Counts(), [prompt], [[each]], settings)
    wrong = made if "text" in made else replace(right, **made)
    with pytest.raises(RolloutError, match=f"prompt 7: engine Counts gave {told}"):
        check_completions(Counts(), [prompt], [[wrong]], settings)
