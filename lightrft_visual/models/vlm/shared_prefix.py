"""The prompt of a group once: a row of each group's prompt with all of its completions behind it.

G completions of one prompt are G samples that begin alike. Each token reads only what comes before it, so the prompt's
hidden states, keys and values are the same in all of them. In the row here a prompt stands once; its completions attend
to it and to themselves (`models/attention.py`), at the positions that they have alone, and their gradients add up in
it. The idea is that of Prefix Grouper (arXiv 2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...errors import ConfigError
from ...experience.fields import values_equal
from ...experience.types import ModelInputs
from ...experience.vision import InParts, Sample, VisionTensors, parts_of
from ...runtime.host_copies import on_host, to_device
from ...runtime.sequence import SequenceGroup
from ..routing import laid_out
from .positions import real_tokens
from .vision_cache import SomeMedia

T = torch.Tensor


@dataclass
class _Sample:
    """Where the tokens of one sample lie in the flattened (rows * S) inputs: [start, middle) prompt, [middle, stop)."""

    start: int
    middle: int
    stop: int


@dataclass
class SharedSequence:
    """One row for the samples of a batch, in which the prompt of a group stands once.

    columns: (tokens of the row) long, the place of each of them in the flattened (rows * S) inputs. indices: (rows * S)
    long, the inverse: where in the row the hidden state of each token is (0 for padding). lengths, continues: as in
    `Segments`. vision: of each different prompt, with what stands behind it.
    """

    columns: T
    indices: T
    lengths: list[int]
    continues: list[int | None]
    vision: VisionTensors

    @classmethod
    def of(cls, inputs: ModelInputs) -> SharedSequence | None:
        """The row of a batch; None where no two samples share a prompt, or nobody says so.

        Samples share one when they have the same group id, the same prompt tokens and the same media in the prompt.
        """
        if inputs.group_ids is None:
            return None
        samples, ids, vision = _samples(inputs), on_host(inputs.sequences).flatten(), inputs.vision.samples
        if len(vision) != len(inputs.group_ids):  # they came joined, and nobody says whose they are
            vision = None if inputs.vision.names else [{}] * len(inputs.group_ids)
        if samples is None or vision is None:
            return None
        groups = _groups(on_host(inputs.group_ids).tolist(), samples, ids, vision)
        if len(groups) == len(samples):
            return None
        columns, indices, lengths, continues = _laid_out(
            [[samples[index] for index in each] for each in groups], len(ids)
        )
        device = inputs.sequences.device
        media = []  # of each prompt once, then those of each completion, in the order of the row
        for members in groups:
            prompt = parts_of(vision[members[0]])[0]
            behind = [part for index in members for part in parts_of(vision[index])[1:]]
            media.append(InParts([prompt, *behind]) if behind else prompt)
        return cls(
            columns=to_device(columns, device),
            indices=to_device(indices, device),
            lengths=lengths,
            continues=continues,
            vision=VisionTensors(media),
        )

    @classmethod
    def alone(cls, inputs: ModelInputs) -> SharedSequence:
        """The row of a batch in which nothing is shared: each sample's own tokens, without padding."""
        columns, device = real_tokens(inputs), inputs.sequences.device
        tokens, lengths = torch.cat(columns), [len(own) for own in columns]
        indices = torch.zeros(inputs.sequences.numel(), dtype=torch.long)
        indices[tokens] = torch.arange(len(tokens))
        alone = [None] * len(lengths)
        return cls(to_device(tokens, device), to_device(indices, device), lengths, alone, inputs.vision)

    def inputs(self, inputs: ModelInputs) -> ModelInputs:
        """What the model reads: the row in place of the samples."""
        device = inputs.sequences.device
        tokens = on_host(inputs.sequences).flatten()[on_host(self.columns)].unsqueeze(0)
        packed = to_device(tokens, device), to_device(torch.ones_like(tokens), device)
        routing = None
        if inputs.routing is not None and (table := laid_out(inputs)) is not None:
            routing = list(table.flatten(0, 1)[self.columns].split(self.lengths))
        return ModelInputs(
            *packed, inputs.action_mask, list(self.lengths), vision=self.vision, routing=routing, media=inputs.media
        )

    def select(self, values: T) -> T:
        """Values (..., rows, S) of each token of the inputs to (..., 1, tokens of the row)."""
        return values.flatten(-2)[..., self.columns].unsqueeze(-2)


