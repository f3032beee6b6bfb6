"""Linear attention in packed rows: each segment begins anew, as it does alone and padded."""

import pytest
import torch
from equality import adapters, assert_same, loss_and_gradients
from stock_families import grouped_samples, stock, stock_checkpoint

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.attention import Segments
from lightrft_visual.models.checkpointed import checkpoint_blocks
from lightrft_visual.models.states import divide_segments
from lightrft_visual.models.vlm.actor import Actor, Backbone
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.runtime.sequence import SequenceGroup
from lightrft_visual.trainer.features.compiled_blocks import compile_blocks

LENGTHS = [1, 5, 64, 65, 1, 130, 7]  # around the chunks of 64 tokens and the 4 of the short convolution


def actor_of(kind: str, how: str = "none", attention: str = "sdpa", wrap=lambda model: model) -> Actor:
    built = stock(kind, attention)
    checkpoint_blocks(built.model, how)
    banned = family_of(built.model.config).banned_ids(built.tokenizer)
    return Actor(wrap(built.model), banned, [1]).train()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return stock_checkpoint(tmp_path_factory.mktemp("models"), "qwen3_5")


def rows(lengths: list[int]) -> ModelInputs:
    """Text of samples of these lengths in one row."""
    ids = torch.randint(20, 200, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    actions = torch.zeros(len(lengths), 1, dtype=torch.bool)
    return ModelInputs(ids, torch.ones_like(ids), actions, list(lengths), [0] * len(lengths))


@pytest.mark.parametrize(
    ("kind", "attention"), [("qwen3_5", "sdpa"), ("qwen3_5_moe", "eager"), ("minicpmv4_6", "sdpa")]
)
@torch.no_grad()
def test_segments_of_any_length_are_as_alone(kind, attention):
    actor = actor_of(kind, attention=attention)
    actor.backbone.stands_in = False  # a blank image for each: not of interest here
    inputs = rows(LENGTHS)
    found = actor.backbone.hidden_states(inputs).split(LENGTHS)
    for part, ids in zip(found, inputs.sequences.split(LENGTHS, dim=1)):
        alone = actor.backbone.hidden_states(ModelInputs(ids, torch.ones_like(ids), inputs.action_mask))
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("how", "lora"), [("none", False), ("attention", True), ("full", False)])
def test_packed_and_shared_losses_and_gradients_are_those_of_padded_samples(checkpoint, how, lora):
    wrap = adapters if lora else lambda model: model
    padded, packed = grouped_samples(checkpoint)
    wanted = loss_and_gradients(actor_of("qwen3_5", wrap=wrap), [padded])
    assert any("linear_attn" in name and gradient.any() for name, gradient in wanted[1].items())
    actor = actor_of("qwen3_5", how, wrap=wrap)
    for actor.backbone.share_prefix in (False, True):
        assert_same(wanted, loss_and_gradients(actor, [packed]), 1e-5)


def test_samples_hold_each_segment_behind_the_one_that_it_continues():
    segments = Segments([2, 1, 3, 2], torch.device("cpu"), [None, None, 0, 0])
    read, real, back = segments.samples
    assert [row[mask].tolist() for row, mask in zip(read, real)] == [[2], [0, 1, 3, 4, 5], [0, 1, 6, 7]]
    assert read.flatten()[back].tolist() == [*range(8)] and real.flatten()[back].all()
    read, real, back = Segments([1, 3], torch.device("cpu")).samples
    assert real.tolist() == [[True, False, False], [True] * 3] and back.tolist() == [0, 3, 4, 5]


def test_prompts_are_shared_where_asked_for_rows_are_divided_once_and_other_divisions_are_refused():
    model = stock("qwen3_5").model
    family = family_of(model.config)
    assert [family.shares_prompts(wanted, True, "auto") for wanted in (None, True)] == [False, True]
    assert family.sharing_refused("auto") is None
    assert all(Backbone(model).by_segments for _ in range(2))  # one model that two hold
    divide_segments(model.base_model.language_model)
    (state,) = (layer.linear_attn for layer in model.base_model.language_model.layers if hasattr(layer, "linear_attn"))
    assert len(state._forward_pre_hooks) == len(state._forward_hooks) == 1
    with pytest.raises(ConfigError, match="sp_size: linear attention carries a state along the whole row"):
        Actor(model, [], [], sequence=SequenceGroup(2, 0, None, None))
    with pytest.raises(ConfigError, match="PyTorch's attention alone, without experts, not a qwen3_5"):
        compile_blocks(Actor(model, [], []), "eager")
