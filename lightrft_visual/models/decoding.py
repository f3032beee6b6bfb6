"""Decoding with the keys and values of each prompt held once, whatever the number of its responses.

transformers' cache holds a row for each response: n copies of a prompt, all of them copied anew at each token to make
room for one more, and again for each query head of a key head. Here a response has room for its own tokens alone. Its
query attends to its prompt together with the queries of the same prompt's other responses, then to its own tokens; the
two results are one softmax by their sums of exponentials (as Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from ..runtime.host_copies import to_device

T = torch.Tensor


class PromptLayer(DynamicLayer):
    """One layer: keys and values (P, key heads, S, D) of prompts, then those of responses too, (R, key heads, most, D).

    Until `follow` it is transformers' own layer; from then on `update` takes one token of each response, and gives the
    keys and values of responses alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own: tuple[T, T] | None = None
        self.length = 0

    def follow(self, responses: int, most: int) -> None:
        """Make room for at most `most` tokens of each of R responses."""
        _, heads, _, width = self.keys.shape
        self.own = tuple(each.new_empty(responses, heads, most, each.shape[-1]) for each in (self.keys, self.values))

    def update(self, key_states: T, value_states: T, *args, **kwargs) -> tuple[T, T]:
        """Keys and values of what is attended to, of responses their own; key_states, value_states: the new ones."""
        if self.own is None:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in zip(self.own, (key_states, value_states)):
            held[:, :, self.length] = new.squeeze(2)
        self.length += 1
        keys, values = (each[:, :, : self.length] for each in self.own)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens of the prompts and of the responses."""
        return super().get_seq_length() + self.length


@dataclass
class Followed:
    """Which prompt each of R responses goes on from. layers: of the cache; bias (P, 1, 1, S): -inf at prompts' padding.

    members (P * most) and back (R): responses by prompt, the smaller groups filled up, and where each is there; None
    where they lie so already.
    """

    layers: list[PromptLayer]
    bias: T
    members: T | None
    back: T | None
    used: bool = False

    @classmethod
    def of(cls, cache: Cache, mask: T, prompts: Sequence[int], most: int) -> Followed:
        """mask (P, S): the prompts' tokens; prompts: of each response its prompt's number; most: tokens of one."""
        for layer in cache.layers:
            layer.follow(len(prompts), most)
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask == 0, float("-inf"))
        groups: list[list[int]] = [[] for _ in range(len(mask))]
        for row, prompt in enumerate(prompts):
            groups[prompt].append(row)
        size = max(map(len, groups))
        filled = [row for group in groups for row in [*group, *[0] * (size - len(group))]]
        members = back = None
        if filled != [*range(len(prompts))]:
            places = {row: number * size + i for number, group in enumerate(groups) for i, row in enumerate(group)}
            back = to_device(torch.tensor([places[row] for row in range(len(prompts))]), mask.device)
            members = to_device(torch.tensor(filled), mask.device)
        return cls(cache.layers, bias[:, None, None], members, back)

    @property
    def mask(self) -> T:
        """What models are given as attention mask: four dimensions, so that they make none themselves; never read."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.bias.device)

    def attend(self, layer: int, query: T, key: T, value: T, scale: float | None) -> T:
        """query (R, heads, 1, D), and what `PromptLayer.update` gave -> (R, 1, heads, D)."""
        self.used = True
        prompts, (count, heads, _, width) = self.layers[layer], query.shape
        kinds = key.shape[1]
        query = (query.squeeze(2).float() * (width**-0.5 if scale is None else scale)).view(
            count, kinds, heads // kinds, width
        )
        grouped = query if self.members is None else query[self.members]
        grouped = grouped.unflatten(0, (len(self.bias), -1)).transpose(1, 2)  # (P, key heads, most, heads a key, D)
        read, total = _read(grouped.flatten(2, 3), prompts.keys, prompts.values, self.bias)
        read, total = (each.unflatten(2, grouped.shape[2:4]).transpose(1, 2).flatten(0, 1) for each in (read, total))
        if self.back is not None:
            read, total = read[self.back], total[self.back]
        own, own_total = _read(query, key, value)
        made = own.lerp(read, (total - own_total).sigmoid())
        return made.flatten(1, 2).unsqueeze(1).to(value.dtype)


def _read(query: T, key: T, value: T, bias: T | None = None) -> tuple[T, T]:
    """(what queries (..., Q, D) read of keys and values (..., S, D), the logarithm of their sums of exponentials
    (..., Q, 1)), in float32: trainer and engine differ by no rounded scores."""
    scores = torch.matmul(query, key.float().transpose(-1, -2))
    if bias is not None:
        scores += bias
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, value.float()) / total, largest + total.log()


@dataclass
class Decoding:
    """Where R responses are: the cache, the positions of their next tokens (R, 1) or (4, R, 1), and `mask`
    (R, cached) of what is in the cache, or `followed` where prompts are held once."""

    cache: Cache
    positions: T
    mask: T | None
    followed: Followed | None

    @classmethod
    def of(cls, cache: Cache, positions: T, mask: T, prompts: Sequence[int], most: int) -> Decoding:
        """After prompts (P) were run: positions and mask are theirs. prompts: of each of R responses its prompt's
        number; most: tokens of one."""
        chosen = to_device(torch.tensor(prompts), mask.device)
        positions = positions[..., chosen, :]
        if isinstance(cache.layers[0], PromptLayer):
            return cls(cache, positions, None, Followed.of(cache, mask, prompts, most))
        cache.reorder_cache(chosen)  # of layers of all kinds, those of linear attention too
        return cls(cache, positions, mask[chosen], None)

    def arguments(self) -> dict[str, Any]:
        """Of the model's forward of one more token of each response; counts it."""
        given = {"position_ids": self.positions, "past_key_values": self.cache, "use_cache": True}
        self.positions = self.positions + 1
        if self.followed is not None:
            return given | {"attention_mask": self.followed.mask, "followed": self.followed}
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return given | {"attention_mask": self.mask}


def cache_of(config: PretrainedConfig, once: bool) -> Cache:
    """For prompts and responses; once: prompts are held once, unless the model has layers with windows or states."""
    cache = DynamicCache(config=config)
    if not once or not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return cache
    return Cache(layers=[PromptLayer() for _ in cache.layers])
