"""Blocks that are checkpointed whole or but for attention: the same results, and what runs and is kept."""

import gc
import weakref

import pytest
import torch
import torch._dynamo
import torch.nn.attention.varlen
import torch.nn.functional as F
from equality import adapters, assert_same, loss_and_gradients, weighed
from tiny_models import checkpoint_of, grouped_rollouts, inputs_of, prompts_for, rollouts_of, text_prompts
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from watched import Operations

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import Rollout, ScoringRule
from lightrft_visual.models.checkpointed import (
    KeptAttention,
    checkpoint_blocks,
    checkpointing_func,
    dropped_out,
    keeps,
)
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.trainer.features.compiled_blocks import compile_blocks

HOW = ("none", "attention", "full")


@pytest.fixture
def checkpoint(root):
    return checkpoint_of(root, "qwen2_5_vl")


def actor_of(checkpoint, how: str, adapted: bool = False, share: bool = False, dropout: float = 0.0) -> Actor:
    model = load_transformer(checkpoint.path, ModelConfig(gradient_checkpointing=how), torch.float32)
    model = adapters(model, dropout) if adapted else model
    return Actor(model, [], checkpoint.eos_ids, share).train()


def rollouts(checkpoint) -> list[Rollout]:
    """Two responses to each prompt: text alone, one image, several."""
    found = grouped_rollouts(checkpoint, prompts_for(checkpoint, False))
    return sorted(found, key=lambda each: each.prompt.group_id)


def counted(actor: Actor, inputs) -> tuple[tuple, int, int]:
    """((loss, gradients), calls of attention in forward and backward, those before backward)."""
    actor.zero_grad(set_to_none=True)
    with Operations() as calls:
        loss = weighed(actor(inputs, ScoringRule()), inputs)
        before = calls.attentions
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
    return (loss.item(), gradients), calls.attentions, before


def compare(made: dict[str, Actor], inputs) -> None:
    """Equal losses and gradients of the actors, and how often each runs attention."""
    results = {}
    for how, actor in made.items():
        results[how], calls, once = counted(actor, inputs)
        assert once > 0 and calls == {"none": 1, "attention": 1, "full": 2}[how] * once
        assert_same(results[how], results["none"], 1e-6)


@pytest.mark.parametrize("packed,share,adapted", [(True, True, False), (False, False, True)])
def test_losses_and_gradients_are_the_same_and_attention_runs_once_where_it_is_kept(checkpoint, packed, share, adapted):
    inputs = inputs_of(checkpoint, rollouts(checkpoint)[:7], packed)
    compare({how: actor_of(checkpoint, how, adapted, share) for how in HOW}, inputs)


@pytest.mark.slow
def test_programs_of_compiled_blocks_keep_attention_too(root):
    """Of padded samples: attention is inside of them."""
    torch._dynamo.reset()
    text = checkpoint_of(root, "qwen2")
    made = {how: actor_of(text, how, True) for how in HOW[:2]}
    for actor in made.values():
        compile_blocks(actor, "eager")
    compare(made, inputs_of(text, rollouts_of(text, text_prompts())))


class Block(torch.nn.Module):
    """Attention over three heads, then dropout; `extra` is called inside."""

    def __init__(self, heads: int = 3, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.qkv = heads, torch.nn.Linear(heads * width, 3 * heads * width)
        self.attention_dropout, self.extra = 0.0, lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.extra()
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout)
        return F.dropout(attended.transpose(1, 2).flatten(2), 0.5) + x


def checkpointed(block: Block, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(2)
    return checkpointing_func("attention", "a tiny model")(block, x)


def gradient(output: torch.Tensor, block: Block, **settings) -> torch.Tensor:
    return torch.autograd.grad(output.square().sum(), block.qkv.weight, **settings)[0]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(4))


def test_operations_that_only_the_second_run_makes_are_let_through_and_a_graph_may_run_backward_twice(x):
    """As those that gather weights under ZeRO-3."""
    block = Block()
    torch.manual_seed(2)
    wanted = gradient(block(x), block)
    output = checkpointed(block, x)
    block.extra = lambda: torch.arange(7).roll(3)
    first = gradient(output, block, retain_graph=True)
    torch.testing.assert_close(first, wanted)
    assert torch.equal(gradient(output, block), first)


def test_what_is_kept_leaves_with_the_graph_without_a_collection(x):
    block, kept, model = Block(), [], KeptAttention("a tiny model")

    def contexts():
        keep, give = model()
        kept.append(keep.results)
        return keep, give

    gc.disable()
    try:
        output = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        alive = [weakref.ref(each) for result in kept for each in result[0] if isinstance(each, torch.Tensor)]
        kept.clear()
        assert alive and all(ref() is not None for ref in alive)
        gradient(output, block)
        del output
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_operations_are_attention_by_their_name_and_not_where_they_write_or_draw():
    """Left out of the second run dropout would not draw, and the one behind it would draw others."""
    aten, varlen = torch.ops.aten, torch.ops.torch_attn
    flash, x = aten._scaled_dot_product_flash_attention.default, torch.ones(1)
    kept = aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention
    kept += aten._flash_attention_forward, varlen._varlen_attn
    left = aten.mm, aten._scaled_dot_product_flash_attention_backward, varlen._varlen_attn_backward
    assert keeps(flash) and all(keeps(each.default) for each in kept)
    assert not any(keeps(each.default) for each in left)
    assert not hasattr(varlen, "_varlen_attn_out") or not keeps(varlen._varlen_attn_out.default)  # not in torch 2.11
    assert dropped_out(flash, (x, x, x, 0.25), {}) and dropped_out(flash, (x, x, x), {"dropout_p": 0.1})
    assert not dropped_out(flash, (x, x, x, 0.0), None)


def test_a_model_without_attention_as_one_operation_is_refused_in_its_first_backward(checkpoint):
    actor = actor_of(checkpoint, "attention")
    actor.transformer.set_attn_implementation("eager")
    inputs = inputs_of(checkpoint, rollouts(checkpoint)[:3])
    with pytest.raises(ConfigError, match="attention of Qwen2_5_VLForConditionalGeneration: no block has"):
        loss_and_gradients(actor, [inputs])


def test_code_that_checkpoints_its_blocks_itself_or_has_none_is_refused(checkpoint):
    model = load_transformer(checkpoint.path, ModelConfig(), torch.float32)
    model._set_gradient_checkpointing = lambda module, value=False: None
    with pytest.raises(ConfigError, match="own code checkpoints whole blocks"):
        checkpoint_blocks(model, "attention")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="Qwen2_5_VLForConditionalGeneration has none"):
        checkpoint_blocks(model, "full")
