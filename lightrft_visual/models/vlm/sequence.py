"""A row over several ranks: the vision tower by image, the language model by slices of its tokens.

All members of a `SequenceGroup` call the base model with the same row. Embeddings and features of images are put
together as usual; what the text layers are given is then cut, and each member goes on with its own slice. Positions
(M-RoPE too), DeepStack's features and their places are cut alike. Attention exchanges slices for heads by itself.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
import torch.nn as nn

from ...errors import ConfigError
from ...runtime.sequence import SequenceGroup

T = torch.Tensor

# What text layers are given of each token, by the axis of the tokens. Their mask is not read (`Segments`).
_BY_TOKEN = {"input_ids": -1, "inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1}
_WHOLE = ("attention_mask", "deepstack_visual_embeds")


class SlicedSequence:
    """Hooks on the text layers and the vision tower of a base model; they act inside a `with`, and only there.

    Raises ConfigError where the attention heads do not divide over the group.
    """

    def __init__(self, group: SequenceGroup, base: nn.Module, towers: tuple[str, ...]):
        self.group, self.active = group, False
        text = next((getattr(base, name) for name in ("language_model", "text_model") if hasattr(base, name)), base)
        heads = text.config.num_attention_heads
        if heads % group.size:
            raise ConfigError(f"sp_size {group.size} does not divide the model's {heads} attention heads")
        self.hooks = [text.register_forward_pre_hook(self._cut, with_kwargs=True)]
        for tower in (getattr(base, name, None) for name in towers):
            if tower is not None:
                sharing = _MediaOverRanks(self)
                self.hooks.append(tower.register_forward_pre_hook(sharing.before, with_kwargs=True))
                # Before another hook puts repeated media back.
                self.hooks.append(tower.register_forward_hook(sharing.after, prepend=True))

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False

    def _cut(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not self.active:
            return None
        tokens = kwargs.get("inputs_embeds") if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        length = tokens.shape[1]
        own, cut = self.group.slice_of(length), dict(kwargs)
        for name, value in kwargs.items():
            if name in _BY_TOKEN and isinstance(value, T):
                cut[name] = value.narrow(_BY_TOKEN[name], own.start, own.stop - own.start)
            elif isinstance(value, T) and name not in _WHOLE and length in value.shape:
                raise ConfigError(f"sp_size: this model's text layers take {name!r} of each token, which is not cut")
        features = kwargs.get("deepstack_visual_embeds")
        if features is not None:
            before = kwargs["visual_pos_masks"][:, : own.start].sum()
            count = cut["visual_pos_masks"].sum()
            cut["deepstack_visual_embeds"] = [each.narrow(0, before, count) for each in features]
        return args, cut


class _MediaOverRanks:
    """Each member runs the tower on some of the images or videos, and gets the features of all of them."""

    def __init__(self, sliced: SlicedSequence):
        self.sliced, self.plan = sliced, None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.plan = None
        grids = kwargs.get("grid_thw")
        pixels = args[0] if args else kwargs.get("pixel_values")
        if not self.sliced.active or pixels is None or (args and grids is None):
            return None
        patches = [1] * len(pixels) if grids is None else grids.prod(dim=1).tolist()
        self.plan = _Shares(patches, self.sliced.group)
        # A member without a share runs the first one for nothing: all members run the same modules.
        mine = self.plan.own or [0]
        blocks = pixels.split(patches)
        fewer = torch.cat([blocks[index] for index in mine])
        if grids is None:
            return args, kwargs | {"pixel_values": fewer}
        return (fewer,), kwargs | {"grid_thw": grids[torch.tensor(mine, device=grids.device)]}

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        plan, self.plan = self.plan, None
        if plan is None:
            return output
        if isinstance(output, T):
            return plan.whole(output)
        for name, value in list(output.items()):
            if isinstance(value, T):
                output[name] = plan.whole(value)
            elif isinstance(value, (list, tuple)):
                output[name] = type(value)(plan.whole(each) for each in value)
        return output


class _Shares:
    """Which member runs which media: the largest first, each to the member that has the fewest patches."""

    def __init__(self, patches: list[int], group: SequenceGroup):
        self.patches, self.group = patches, group
        self.shares: list[list[int]] = [[] for _ in range(group.size)]
        loads = [(0, member) for member in range(group.size)]
        for index in sorted(range(len(patches)), key=lambda index: -patches[index]):
            load, member = loads[0]
            self.shares[member].append(index)
            heapq.heapreplace(loads, (load + patches[index], member))
        self.own = self.shares[group.index]

    def whole(self, features: T) -> T:
        """Features (rows of the own media, H), one row a patch or one a merged group, to those of all media."""
        run = self.own or [0]
        merge = sum(self.patches[index] for index in run) // len(features)
        merged = [count // merge for count in self.patches]
        sizes = [sum(merged[index] for index in share) for share in self.shares]
        joined = self.group.shared(features[: sizes[self.group.index]], sizes)
        order = [index for share in self.shares for index in share]
        blocks = dict(zip(order, joined.split([merged[index] for index in order])))
        return torch.cat([blocks[index] for index in range(len(merged))])
