"""What a computation holds, counted on meta tensors, against what it holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightrft_visual.plugins.memory_plan import meta as module
from lightrft_visual.plugins.memory_plan.meta import Held, LiveBytes, held_bytes, on_meta, remembered, weights_bytes

WIDTH, ROWS = 64, 32
LAYER = ROWS * WIDTH * 4  # bytes of one activation


class Stack(nn.Module):
    def __init__(self, checkpointed: bool = False, layers: int = 8):
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def held(module: nn.Module, backward: bool):
    x = torch.zeros(ROWS, WIDTH, device="meta")
    return held_bytes(module, lambda: module(x), backward=backward)


def test_a_forward_without_gradient_holds_few_activations() -> None:
    """The input of a part of the stack, and the input and the output of a layer in it."""
    assert held(on_meta(Stack), backward=False).peak == 3 * LAYER


def test_checkpointing_keeps_the_inputs_of_its_parts() -> None:
    stack = on_meta(Stack)
    plain, saving = held(stack, backward=True), held(on_meta(lambda: Stack(checkpointed=True)), backward=True)
    assert plain.kept == 2 * 8 * LAYER  # what each sigmoid gives out; the first input was there before
    assert saving.kept == 8 * LAYER
    assert saving.kept < saving.peak < plain.peak
    assert not any(parameter._post_accumulate_grad_hooks for parameter in stack.parameters())  # of the count


def test_it_agrees_with_what_autograd_saves_of_real_tensors() -> None:
    module, saved = Stack(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    x = torch.zeros(ROWS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(x)
    own = sum(size for place, size in saved.items() if place not in weights | {x.untyped_storage().data_ptr()})
    assert result.requires_grad and own == held(on_meta(Stack), backward=True).kept


def test_attention_keeps_no_scores_and_pytorchs_own_is_back_afterwards() -> None:
    own, heads, length = F.scaled_dot_product_attention, 4, 256

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.zeros(1, heads, length, 16, device="meta", requires_grad=True)
    found = held_bytes(Attention(), lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True), backward=True)
    assert found.kept < 4 * heads * length * 16 * 4 < heads * length * length * 4
    assert F.scaled_dot_product_attention is own


def test_views_and_known_tensors_do_not_count() -> None:
    known = torch.zeros(10, device="meta")
    with LiveBytes([known]) as live:
        view = known.view(2, 5)
        made = torch.zeros(4, device="meta")
        again = made[1:]
    assert live.now == live.peak == 16 and view.numel() + again.numel() == 13


def test_weights_are_counted_once_in_their_own_precision() -> None:
    module = on_meta(lambda: nn.Linear(3, 5))
    module.other = nn.Linear(3, 5, device="meta", dtype=torch.bfloat16)
    module.other.weight = module.weight
    assert weights_bytes(module) == 4 * (15 + 5) + 2 * 5


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_allocated(backward: bool) -> None:
    module = on_meta(lambda: nn.Linear(100_000, 100_000))
    x = torch.zeros(1, 100_000, device="meta")
    assert held_bytes(module, lambda: module(x), backward=backward).kept == 4 * 100_000


@pytest.fixture
def count(tmp_path, monkeypatch):
    """Counts a shape: the second number is how often it was asked for."""
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    counted = iter(range(1, 99))
    return lambda: Held(1, next(counted))


def test_a_shape_is_counted_once_by_the_same_code_and_an_intact_file(count, tmp_path, monkeypatch) -> None:
    assert remembered("one", count) == remembered("one", count) == Held(1, 1)
    (kept,) = (tmp_path / "plans").iterdir()
    for number, damaged in enumerate(("", "[1", "7", "[1]"), start=2):
        kept.write_text(damaged)
        assert remembered("one", count) == Held(1, number)
    assert remembered("another", count) == Held(1, 6) and remembered("one", count) == Held(1, 5)
    monkeypatch.setattr(module, "_code", lambda: "other versions")
    assert remembered("one", count) == Held(1, 7)


def test_a_cache_that_cannot_be_written_is_done_without(count, tmp_path) -> None:
    (tmp_path / "plans").touch()
    assert remembered("one", count) == Held(1, 1) and remembered("one", count) == Held(1, 2)
