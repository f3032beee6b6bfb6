"""Products in float64 on the host: equal whatever stands beside a row, with the gradients of the plain layer."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn

from lightrft_visual.models.exact import ExactLinear, exact_products
from lightrft_visual.models.logprobs import LogProbLinear
from lightrft_visual.models.lora import lora_config


def layers(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """A plain layer, and one of the same weights in float64."""
    torch.manual_seed(0)
    plain, exact = nn.Linear(256, 64, bias), nn.Linear(256, 64, bias)
    exact.load_state_dict(plain.state_dict())
    exact_products(nn.Sequential(exact))
    assert type(exact) is ExactLinear
    return plain, exact


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradients_are_those_of_the_plain_layer(bias):
    plain, exact = layers(bias)
    found = []
    for layer in (plain, exact):
        hidden = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
        made = layer(hidden)
        (made * torch.arange(64)).sum().backward()
        found.append([made, hidden.grad, *(each.grad for each in layer.parameters())])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert exact(torch.zeros(0, 256)).shape == (0, 64)
    layer = exact.to(torch.bfloat16)
    assert layer(torch.ones(2, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_row_is_the_same_alone_and_among_many():
    plain, exact = layers(True)
    hidden = torch.randn(400, 256, generator=torch.Generator().manual_seed(2))

    def apart(layer) -> float:
        alone = torch.cat([layer(row[None]) for row in hidden])
        return (alone - layer(hidden)).abs().max().item()

    assert apart(exact) <= apart(plain) / 2 and apart(plain) > 0
    wanted = nn.functional.linear(hidden.double(), plain.weight.double(), plain.bias.double()).float()
    assert torch.equal(exact(hidden), wanted)


def test_a_head_scores_by_the_same_products():
    torch.manual_seed(3)
    head, hidden, targets = LogProbLinear(256, 64), torch.randn(400, 256), torch.arange(400) % 64
    exact_products(nn.Sequential(head))
    with torch.no_grad():
        alone = torch.cat([head(row[None], target[None])[0] for row, target in zip(hidden, targets)])
        logits = nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
        assert (head(hidden, in_float32=True).double() - logits).abs().max() < 1e-6
        assert (alone - head(hidden, targets)[0]).abs().max() <= 5e-7


def test_adapters_on_such_layers_have_the_gradients_of_plain_ones():
    found = []
    for change in (lambda model: None, exact_products):
        torch.manual_seed(4)
        plain = nn.Sequential(nn.Linear(32, 16))
        model = get_peft_model(plain, lora_config(2, 4, target_modules=["0"], init_lora_weights=False))
        change(model)
        made = model(torch.randn(3, 5, 32))
        (made * torch.arange(16)).sum().backward()
        found.append([made, *(each.grad for each in model.parameters() if each.requires_grad)])
    assert len(found[0]) == 3
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_modules_that_are_named_stay_as_they_are():
    model = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(2, 2)), "text": nn.Sequential(nn.Linear(2, 2))})
    exact_products(model, but=("tower",))
    assert type(model["tower"][0]) is nn.Linear and type(model["text"][0]) is ExactLinear
