"""Decoding keeps little for backward, and gives what it gave."""

import pytest
import tiny_families
import torch
from watched import kept_for_backward

from lightrft_visual.models.diffusion import prompt_cache as decoding
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings, family_of


def policy_of(name: str, checkpointed: bool = False, **options) -> DiffusionPolicy:
    policy = DiffusionPolicy(family_of(tiny_families.pipeline_of(name), 5), LoraSettings(rank=2))
    if checkpointed:
        policy.enable_gradient_checkpointing(**options)
    return policy


def decoded(policy: DiffusionPolicy, frames: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Media, the gradient of their squares at the latents, and the bytes kept for backward."""
    shape = policy.latent_shape(32, 32, frames)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with kept_for_backward() as kept:
        media = policy.decode(latents)
    media.square().sum().backward()
    return media.detach(), latents.grad, sum(kept.values())


@pytest.mark.parametrize("name,frames,share", (("wan", 17, 0.25), ("flux", 1, 0.5), ("qwen_image", 1, 0.25)))
def test_checkpointing_keeps_a_part_and_changes_nothing(name, frames, share):
    media, gradient, whole = decoded(policy_of(name), frames)
    again, same, parts = decoded(policy_of(name, True), frames)
    assert torch.allclose(media, again, atol=1e-6) and torch.allclose(gradient, same, rtol=1e-5, atol=1e-7)
    assert 0 < parts < share * whole


@pytest.mark.parametrize("name", ("wan", "qwen_image"))
def test_a_part_that_runs_again_keeps_only_what_goes_into_its_blocks(monkeypatch, name):
    live_bytes = pytest.importorskip("lightrft_visual.plugins.memory_plan.meta").LiveBytes
    """Most memory in backward, beside weights, with parts of parts and without."""
    peaks, gradients = [], []
    for blocks in (True, False):
        if not blocks:
            monkeypatch.setattr(decoding, "_innermost", lambda decoder: [])
        policy = policy_of(name, True)
        shape = policy.latent_shape(64, 64, 1)
        latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with live_bytes(policy.family.pipeline.vae.parameters()) as live:
            policy.decode(latents).square().sum().backward()
        peaks.append(live.peak)
        gradients.append(latents.grad)
    assert peaks[0] < 0.5 * peaks[1], peaks
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name,frames", (("wan", 5), ("flux", 1)))
def test_offload_copies_all_that_is_kept_to_the_host(monkeypatch, name, frames):
    media, gradient, _ = decoded(policy_of(name), frames)
    offloaded, copies = policy_of(name, True, offload=True), []
    packed = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda: copies.append(1) or packed())
    again, same, kept = decoded(offloaded, frames)
    assert torch.allclose(media, again, atol=1e-6) and torch.allclose(gradient, same, rtol=1e-5, atol=1e-7)
    assert copies == [1] and kept == 0  # nothing reaches the hooks outside


def test_a_large_batch_is_decoded_in_parts(monkeypatch):
    policy, sizes = policy_of("flux"), []
    decode = policy.family.decode
    monkeypatch.setattr(policy.family, "decode", lambda latents: sizes.append(len(latents)) or decode(latents))
    latents = torch.randn(5, *policy.latent_shape(32, 32))
    with torch.no_grad():
        whole = policy.decode(latents)
        monkeypatch.setattr(decoding, "LATENTS_AT_ONCE", 2 * latents[0].numel())
        assert torch.allclose(whole, policy.decode(latents), atol=1e-5)
    assert sizes == [5, 2, 2, 1]
