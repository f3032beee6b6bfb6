"""Encoded prompts are remembered, up to a number of bytes, and do not depend on their neighbours."""

import torch

from lightrft_visual.embedded.tiny_sd3 import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
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


def test_one_larger_than_the_limit_is_still_given():
    cache = PromptCache(limit=1)
    assert cache.get("a", lambda: {"context": torch.ones(1, 4)})["context"].shape == (1, 4) and len(cache) == 1


def test_a_prompt_encodes_the_same_in_any_company():
    policy = DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings(layers=1)), TEXT_LENGTH))
    other = DiffusionPolicy(policy.family)
    together = policy.encode_prompts(["a red circle", "a blue cross", "a red circle"], "")
    alone = other.encode_prompts(["a red circle"], "")
    assert set(together) == {"context", "pooled", "negative_context", "negative_pooled"}
    for name, value in together.items():
        assert torch.equal(value[:1], alone[name]) and torch.equal(value[2:], alone[name])
    assert not torch.equal(together["context"][0], together["context"][1])
