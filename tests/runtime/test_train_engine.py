"""Training forwards run in training mode, scoring in evaluation mode, whatever was done before."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from launched import run_ranks
from tiny_models import checkpoint_of, inputs_of, mixed_prompts, rollouts_of

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.loading import add_lora, load_transformer
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.runtime.train_engine import TrainEngine

RULE = ScoringRule(temperature=1.0)


class PlainBackend:
    """What TrainEngine needs of DeepSpeed's engine, with ordinary backward passes."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.last = last

    def backward(self, loss, scale_wrt_gas: bool) -> None:
        loss.backward()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("checkpoints"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def inputs(checkpoint):
    return inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts(videos=False)))


def engine_of(checkpoint, **settings) -> TrainEngine:
    model = ModelConfig(**settings)
    transformer = load_transformer(checkpoint.path, model, torch.float32)
    torch.manual_seed(0)
    actor = Actor(add_lora(transformer, model), [], checkpoint.eos_ids)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return TrainEngine(PlainBackend(actor), zero_stage=0, max_norm=1.0)


def with_saved_bytes(run):
    """(result, bytes that autograd keeps of this forward for its backward, weights aside)."""
    kept: dict[int, int] = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and not (tensor._base is not None and tensor._base.is_leaf):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(kept.values())


def test_gradient_checkpointing_keeps_a_third_at_most_and_gives_the_same_gradients(checkpoint, inputs):
    sizes, gradients = [], []
    for checkpointing in (False, True):
        engine = engine_of(checkpoint, gradient_checkpointing=checkpointing)
        output, size = with_saved_bytes(partial(engine, inputs, RULE))
        sizes.append(size)
        engine.accumulate(output.log_probs.sum(), last=True)
        assert not engine.poisoned
        gradients.append([p.grad for p in engine.module.parameters() if p.grad is not None])
    assert sizes[1] <= sizes[0] / 3
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_scoring_is_without_dropout_and_training_with_it(checkpoint, inputs):
    engine = engine_of(checkpoint, lora_rank=4, lora_dropout=0.5)
    with torch.no_grad():
        first, second = (engine(inputs, RULE).log_probs for _ in range(2))
    assert torch.equal(first, second)
    trained = engine(inputs, RULE).log_probs
    assert (trained - first).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(engine(inputs, RULE).log_probs, first)
    assert engine.module.training  # backward is still to come
    engine.accumulate(trained.sum(), last=True)
    assert not any(module.training for module in engine.module.modules())


def test_what_backward_recomputes_has_the_dropout_of_the_forward_though_scoring_came_between(checkpoint, inputs):
    engine = engine_of(checkpoint, lora_rank=4, lora_dropout=0.5)
    run = partial(engine, inputs, RULE)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            engine.module.transformer.gradient_checkpointing_enable({"use_reentrant": False})
        engine.module.zero_grad()
        torch.manual_seed(1)
        loss = run().log_probs.sum()
        with torch.no_grad():
            run()
        engine.accumulate(loss, last=True)
        gradients.append([p.grad.clone() for p in engine.module.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_reference_is_the_starting_policy_in_bfloat16_at_every_zero_stage(checkpoint, tmp_path):
    out = tmp_path / "differences.json"
    run_ranks("reference_ranks.py", checkpoint.path, str(out), ranks=1, folder=Path(__file__).parent)
    differences = json.loads(out.read_text())
    assert differences.keys() == {"0", "1", "2", "3"}
    assert max(differences.values()) <= 1e-3, differences


def test_states_and_weights_that_wait_on_the_host_change_no_step(tmp_path):
    run_ranks("offload_ranks.py", str(tmp_path), folder=Path(__file__).parent)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results.keys() == {"1", "2", "3"}
        for stage, result in results.items():
            assert result["seen"] and result["moved"] == result["plain"], stage
            assert result["adam_offload"] == pytest.approx(result["plain"], abs=1e-5), stage
