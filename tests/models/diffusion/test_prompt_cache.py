"""Encoded prompts are remembered, up to a number of bytes; decoding keeps little for backward."""

from contextlib import contextmanager

import pytest
import tiny_families
import torch
from PIL import Image
from tiny_families import sd3_policy
from watched import kept_for_backward

from lightrft_visual.models.diffusion import policy as policy_module
from lightrft_visual.models.diffusion import prompt_cache
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.diffusion.prompt_cache import PromptCache


def test_encoded_once_and_the_oldest_goes_first():
    cache, calls = PromptCache(limit=2 * 16), []

    def ask(key):
        return cache.get(key, lambda: calls.append(key) or {"context": torch.full((1, 4), float(ord(key)))})

    for key in "aba":
        assert ask(key)["context"][0, 0] == ord(key)
    assert calls == ["a", "b"]
    ask("c")  # b was unused for longest
    assert len(cache) == 2 and cache.size == 32
    ask("a"), ask("b")
    assert calls == ["a", "b", "c", "b"]
    cache.limit = 1
    assert ask("d")["context"].shape == (1, 4) and len(cache) == 1  # larger than the limit


def recorded(monkeypatch, owner, name: str, note=len) -> list:
    """What `note` says of the first argument of each call."""
    found, own = [], getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda first, *rest, **named: found.append(note(first)) or own(first, *rest, **named)
    )
    return found


def test_prompts_and_the_negative_one_are_encoded_once_and_several_in_one_call(monkeypatch):
    policy = sd3_policy()
    texts = recorded(monkeypatch, policy.family, "encode_prompts", list)
    calls = recorded(monkeypatch, policy.family.pipeline, "encode_prompt")
    given = [f"a {colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "cross", "ring")]
    conditions = policy.encode_prompts(given * 2, "a dog")  # 9 texts and the negative one
    negative = conditions["negative_context"]
    assert calls == [8, 8] and len(conditions["context"]) == len(negative) == 18
    assert torch.equal(negative[:1], policy.encode_prompts(["a dog"])["context"])
    assert torch.equal(negative[0], negative[1]) and sorted(sum(texts, [])) == sorted([*given, "a dog"])
    one = policy.remember_prompts(given)[given[3]]["context"]
    assert one.untyped_storage().nbytes() == one.nbytes  # and not that of all that were encoded beside it


def test_encoders_and_the_decoder_are_on_the_device_for_their_turns_only(monkeypatch):
    policy, turns = sd3_policy(), []
    names = {id(part): name for name, part in policy.family.pipeline.components.items()}

    @contextmanager
    def noted(part, device, offload):
        turns.append((names[id(part)], offload))
        yield part

    monkeypatch.setattr(policy_module, "on_device", noted)
    for _ in range(2):  # known at the second time
        policy.encode_prompts(["a red circle"], "")
    encoders = [(name, True) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    latents = torch.randn(1, *policy.latent_shape(32, 32))
    policy.decode(latents)
    policy.decode(latents.requires_grad_())  # stays for the backward pass
    assert turns == [*encoders, ("vae", True)]
    turns.clear()
    assert [len(each) for each in policy.decode_each([latents.detach(), latents.detach()])] == [1, 1]
    assert turns == [("vae", True)]  # of a step's micro-batches together


def test_a_first_frame_is_encoded_once_however_often_it_is_asked_for(monkeypatch):
    policy = DiffusionPolicy(family_of(tiny_families.wan_i2v(), 5))
    seen = recorded(monkeypatch, policy.family, "encode_first_frames")
    red, blue = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
    one, other, same = policy.encode_first_frames([red, blue, red.copy()], 32, 32, 5)
    assert torch.equal(one["first_frame"], same["first_frame"])
    assert not torch.equal(one["first_frame"], other["first_frame"])
    (later,) = policy.encode_first_frames([blue.copy()], 32, 32, 5)
    assert sum(seen) == 2 and all(torch.equal(later[name], other[name]) for name in other)
    policy.encode_first_frames([blue], 32, 32, 9)
    assert sum(seen) == 3  # of another length of video


# --- decoding ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "name,frames,share,offload", (("wan", 9, 0.25, False), ("flux", 1, 0.5, False), ("wan", 5, 0, True))
)
def test_checkpointing_keeps_a_part_or_copies_all_to_the_host_and_changes_nothing(
    monkeypatch, name, frames, share, offload
):
    media, gradient, whole = decoded(policy_of(name), frames)
    copies, packed = [], torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda: copies.append(1) or packed())
    again, same, kept = decoded(policy_of(name, True, offload=offload), frames)
    assert torch.allclose(media, again, atol=1e-6) and torch.allclose(gradient, same, rtol=1e-5, atol=1e-7)
    assert len(copies) == offload and (kept == 0) is offload and kept <= share * whole


def test_a_part_that_runs_again_keeps_only_what_goes_into_its_blocks(monkeypatch):
    """Most memory in backward, beside weights, with parts of parts and without."""
    live_bytes = pytest.importorskip("lightrft_visual.plugins.memory_plan.meta").LiveBytes
    peaks, gradients = [], []
    for blocks in (True, False):
        if not blocks:
            monkeypatch.setattr(prompt_cache, "_innermost", lambda decoder: [])
        policy = policy_of("wan", True)
        shape = policy.latent_shape(64, 64, 1)
        latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with live_bytes(policy.family.pipeline.vae.parameters()) as live:
            policy.decode(latents).square().sum().backward()
        peaks.append(live.peak)
        gradients.append(latents.grad)
    assert peaks[0] < 0.5 * peaks[1], peaks
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


def test_a_large_batch_is_decoded_in_parts(monkeypatch):
    policy = policy_of("flux")
    sizes, latents = recorded(monkeypatch, policy.family, "decode"), torch.randn(5, *policy.latent_shape(32, 32))
    with torch.no_grad():
        whole = policy.decode(latents)
        monkeypatch.setattr(prompt_cache, "LATENTS_AT_ONCE", 2 * latents[0].numel())
        assert torch.allclose(whole, policy.decode(latents), atol=1e-5)
    assert sizes == [5, 2, 2, 1]


def test_many_images_are_encoded_in_parts(monkeypatch):
    policy = policy_of("flux")
    sizes, images = (
        recorded(monkeypatch, policy.family, "encode"),
        [Image.new("RGB", (32, 32), (n, 0, 0)) for n in range(5)],
    )
    whole = policy.encode_images(images, 32, 32)
    monkeypatch.setattr(prompt_cache, "LATENTS_AT_ONCE", 2 * 3 * 32 * 32 // prompt_cache.PIXELS_A_LATENT)
    assert torch.allclose(whole, policy.encode_images(images, 32, 32), atol=1e-5)
    assert sizes == [5, 2, 2, 1]
