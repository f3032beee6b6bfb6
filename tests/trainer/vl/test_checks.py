"""Settings that a model cannot follow are refused by name."""

import inspect
import json
import re
import shutil
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import checkpoint_of
from transformers import (
    CONFIG_MAPPING,
    Glm4vMoeConfig,
    GPT2Config,
    JanusConfig,
    Kimi_K25Config,
    MambaConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
)

from lightrft_visual.config.load import load_config
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.config.vl import AlgorithmConfig, ModelConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.routing import BY_SIGMOID
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.rewards.settings import check_references
from lightrft_visual.trainer.vl.build import _open
from lightrft_visual.trainer.vl.checks import check_abilities, check_beside, check_judges


def check(config, flags: str) -> None:
    family = family_of(config)
    checkpoint = SimpleNamespace(family=family, config=config, processor=object() if family.draws else None)
    check_abilities(load_config(RunConfig, flags.split(), preset=None), checkpoint)


def test_a_model_without_attention_heads_is_refused_only_where_they_would_be_divided():
    check(MambaConfig(), "--engine_type hf")
    with pytest.raises(ConfigError, match="sp_size 2 does not divide the model's missing attention heads"):
        check(MambaConfig(), "--engine_type hf --sp_size 2")


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
        (
            Qwen2Config(),
            "--router_aux_loss_coef 0.01",
            "router_aux_loss_coef is for mixtures of experts: this model has",
        ),
        (
            Qwen2Config(),
            "--routing_replay old",
            "routing_replay old is for mixtures of experts: this model has no routers",
        ),
        (Qwen3VLMoeConfig(), "--routing_replay old --sp_size 2", "routing_replay old: with sp_size no rank sees all"),
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
    check(Qwen3VLMoeConfig(), "--routing_replay rollout --sp_size 2")
    check(JanusConfig(), "--drawing_entropy_coef 0.0 --entropy_coef 0.05")


@pytest.mark.parametrize("model_type", BY_SIGMOID)
def test_routers_that_score_each_expert_alone_are_those_of_transformers(model_type):
    code = import_module(CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_"))
    assert re.search(r"router_(logits|scores)[.()a-z]*sigmoid|sigmoid\(router_(logits|scores)", inspect.getsource(code))


def config_with(setting: str, path: object, **more) -> RunConfig:
    learns = {"critic_pretrain": {"advantage_estimator": "gae"}, "teacher_pretrain": {"teacher_coef": 1.0}}[setting]
    return RunConfig(model=ModelConfig(**{setting: str(path)}, **more), algorithm=AlgorithmConfig(**learns))


@pytest.mark.parametrize("setting", ["critic_pretrain", "teacher_pretrain"])
def test_a_critic_or_teacher_that_cannot_read_what_the_policy_reads_is_refused_before_a_model_loads(setting, tmp_path):
    kinds = {
        kind: checkpoint_of(tmp_path, kind) for kind in ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
    }
    text, policy = kinds["qwen2"], kinds["qwen2_5_vl"]
    for kind in ("qwen2", "internvl"):
        with pytest.raises(ConfigError, match=f"^{setting} .* is a {kind}, the policy is of another family"):
            check_beside(config_with(setting, kinds[kind].path), policy)
    with pytest.raises(
        ConfigError, match=f"^{setting} .* cannot read images from the policy's .* patches of 14 pixels"
    ):
        check_beside(config_with(setting, kinds["qwen3_vl"].path), policy)
    other = build_tiny_checkpoint(tmp_path / "other", "qwen2", texts=["quite other words"])
    with pytest.raises(ConfigError, match=f"^{setting} .* has other tokens than the policy"):
        check_beside(config_with(setting, other), text)
    with pytest.raises(ConfigError, match=f"{setting} .* is a qwen2_5_vl, the policy is of another family"):
        _open(config_with(setting, policy.path, pretrain=text.path))
    check_beside(config_with(setting, kinds["qwen2_vl"].path), policy)
    check_beside(config_with(setting, text.path), text)


def test_a_critic_needs_neither_tokenizer_nor_processor_and_may_be_a_reward_model(tmp_path):
    policy = checkpoint_of(tmp_path, "qwen2_5_vl")
    critic = Path(shutil.copytree(policy.path, tmp_path / "critic"))
    for file in critic.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    settings = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(settings | {"architectures": ["Qwen2ForTokenClassification"]}))
    check_beside(config_with("critic_pretrain", critic), policy)
    settings["text_config"]["vocab_size"] = len(policy.tokenizer) - 1
    (critic / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has other tokens than the policy"):
        check_beside(config_with("critic_pretrain", critic), policy)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--engine_tp_size 2", True), ("--engine_tp_size 2 --reward_transport ray", False), ("", False),
        ("--engine_tp_size 2 --placement split", False),
        ("--engine_tp_size 2 --components.format 1.0 --gold_recipe {judges}", True),
    ],
)  # fmt: skip
def test_a_judge_by_vllm_beside_a_policy_on_several_ranks_is_refused_before_a_model_loads(flags, refused, tmp_path):
    """vLLM's second engine of a process fails where it has another number of ranks."""
    judges = tmp_path / "judges.yaml"
    judges.write_text('{"*": [[rule, judge, 1.0, {model: m, engine: vllm}]]}')
    judge = "" if "judges" in flags else "--components.judge 1.0 --kwargs.judge.model m --kwargs.judge.engine vllm "
    config = load_config(RunConfig, (judge + flags).format(judges=judges).split(), preset=None)
    with pytest.raises(ConfigError, match="judge: .*engine_tp_size 2: .* use engine hf") if refused else nullcontext():
        check_judges(config)


@pytest.mark.parametrize(
    ("recipe", "labels", "told"),
    [
        (None, {None}, "exact is the reward when none is named, and compares .* no row of eval_data.*--reference_key"),
        ({"a": "exact", "*": "format"}, {"a", "b"}, "the scorer exact compares .* no row of eval_data"),
        ({"a": "exact", "*": "format"}, {None}, None),
        ({"*": "format"}, {"a"}, None),
    ],
)
def test_held_out_rows_without_the_reference_that_their_reward_compares_with_are_refused(recipe, labels, told):
    rules = {label: [["rule", name, 1.0]] for label, name in (recipe or {}).items()}
    trained, held_out = (
        SimpleNamespace(labels=own, video_labels=set(), columns=set(), has_references=own is not labels)
        for own in ({"a"}, labels)
    )
    config = RewardConfig(reward_recipe=json.dumps(rules) if rules else None)
    check_references(config, [trained], [])
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_references(config, [trained], [held_out])


def test_gold_that_scores_held_out_rows_alone_needs_no_references_of_others():
    trained, held_out = (SimpleNamespace(labels={None}, columns=set(), has_references=own) for own in (False, True))
    gold = RewardConfig(components={"exact": 1.0})
    check_references(gold, [], [held_out])
    with pytest.raises(ConfigError, match="exact compares"):
        check_references(gold, [trained], [held_out])
