"""The vision tower runs once for each different image or video of a batch, however many samples show it.

The G completions of one prompt carry the same pixels. A tower without batch statistics gives equal pixels equal
features, so the copies are looked up instead of computed; their gradients add up in the one that was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from PIL import Image

from ...data.media import to_pil
from ...experience.types import ModelInputs
from ...experience.vision import VisionTensors, pixels_on_host
from ...runtime.host_copies import on_host
from ..logprobs import LogProbLinear

T = torch.Tensor


# Values of an image that are looked at before two images are compared in full.
_PROBES = 64


def share_repeated_media(vision_tower: nn.Module) -> None:
    """Make a Qwen-VL vision tower (`pixel_values` (patches, D), `grid_thw` (media, 3)) skip repeated media."""
    sharing = _Sharing()
    vision_tower.register_forward_pre_hook(sharing.before, with_kwargs=True)
    vision_tower.register_forward_hook(sharing.after)


def share_repeated_images(vision_tower: nn.Module) -> None:
    """The same for a tower that takes `pixel_values` (images or tiles, C, H, W) alone: one row in, one row out."""
    sharing = _SharingImages()
    vision_tower.register_forward_pre_hook(sharing.before, with_kwargs=True)
    vision_tower.register_forward_hook(sharing.after)


def first_occurrences(pixels: T | Sequence[T], grids: T) -> list[int]:
    """For each medium the index of the first equal one, itself where there is none before it.

    pixels is (sum of patches, D), or parts of it that hold whole media; grids (media, 3) holds frames, rows and columns
    of patches. Media are equal when their grids and every value are: a flat image has the same values in another shape,
    but other positions.
    """
    sizes = on_host(grids).prod(dim=1).tolist()
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    blocks: list[T] = []
    for part in [pixels] if isinstance(pixels, T) else pixels:
        start = ends[len(blocks)]
        own = sizes[len(blocks) : ends.index(start + len(part), len(blocks))]
        blocks += part.detach().split(own)
    step = [max(1, block.numel() // _PROBES) for block in blocks]
    probes = [block.reshape(-1)[::every][:_PROBES] for block, every in zip(blocks, step)]
    keys = torch.stack([nn.functional.pad(probe, (0, _PROBES - len(probe))) for probe in probes]).cpu().tolist()
    seen: dict[tuple, list[int]] = defaultdict(list)
    first: list[int] = []
    for index, (block, grid, key) in enumerate(zip(blocks, on_host(grids).tolist(), keys)):
        alike = seen[*grid, *key]
        found = next((other for other in alike if torch.equal(blocks[other], block)), index)
        if found == index:
            alike.append(index)
        first.append(found)
    return first


class _Sharing:
    """The two hooks, and what the first tells the second: which rows of the output each medium takes."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.plan = None
        others = [value for name, value in kwargs.items() if name != "grid_thw"]
        if len(args) != 1 or kwargs.get("grid_thw") is None or any(isinstance(each, T) for each in others):
            return None  # not called as transformers' get_image_features does: offsets of the media may be among these
        pixels, grids = args[0], kwargs["grid_thw"]
        patches = on_host(grids).prod(dim=1).tolist()
        if len(patches) < 2 or sum(patches) != len(pixels):
            return None
        known = pixels_on_host(grids)  # to compare on the device would make the host wait for it
        first = first_occurrences(pixels if known is None else known, grids)
        kept = sorted(set(first))
        if len(kept) == len(first):
            return None
        blocks = pixels.split(patches)
        self.plan = _Plan(patches, first, kept)
        fewer = torch.cat([blocks[index] for index in kept])
        return (fewer,), kwargs | {"grid_thw": grids[torch.tensor(kept, device=grids.device)]}

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        plan, self.plan = self.plan, None
        if plan is None:
            return output
        if isinstance(output, torch.Tensor):
            return plan.repeated(output)
        for name, value in list(output.items()):
            if isinstance(value, torch.Tensor):
                output[name] = plan.repeated(value)
            elif isinstance(value, (list, tuple)):
                output[name] = type(value)(plan.repeated(each) for each in value)
        return output


class _SharingImages(_Sharing):
    """The hooks of a tower whose input is one row for each image or tile."""

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.plan = None
        pixels = kwargs.get("pixel_values")
        if pixels is None or args or len(pixels) < 2:
            return None
        first = first_occurrences(pixels, torch.ones(len(pixels), 3, dtype=torch.long))
        kept = sorted(set(first))
        if len(kept) == len(first):
            return None
        self.plan = _Plan([1] * len(first), first, kept)
        return args, kwargs | {"pixel_values": pixels[torch.tensor(kept, device=pixels.device)]}


