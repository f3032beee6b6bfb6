"""What the frozen text encoders made of prompts, remembered: a run meets the same prompts again and again."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...experience.vision import Conditions

T = torch.Tensor


class PromptCache:
    """Conditions by key, in host memory; the ones unused for longest go when all take more than `limit` bytes."""

    def __init__(self, limit: int = 2**30) -> None:
        self.limit, self.size = limit, 0
        self._kept: OrderedDict[Hashable, Conditions] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def find(self, key: Hashable) -> Conditions | None:
        """The conditions under `key`; None where they have to be encoded."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def get(self, key: Hashable, encode: Callable[[], Conditions]) -> Conditions:
        """The conditions under `key`, encoded at the first call."""
        found = self.find(key)
        if found is not None:
            return found
        conditions = {name: value.detach().cpu() for name, value in encode().items()}
        self._kept[key] = conditions
        self.size += _bytes(conditions)
        while self.size > self.limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.size -= _bytes(oldest)
        return conditions


def _bytes(conditions: Conditions) -> int:
    return sum(value.numel() * value.element_size() for value in conditions.values())


LATENTS_AT_ONCE = 2**19  # numbers in a part of a batch: eight images of 512 x 512, one video
PIXELS_A_LATENT = 12  # numbers of an image for one of its latents, in most autoencoders


def checkpoint_decoder(vae: nn.Module) -> None:
    """Let decoding with a gradient keep only the inputs of its parts, which backward runs once more.

    Parts are blocks where diffusers has checkpointing for the VAE. The causal video VAEs (Wan, Qwen-Image) have none:
    their decoder takes one latent frame at a time and hands the last frames of every convolution on to the next, so a
    part is a latent frame, and what is kept is the frame and those hand-overs. A part that runs again keeps in
    its turn only what goes into its blocks, each of which runs a third time: the activations of a frame are
    several times as large as all that is kept.
    """
    if vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()
        return
    for block in _innermost(vae.decoder):
        block.forward = checkpointed_part(block.forward)
    vae.decoder.forward = checkpointed_part(vae.decoder.forward)


def _innermost(decoder: nn.Module) -> list[nn.Module]:
    """The blocks that hand frames on and have no such blocks in them."""
    handing = [each for each in decoder.modules() if "feat_cache" in inspect.signature(each.forward).parameters]
    return [each for each in handing if not any(part in handing for part in each.modules() if part is not each)]


def checkpointed_part(forward: Callable[..., T]) -> Callable[..., T]:
    """The forward of such a decoder or of a block of it, (x, feat_cache, feat_idx, …), as one checkpointed part."""

    def run(x: T, first: int, options: dict[str, Any], *handed_over: Any) -> tuple[T, int, list[Any]]:
        # The part writes into the cache, and must find it as it was when it runs again.
        cache, index = list(handed_over), [first]
        return forward(x, feat_cache=cache, feat_idx=index, **options), index[0], cache

    def checkpointed(x: T, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None, **options: Any) -> T:
        if feat_cache is None or not torch.is_grad_enabled():
            return forward(x, feat_cache=feat_cache, feat_idx=feat_idx, **options)
        frames, feat_idx[0], feat_cache[:] = checkpoint(
            run, x, feat_idx[0], options, *feat_cache, use_reentrant=False, preserve_rng_state=False
        )
        return frames

    return checkpointed


def in_parts(coder: Callable[[T], T], given: T, larger: int = 1) -> T:
    """coder(given (B, …)) for a few samples at a time: the widest activations of an autoencoder are a sample's own.

    Args:
        coder: decodes or encodes samples (B, …), each by itself.
        given: latents of samples, or what is encoded to such.
        larger: by how much a sample given is larger than its latents.
    """
    size = max(1, larger * LATENTS_AT_ONCE // given[0].numel())
    return torch.cat([coder(part) for part in given.split(size)])
