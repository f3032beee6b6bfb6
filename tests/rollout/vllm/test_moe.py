"""A mixture of experts in vLLM: the trainer's weights get into its fused experts, and what it says of its choices."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import check_parity, environment_restored, vllm_rig
from moe import moe_checkpoint
from tiny_models import mixed_prompts

from lightrft_visual.config.vl import AlgorithmConfig, RolloutConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.rollout.parity import ParityGate
from lightrft_visual.rollout.vllm.arguments import VLLMSettings, check_engine, engine_arguments, prepare_environment

PLAIN = SamplingSettings(n=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return moe_checkpoint(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def rig(checkpoint):
    with vllm_rig(checkpoint) as rig:
        yield rig


def config_of(mode: str, **model) -> RunConfig:
    rollout = RolloutConfig(prompt_max_len=64, generate_max_len=64)
    config = RunConfig(rollout=rollout, algorithm=AlgorithmConfig(routing_replay=mode))
    config.model.bf16 = bool(model.get("bf16"))
    return config


def test_fused_experts_follow_the_trainer_as_loaded_and_after_each_sync(rig):
    """What the trainer holds is [experts, out, in], what vLLM's loader takes [experts, in, out]."""
    check_parity(rig, mixed_prompts(), PLAIN)


def test_a_recorded_reply_of_vllms_is_what_the_trainer_replays(rig):
    """The form of `CompletionOutput.routed_experts`; its numbers are those of engine hf, as this build gives none."""
    (prompt,) = rig.stage.requests(mixed_prompts().select([1]))
    tokens, drawn = list(prompt.token_ids), [60, 61, 62]
    told = np.zeros((len(tokens) + len(drawn) - 1, 2, 3), dtype=np.uint8) + np.array([5, 0, 7], dtype=np.uint8)
    log_probs = SimpleNamespace(token_ids=drawn, logprobs=[-1.0] * 3)
    reply = SimpleNamespace(
        prompt_token_ids=tokens,
        outputs=[
            SimpleNamespace(token_ids=drawn, logprobs=log_probs, finish_reason="length", routed_experts=each)
            for each in (told, None)
        ],
    )
    with_record, without = rig.engine.completions(reply, PLAIN, continued=0)
    assert torch.equal(with_record.experts, torch.from_numpy(told)) and without.experts is None
    told[:] = 0  # vLLM's own memory
    assert with_record.experts[0, 0].tolist() == [5, 0, 7]


def test_routing_replay_asks_vllm_for_its_choices(checkpoint):
    with environment_restored():
        prepare_environment("float32")
        asked = {
            mode: engine_arguments(VLLMSettings.from_config(config_of(mode), checkpoint), on_cpu=False)
            for mode in ("off", "old", "rollout")
        }
    name = "enable_return_routed_experts"
    assert asked["rollout"][name] is True and name not in asked["off"] and name not in asked["old"]


def test_an_engine_that_cannot_tell_its_choices_is_refused_before_it_is_built(checkpoint):
    with environment_restored(), pytest.raises(ConfigError, match="cannot say which experts it chose; use old"):
        check_engine(config_of("rollout"), checkpoint)


def test_ranks_that_are_one_engine_are_not_asked_for_choices_that_one_of_them_is_told():
    settings = VLLMSettings("model", 64, tells_experts=True, tensor_parallel_size=2)
    with environment_restored():
        with pytest.raises(ConfigError, match="engine_tp_size vLLM tells one rank alone; use old"):
            engine_arguments(settings, on_cpu=False)
        assert engine_arguments(replace(settings, own_ranks=True), on_cpu=False)["enable_return_routed_experts"]


def test_the_parity_gate_holds_a_mixture_to_bounds_of_its_own(checkpoint):
    gates = [
        ParityGate.from_config(config_of("off", bf16=bf16), checkpoint, stage=None, engine=None, score=None,
                               reload=None, device=None)
        for bf16 in (False, True)
    ]  # fmt: skip
    assert [(gate.averages, gate.tolerance) for gate in gates] == [(True, 1e-4), (True, 0.1)]