class _Plan:
    """patches rows of input a medium; first: which medium it repeats; kept: the media that were computed."""

    def __init__(self, patches: list[int], first: list[int], kept: list[int]):
        self.patches, self.first, self.kept = patches, first, kept

    def repeated(self, features: T) -> T:
        """Features (rows of the kept media, H), one row a patch or one a merged group, for all media."""
        total = sum(self.patches[index] for index in self.kept)
        merge = total // len(features)
        position = {index: number for number, index in enumerate(self.kept)}
        blocks = features.split([self.patches[index] // merge for index in self.kept])
        return torch.cat([blocks[position[index]] for index in self.first])


@dataclass
class Drawing:
    """The parts of a model that draw; a helper beside the module tree, as `Backbone`.

    first: id of the first drawn token. tokens: of an image. begin_id: after which an image stands in a prompt.
    kept_ids: other tokens of a prompt that the half without it keeps; blank_id: what stands for its others. features:
    from hidden states (N, H) to what the head reads. head: to logits of the codes. pixels: from codes (N, tokens) to
    images (N, C, H, W) in -1..1.
    """

    first: int
    tokens: int
    begin_id: int
    kept_ids: tuple[int, ...]
    blank_id: int
    features: Callable[[T], T]
    head: LogProbLinear
    pixels: Callable[[T], T]

    def without_prompt(self, ids: T) -> T:
        """Prompt ids (..., S) of the half without the prompt: equally many, blanked out up to the last `begin_id`."""
        begins = (ids == self.begin_id).long().flip(-1).cumsum(dim=-1).flip(-1)  # from each token on
        kept = torch.isin(ids, torch.tensor((*self.kept_ids, self.begin_id), device=ids.device)) | (begins == 0)
        return torch.where(kept, ids, torch.full_like(ids, self.blank_id))

    def guided(self, hidden: T, unguided: T | None, scale: float) -> T:
        """What the head reads (N, F) of hidden states with and without the prompt; None: no guidance.

        The head is linear, so mixing what it reads mixes its logits. Both halves go through its modules in one call:
        under ZeRO-3 each call gathers weights from all ranks, also from those that guide nothing.
        """
        if unguided is None:
            return self.features(hidden)
        own, other = self.features(torch.cat([hidden, unguided])).chunk(2)
        return other + scale * (own - other)

    @torch.no_grad()
    def images(self, codes: T) -> list[Image.Image]:
        """Decoded codes (N, tokens)."""
        pixels = self.pixels(codes).float()
        return [to_pil(((image + 1) / 2).clamp(0, 1).cpu()) for image in pixels]

    def drawn_samples(self, inputs: ModelInputs) -> T:
        """(B) bool: the samples whose response is an image."""
        ids = inputs.sequences.flatten()
        actions = (inputs.action_indices() + 1).clamp(max=len(ids) - 1)  # rows of masked columns may be beyond the end
        return ((ids[actions] >= self.first) & inputs.action_mask).any(dim=1)

    def with_halves(self, inputs: ModelInputs, drawn: T) -> tuple[ModelInputs, T]:
        """The inputs with a half without prompt behind them for each of the samples `drawn` (B) bool, and where in the
        flattened hidden states its actions (D, A) are predicted from."""
        index = drawn.nonzero().flatten().tolist()
        halves = self._packed(inputs, index) if inputs.is_packed else self._padded(inputs, index)
        vision = inputs.vision
        if len(vision) == len(drawn):
            vision = VisionTensors([*vision.samples, *({} for _ in index)])
        ids = {name: _extended(getattr(inputs, name), index) for name in ("sample_ids", "group_ids")}
        longer = replace(halves, action_mask=_extended(inputs.action_mask, index), vision=vision, **ids)
        return longer, longer.action_indices()[len(drawn) :]

    def _padded(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        prompt = inputs.sequences.shape[1] - inputs.action_mask.shape[1]
        own = inputs.sequences[index]
        half = torch.cat([self.without_prompt(own[:, :prompt]), own[:, prompt:]], dim=1)
        sequences = torch.cat([inputs.sequences, half])
        return replace(inputs, sequences=sequences, attention_mask=_extended(inputs.attention_mask, index))

    def _packed(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        lengths, actions = inputs.packed_seq_lens, inputs.num_actions
        parts, masks, last = [inputs.sequences], [inputs.attention_mask], inputs.attention_mask[0, -1]
        samples = inputs.sequences.split(lengths, dim=1)
        for number, position in enumerate(index, start=1):
            prompt = lengths[position] - actions[position]
            parts += [self.without_prompt(samples[position][:, :prompt]), samples[position][:, prompt:]]
            masks.append(torch.full_like(samples[position], last + number, dtype=inputs.attention_mask.dtype))
        return replace(
            inputs,
            sequences=torch.cat(parts, dim=1),
            attention_mask=torch.cat(masks, dim=1),
            packed_seq_lens=[*lengths, *(lengths[position] for position in index)],
            num_actions=[*actions, *(actions[position] for position in index)],
        )


def _extended(values: T | None, index: list[int]) -> T | None:
    return None if values is None else torch.cat([values, values[index]])
