"""LoRA that adds into the base's output: peft's results, fewer passes, and peft's own forward for what is not plain."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from tiny_families import sd3_policy
from torch import nn
from watched import Operations

from lightrft_visual.models.diffusion.policy import LoraSettings
from lightrft_visual.models.weight_copies import AddedLoraLinear, lora_config


def layer(kind, scaling_of=(4, 8), dtype=torch.float32, **settings):
    torch.manual_seed(0)
    base = nn.Linear(24, 40).requires_grad_(False)
    config = LoraConfig(r=scaling_of[0], lora_alpha=scaling_of[1], **settings)
    made = kind(base, "default", config=config, r=scaling_of[0], lora_alpha=scaling_of[1])
    nn.init.normal_(made.lora_B["default"].weight, std=0.1)
    return made.to(dtype)


def passed(made, x):
    """Output, and the gradients of the input and of both small matrices."""
    x = x.clone().requires_grad_()
    out = made(x)
    out.square().sum().backward()
    found = [x.grad, made.lora_A["default"].weight.grad, made.lora_B["default"].weight.grad]
    made.zero_grad()
    return [out.detach(), *found]


@pytest.mark.parametrize("scaling_of", [(4, 8), (4, 7)])
@pytest.mark.parametrize("shape", [(5, 24), (3, 5, 24), (2, 3, 5, 24)])
def test_output_and_gradients_are_those_of_peft(scaling_of, shape):
    x = torch.randn(*shape)
    for one, other in zip(passed(layer(PeftLinear, scaling_of), x), passed(layer(AddedLoraLinear, scaling_of), x)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_half_precision_is_nearer_to_the_exact_result_than_peft():
    x = torch.randn(64, 24)
    exact = layer(PeftLinear)(x)
    errors = [
        (layer(kind, dtype=torch.bfloat16)(x.bfloat16()) - exact).norm() for kind in (AddedLoraLinear, PeftLinear)
    ]
    assert errors[0] <= errors[1]


VIEWS = ("aten::view", "aten::t", "aten::_unsafe_view", "aten::expand")


def test_the_output_is_passed_over_twice_and_not_four_times():
    x = torch.randn(3, 5, 24)
    counts = []
    for kind in (AddedLoraLinear, PeftLinear):
        made = layer(kind)
        with torch.no_grad(), Operations() as passes:
            made(x)
        counts.append(sum(shape[-1] == 40 and name not in VIEWS for name, shape, _ in passes.made))
    assert counts == [2, 4]  # base, low rank added in; base, low rank, scaled, added


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"lora_bias": True}, {"use_dora": True}])
def test_what_is_not_plain_lora_goes_through_peft(settings, monkeypatch):
    asked = []
    forward = PeftLinear.forward
    monkeypatch.setattr(PeftLinear, "forward", lambda self, x: asked.append(self) or forward(self, x))
    made, x = layer(AddedLoraLinear, **settings).train(), torch.randn(3, 24)
    torch.manual_seed(1)
    got = made(x)
    torch.manual_seed(1)
    assert asked == [made] and torch.equal(got, forward(made, x))


def test_switched_off_merged_and_of_two_adapters_it_is_peft():
    made, plain = layer(AddedLoraLinear), layer(PeftLinear)
    x = torch.randn(3, 24)
    for change in (
        lambda each: each.enable_adapters(False),
        lambda each: (each.enable_adapters(True), each.merge()),
        lambda each: (
            each.unmerge(),
            each.update_layer("second", 2, lora_alpha=2, config=LoraConfig(r=2, init_lora_weights=False)),
            each.set_adapter(["default", "second"]),
        ),
    ):
        torch.manual_seed(3)
        change(made)
        torch.manual_seed(3)
        change(plain)
        torch.testing.assert_close(made(x), plain(x))


def test_policies_have_it_under_the_names_that_checkpoints_and_pipelines_know():
    policy = sd3_policy(LoraSettings(2, 4))
    adapted = policy.denoisers["transformer"].transformer_blocks[0].attn.to_q
    assert type(adapted) is AddedLoraLinear
    assert {"base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"} <= set(adapted.state_dict())
    assert "_custom_modules" not in lora_config(2, 4, init_lora_weights="gaussian", target_modules=["to_q"]).to_dict()