def _laid_out(groups: list[list[_Sample]], size: int) -> tuple[T, T, list[int], list[int | None]]:
    """(columns, indices, lengths, continues) of a `SharedSequence`: each group's prompt, then its completions.

    size: rows * S of the inputs.
    """
    columns: list[T] = []
    lengths: list[int] = []
    continues: list[int | None] = []
    indices, filled = torch.zeros(size, dtype=torch.long), 0
    for members in groups:
        first, prompt, begins = members[0], len(lengths), filled
        completions = ((each.middle, each.stop, prompt) for each in members if each.stop > each.middle)
        for start, stop, of in ((first.start, first.middle, None), *completions):
            indices[start:stop] = torch.arange(filled, filled + stop - start)
            columns.append(torch.arange(start, stop))
            lengths.append(stop - start)
            continues.append(of)
            filled += stop - start
        for each in members:
            indices[each.start : each.middle] = torch.arange(begins, begins + each.middle - each.start)
    return torch.cat(columns), indices, lengths, continues


def _samples(inputs: ModelInputs) -> list[_Sample] | None:
    """Every sample's tokens; None where one has masked tokens between others, or no prompt."""
    widths, samples, end = inputs.sample_lengths, [], 0
    actions = inputs.num_actions or [inputs.action_mask.shape[1]] * len(widths)
    for real, width, count in zip(real_tokens(inputs), widths, actions):
        end += width
        middle = end - count
        first, last = (int(real[0]), int(real[-1])) if len(real) else (middle, middle)
        if first >= middle or last - first + 1 != len(real):
            return None
        samples.append(_Sample(first, middle, max(middle, last + 1)))
    return samples


def _groups(ids: list[int], samples: list[_Sample], tokens: T, vision: list[Sample]) -> list[list[int]]:
    """Indices of the samples of each different prompt, in the order of their first ones. Media behind a prompt may
    differ."""
    found: dict[tuple, list[list[int]]] = {}
    order: list[list[int]] = []
    for index, (group, sample) in enumerate(zip(ids, samples)):
        alike = found.setdefault((group, tokens[sample.start : sample.middle].numpy().tobytes()), [])
        own = parts_of(vision[index])[0]
        for members in alike if group >= 0 else ():
            other = parts_of(vision[members[0]])[0]
            if other is own or values_equal(other, own):
                members.append(index)
                break
        else:
            alike.append([index])
            order.append(alike[-1])
    return order


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
                self.hooks += _MediaOverRanks(self, tower).handles

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


class _MediaOverRanks(SomeMedia):
    """Each member runs the tower on some of the images or videos, and gets the features of all of them.

    The largest go first, each to the member that has the fewest patches.
    """

    def __init__(self, sliced: SlicedSequence, tower: nn.Module) -> None:
        super().__init__(tower, prepend=True)  # before another hook puts repeated media back
        self.sliced = sliced

    def chosen(self, pixels: T, grids: T | None) -> list[int] | None:
        """This member's share. Without one it runs the first for nothing: all members run the same modules."""
        if not self.sliced.active:
            return None
        group = self.sliced.group
        self.shares: list[list[int]] = [[] for _ in range(group.size)]
        loads = [0] * group.size
        for index in sorted(range(len(self.patches)), key=lambda index: -self.patches[index]):
            member = loads.index(min(loads))
            self.shares[member].append(index)
            loads[member] += self.patches[index]
        return self.shares[group.index] or [0]

    def whole(self, features: T, sizes: list[int]) -> T:
        """With those of the other members."""
        group = self.sliced.group
        counts = [sum(sizes[index] for index in share) for share in self.shares]
        joined = group.shared(features[: counts[group.index]], counts)
        order = [index for share in self.shares for index in share]
        blocks = dict(zip(order, joined.split([sizes[index] for index in order])))
        return torch.cat([blocks[index] for index in range(len(sizes))])
