"""Encoded prompts are remembered, up to a number of bytes, and do not depend on their neighbours."""

from contextlib import contextmanager

import tiny_families
import torch
from PIL import Image
from tiny_families import sd3_policy

from lightrft_visual.models.diffusion import policy as policy_module
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, family_of
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


def test_prompts_and_the_negative_one_are_encoded_once_and_several_in_one_call(monkeypatch):
    policy, texts, calls = sd3_policy(), [], []
    pipeline, encode = policy.family.pipeline, policy.family.encode_prompts
    encode_prompt = pipeline.encode_prompt
    monkeypatch.setattr(policy.family, "encode_prompts", lambda prompts: texts.extend(prompts) or encode(prompts))
    monkeypatch.setattr(
        pipeline,
        "encode_prompt",
        lambda prompts, *a, **k: calls.append(len(prompts)) or encode_prompt(prompts, *a, **k),
    )
    given = [f"a {colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "cross", "ring")]
    conditions = policy.encode_prompts(given * 2, "a dog")  # 9 texts and the negative one
    assert calls == [8, 8] and len(conditions["context"]) == len(conditions["negative_context"]) == 18
    assert sorted(texts) == sorted([*given, "a dog"])
    assert torch.equal(conditions["negative_context"][:1], policy.encode_prompts(["a dog"])["context"])
    assert torch.equal(conditions["negative_context"][0], conditions["negative_context"][1]) and len(texts) == 10
    one = policy.remember_prompts(given)[given[3]]["context"]
    assert one.untyped_storage().nbytes() == one.nbytes  # and not that of all that were encoded beside it


def test_encoders_and_the_decoder_are_on_the_device_for_their_turns_only(monkeypatch):
    policy, turns = sd3_policy(), []
    names = {id(part): name for name, part in policy.family.pipeline.components.items()}

    @contextmanager
    def recorded(part, device, offload):
        turns.append((names[id(part)], offload))
        yield part

    monkeypatch.setattr(policy_module, "on_device", recorded)
    policy.encode_prompts(["a red circle"], "")
    assert turns == [(name, True) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    turns.clear()
    policy.encode_prompts(["a red circle"], "")  # known
    assert turns == []
    latents = torch.randn(1, *policy.latent_shape(32, 32))
    policy.decode(latents)
    assert turns == [("vae", True)]
    policy.decode(latents.requires_grad_())  # stays for the backward pass
    assert turns == [("vae", True)]


def test_a_first_frame_is_encoded_once_however_often_it_is_asked_for(monkeypatch):
    policy, seen = DiffusionPolicy(family_of(tiny_families.wan_i2v(), 5)), []
    encode = policy.family.encode_first_frames
    monkeypatch.setattr(
        policy.family, "encode_first_frames", lambda images, *size: seen.extend(images) or encode(images, *size)
    )
    red, blue = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
    both = policy.encode_first_frames([red, blue, red.copy()], 32, 32, 5)
    assert len(seen) == 2 and torch.equal(both["first_frame"][0], both["first_frame"][2])
    assert not torch.equal(both["first_frame"][0], both["first_frame"][1])
    later = policy.encode_first_frames([blue.copy()], 32, 32, 5)
    assert len(seen) == 2 and all(torch.equal(later[name], both[name][1:2]) for name in both)
    policy.encode_first_frames([blue], 32, 32, 9)
    assert len(seen) == 3  # of another length of video
