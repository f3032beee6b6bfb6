"""Which engine a run has, how it says so, and which it refuses."""

import pytest
from tiny_models import checkpoint_of

from lightrft_visual.config import registry
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.engine import build_engine, check_engine, engine_in_words


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
