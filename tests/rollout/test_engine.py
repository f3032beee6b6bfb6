"""One engine or two: which prompts go where, and how runs say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from tiny_models import checkpoint_of

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.engine import EngineByKind, check_engine, engine_in_words


@dataclass
class Noted:
    """An engine that notes its calls and gives back each prompt's name."""

    name: str
    streams: bool = True
    lacks_weights: bool = False
    calls: list = field(default_factory=list)

    def generate(self, prompts, settings, finished=None):
        self.calls.append(("generate", [prompt.name for prompt in prompts]))
        made = [[f"{self.name} {prompt.name}"] for prompt in prompts]
        for number in reversed(range(len(made))):
            if finished is not None:
                finished(number, made[number])
        return made

    def __getattr__(self, call):
        return lambda *arguments: self.calls.append((call, *arguments))


def prompt(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, draws=name.startswith("draw"))


def test_prompts_go_to_the_engine_of_their_kind_and_come_back_in_order():
    writer, drawer, told = Noted("writes"), Noted("draws"), {}
    engine = EngineByKind(writer, drawer)
    names = ["draw a", "say b", "say c", "draw d"]
    made = engine.generate([prompt(name) for name in names], None, told.__setitem__)
    assert made == [["draws draw a"], ["writes say b"], ["writes say c"], ["draws draw d"]]
    assert told == dict(enumerate(made))
    assert engine.generate([], None) == [] and [each.calls[-1] for each in (writer, drawer)] == [("generate", [])] * 2


def test_new_weights_and_sleep_are_the_writers():
    writer, drawer = Noted("writes"), Noted("draws", streams=False)
    engine = EngineByKind(writer, drawer)
    assert not engine.shares_weights and not engine.streams and not engine.lacks_weights
    writer.lacks_weights = True
    assert engine.lacks_weights
    engine.update_weights("weights")
    engine.sleep(False)
    engine.wake()
    engine.reset_caches()
    engine.close()
    assert writer.calls == [("update_weights", "weights"), ("sleep", False), ("wake",), ("reset_caches",), ("close",)]
    assert drawer.calls == [("reset_caches",), ("close",)]


def test_a_run_says_which_engine_draws(tmp_path):
    kinds = {kind: checkpoint_of(tmp_path, kind) for kind in ("janus", "emu3", "qwen2")}
    said = {
        (engine, kind): engine_in_words(parse_run(RunConfig, ["--engine_type", engine]).config, checkpoint)
        for engine in ("vllm", "hf")
        for kind, checkpoint in kinds.items()
    }
    assert said == {
        ("vllm", "janus"): "vllm: vLLM has no model of type janus",
        ("vllm", "emu3"): "vllm, drawings by hf",
        ("vllm", "qwen2"): "vllm",
        ("hf", "janus"): "hf: vLLM has no model of type janus",
        ("hf", "emu3"): "hf",
        ("hf", "qwen2"): "hf",
    }


def test_workers_of_an_engine_that_only_writes_are_refused_for_a_model_that_draws(tmp_path):
    emu3 = checkpoint_of(tmp_path, "emu3")
    split = parse_run(RunConfig, ["--engine_type", "vllm", "--placement", "split"]).config
    with pytest.raises(ConfigError, match="placement split: engine vllm only writes, and this model also draws"):
        check_engine(split, emu3)
    check_engine(parse_run(RunConfig, ["--engine_type", "vllm"]).config, emu3)


def test_a_response_that_may_be_an_image_is_made_at_once(tmp_path):
    words = ["--engine_type", "hf", "--placement", "split", "async.max_staleness=1", "async.partial_rollouts=true"]
    config = parse_run(RunConfig, words).config
    with pytest.raises(ConfigError, match="partial_rollouts are for responses in text, and this model draws"):
        check_engine(config, checkpoint_of(tmp_path, "janus"))
    check_engine(config, checkpoint_of(tmp_path, "qwen2"))
