"""Settings that a model cannot follow are refused by name."""

import inspect
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
from transformers import (
    CONFIG_MAPPING,
    Glm4vMoeConfig,
    GPT2Config,
    JanusConfig,
    Kimi_K25Config,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
)

from lightrft_visual.config.load import load_config
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.routing import BY_SIGMOID
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.trainer.vl.updates import check_abilities


def check(config, flags: str) -> None:
    family = family_of(config)
    checkpoint = SimpleNamespace(family=family, config=config, processor=object() if family.draws else None)
    check_abilities(load_config(RunConfig, flags.split(), preset=None), checkpoint)


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (Qwen2Config(), "--drawing_entropy_coef 0.0", "drawing_entropy_coef.*writes text only; leave it out"),
        (Qwen2Config(), "--papo_coef 0.01", "papo_coef hides parts of images: this model reads text only"),
        (Qwen2Config(), "--noisy_rollout_share 0.5", "noisy_rollout_share.*this model reads text only"),
        *(
            (config, "--image_dependence_every 5", "image_dependence_every measures models that see and do not draw")
            for config in (Qwen2Config(), JanusConfig())
        ),
        (
            Qwen3VLMoeConfig(),
            "--compile",
            "compile: its experts are noted between operations; leave it out",
        ),
        (Qwen3_5Config(), "--compile", "compile: its linear attention carries a state along a row; leave it out"),
        (Qwen3_5Config(), "--sp_size 2", "sp_size 2 divides packed rows over ranks: its linear attention carries"),
        (JanusConfig(), "--sp_size 2", "sp_size 2: a model that draws is scored on whole rows; leave it at 1"),
        (JanusConfig(), "--entropy_target 1.0", "entropy_target is one entropy"),
        (Kimi_K25Config(), "--router_aux_loss_coef 0.01", "this model's routers do not choose by a softmax; leave it"),
        (Glm4vMoeConfig(), "--router_aux_loss_coef 0.01", "this model's routers do not choose by a softmax; leave it"),
        (GPT2Config(), "--compile", "compile: it is not proven for model type 'gpt2'; leave it out"),
        (Qwen2Config(), "--compile --attn_implementation eager", "attn_implementation eager does not take segments"),
    ],
)
def test_what_a_model_cannot_do_is_refused(config, flags, message):
    with pytest.raises(ConfigError, match=message):
        check(config, flags)


def test_what_it_can_do_is_not():
    check(Qwen2Config(), "--compile")
    check(Qwen3_5Config(), "--packing_samples")
    check(Qwen3VLMoeConfig(), "--router_aux_loss_coef 0.01")
    check(JanusConfig(), "--drawing_entropy_coef 0.0 --entropy_coef 0.05")


@pytest.mark.parametrize("model_type", BY_SIGMOID)
def test_routers_that_score_each_expert_alone_are_those_of_transformers(model_type):
    code = import_module(CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_"))
    assert re.search(r"router_(logits|scores)[.()a-z]*sigmoid|sigmoid\(router_(logits|scores)", inspect.getsource(code))
