"""Layers in the place of diffusers' give its values, bit for bit in fp32, and its gradients."""

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from tiny_families import sd3_policy

from lightrft_visual.models.diffusion.layers import FrozenRMSNorm, JointAttention, use_frozen_norms
from lightrft_visual.models.diffusion.policy import LoraSettings


def test_joint_attention_is_that_of_diffusers() -> None:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12), torch.randn(2, 10), torch.tensor([900.0, 100.0])
    found = []
    for processor in (JointAttnProcessor2_0(), JointAttention()):
        model.set_attn_processor(processor)
        model.zero_grad()
        output = model(*inputs, return_dict=False)[0]
        output.square().sum().backward()
        found.append((output, [each.grad for each in model.parameters() if each.grad is not None]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert len(found[0][1]) == len(found[1][1]) > 50
    for one, other in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [(), ("x",), ("x", "weight")])
def test_a_frozen_norm_is_that_of_diffusers(half: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    dtype, weight_dtype = (torch.bfloat16 if name in half else torch.float32 for name in ("x", "weight"))
    norm = RMSNorm(32, eps=1e-6).to(weight_dtype).requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn(3, 5, 32).mul(3).to(dtype).requires_grad_()
    grad = torch.randn(3, 5, 32)
    expected = norm(x)
    (wanted,) = torch.autograd.grad(expected, x, grad.to(expected.dtype))
    use_frozen_norms(norm)
    output = norm(x)
    (found,) = torch.autograd.grad(output, x, grad.to(output.dtype))
    assert type(norm) is FrozenRMSNorm and torch.equal(output, expected) and output.dtype == expected.dtype
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    norm.weight.requires_grad_()
    norm(x).sum().backward()
    assert norm.weight.grad is not None  # one that trains keeps its gradient


def test_a_policy_uses_them() -> None:
    transformer = sd3_policy(LoraSettings(2, 4)).denoisers["transformer"]
    assert {type(each) for each in transformer.attn_processors.values()} == {JointAttention}
    assert [each for each in transformer.modules() if isinstance(each, FrozenRMSNorm)]
    assert not [each for each in transformer.modules() if type(each) is RMSNorm]
