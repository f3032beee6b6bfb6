"""The vision tower runs once for each different image or video of a batch, however many samples show it.

The G completions of one prompt carry the same pixels. A tower without batch statistics gives equal pixels equal
features, so the copies are looked up instead of computed; their gradients add up in the one that was.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn as nn
from PIL import Image
from transformers.utils.generic import get_max_seqlen
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from ...data.media import to_pil
from ...experience.types import ModelInputs, map_tensors
from ...experience.vision import VisionTensors, pixels_on_host
from ...runtime.host_copies import on_host, to_device
from ..logprobs import LogProbLinear

T = torch.Tensor
# Values of an image that are looked at before two images are compared in full.
_PROBES = 64


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


class SomeMedia:
    """Hooks of a vision tower that let it run on some of the media of a call, and make of their features those of all.

    It takes pixels (patches, D) and `grid_thw` (media, 3), as transformers calls a tower of the Qwen-VL kind, or
    `pixel_values` (images or tiles, C, H, W) by name alone: one row in, one row out. Other calls stay as they are.
    """

    def __init__(self, tower: nn.Module, prepend: bool = False) -> None:
        """prepend: before hooks that are there already, where they see the features."""
        self.patches: list[int] = []  # rows of input of each medium
        self.kept: list[int] | None = None  # the media that run
        self.handles = [
            tower.register_forward_pre_hook(self._before, with_kwargs=True),
            tower.register_forward_hook(self._after, prepend=prepend),
        ]

    def chosen(self, pixels: T, grids: T | None) -> list[int] | None:
        """The media that run; None for all of them. `self.patches` is known."""
        raise NotImplementedError

    def whole(self, features: T, sizes: list[int]) -> T:
        """Features of all media from those (rows, H) of the kept ones; sizes: rows of each medium."""
        raise NotImplementedError

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.kept, grids = None, kwargs.get("grid_thw")
        given = [each for each in (*args, kwargs.get("pixel_values")) if each is not None]
        others = [value for name, value in kwargs.items() if name not in ("grid_thw", "pixel_values")]
        if len(given) != 1 or bool(args) != (grids is not None) or any(isinstance(each, T) for each in others):
            return None  # not called as transformers' get_image_features does: offsets of the media may be among these
        (pixels,) = given
        self.patches = [1] * len(pixels) if grids is None else on_host(grids).prod(dim=1).tolist()
        if sum(self.patches) == len(pixels):
            self.kept = self.chosen(pixels, grids)
        if self.kept is None:
            return None
        blocks = pixels.split(self.patches)
        fewer = torch.cat([blocks[index] for index in self.kept])
        if grids is None:
            return args, kwargs | {"pixel_values": fewer}
        return (fewer,), kwargs | {"grid_thw": to_device(on_host(grids)[self.kept], grids.device)}

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self.kept is None:
            return output
        if isinstance(output, T):
            return self._of_all(output)
        for name, value in list(output.items()):
            output[name] = map_tensors(value, self._of_all)
        return output

    def _of_all(self, features: T) -> T:
        """Features with one row a patch, or one a merged group of them."""
        merge = sum(self.patches[index] for index in self.kept) // len(features)
        return self.whole(features, [count // merge for count in self.patches])


def read_grids_on_host(tower: nn.Module) -> None:
    """Give a tower of the Qwen-VL kind what it works out of its grids, made of the host's copy of them: it reads them
    back from the device six or seven times a call, for which the host waits. Around its forward, as hooks before that
    choose the media that run.
    """
    forward = tower.forward

    def with_made(pixels: T, grid_thw: T, **kwargs: Any) -> Any:
        made = {
            name: to_device(each, pixels.device) if isinstance(each, T) else each
            for name, each in _of_grids(tower, on_host(grid_thw)).items()
        }
        return forward(pixels, grid_thw=grid_thw, **made | kwargs)

    tower.forward = with_made


def _of_grids(tower: nn.Module, grids: T) -> dict[str, Any]:
    """By the names under which transformers' towers take it (`transformers.vision_utils`)."""
    config, merge = tower.config, tower.spatial_merge_size
    made: dict[str, Any] = {"position_ids": get_vision_position_ids(grids, merge)}
    made["cu_seqlens"], made["max_seqlen"] = get_vision_attention_seqlens(grids, config)
    if hasattr(tower, "window_size"):
        windows = get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        made["window_index"], made["cu_window_seqlens"] = windows
        made["max_window_seqlen"] = get_max_seqlen(made["cu_window_seqlens"], config)
    if hasattr(tower, "num_grid_per_side"):
        made["interp_indices"], made["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return made


class SharedMedia(SomeMedia):
    """Repeated media run once."""

    def chosen(self, pixels: T, grids: T | None) -> list[int] | None:
        """The first of each."""
        if len(self.patches) < 2:
            return None
        # To compare on the device would make the host wait for it.
        known = None if grids is None else pixels_on_host(grids)
        shapes = torch.ones(len(pixels), 3, dtype=torch.long) if grids is None else grids
        self.first = first_occurrences(pixels if known is None else known, shapes)
        kept = sorted(set(self.first))
        return None if len(kept) == len(self.first) else kept

    def whole(self, features: T, sizes: list[int]) -> T:
        """Each medium's are those of the first one that is equal to it."""
        blocks = dict(zip(self.kept, features.split([sizes[index] for index in self.kept])))
        return torch.cat([blocks[index] for index in self.first])


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
        """What the head reads, (N, F).

        The head is linear, so mixing what it reads mixes its logits. Both halves go through its modules in one call:
        under ZeRO-3 each call gathers weights from all ranks, also from those that guide nothing.

        Args:
            hidden: (N, H) with the prompt.
            unguided: (N, H) without it; None: no guidance.
            scale: of guidance; 1 leaves what is read with the prompt.
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

    def drawn_actions(self, inputs: ModelInputs) -> T:
        """(B, A) bool, on the host: the actions that are tokens of images."""
        ids, actions = on_host(inputs.sequences).flatten(), inputs.action_indices()
        after = (actions + 1).clamp(max=len(ids) - 1)  # rows of masked columns may be beyond the end
        return (ids[after] >= self.first) & on_host(inputs.action_mask)

    def with_halves(self, inputs: ModelInputs, drawn: T) -> tuple[ModelInputs, T]:
        """The inputs with a half without prompt behind them for each of the samples `drawn` (B) bool, and where in the
        flattened hidden states its actions are predicted from. They are put together on the host."""
        index, vision, device = drawn.nonzero().flatten().tolist(), inputs.vision, inputs.sequences.device
        longer = with_again(inputs, index)
        ids, lengths = longer.sequences.view(-1), longer.sample_lengths
        actions = longer.num_actions or [longer.action_mask.shape[1]] * len(lengths)
        for start, length, own in [*zip(accumulate(lengths, initial=0), lengths, actions)][len(drawn) :]:
            prompt = slice(start, start + length - own)
            ids[prompt] = self.without_prompt(ids[prompt])
        if len(vision) == len(drawn):
            vision = VisionTensors([*vision.samples, *({} for _ in index)])
        further = longer.action_indices()[len(drawn) :][longer.action_mask[len(drawn) :]]
        return replace(longer.to(device), vision=vision), to_device(further, device)


def with_again(inputs: ModelInputs, index: list[int]) -> ModelInputs:
    """The samples, and those at `index` once more behind them; on the host, without vision. The others alone have
    records of experts: what is hidden from the copies may send them another way."""
    known = ModelInputs(**map_tensors(vars(replace(inputs, vision=VisionTensors(), routing=None)), on_host))
    tokens = torch.arange(known.sequences.numel()).split(known.sample_lengths)
    columns = torch.cat([tokens[number] for number in index])
    rows, axis = (1, 1) if known.is_packed else (len(index), 0)

    def again(values: Any) -> Any:
        if isinstance(values, list):
            return [*values, *(values[number] for number in index)]
        return None if values is None else torch.cat([values, values[index]])

    def of_tokens(values: T) -> T:
        return torch.cat([values, values.flatten()[columns].view(rows, -1)], dim=axis)

    by_sample = ("action_mask", "packed_seq_lens", "num_actions", "sample_ids", "group_ids")
    made = {name: again(getattr(known, name)) for name in by_sample}
    made["routing"] = inputs.routing and [*inputs.routing, *[None] * len(index)]
    return replace(known, sequences=of_tokens(known.sequences), attention_mask=of_tokens(known.attention_mask), **made)
