"""The prompt of a group once: a row of each group's prompt with all of its completions behind it.

G completions of one prompt are G samples that begin alike. Each token reads only what comes before it, so the prompt's
hidden states, keys and values are the same in all of them. In the row here a prompt stands once; its completions attend
to it and to themselves (`models/attention.py`), at the positions that they have alone, and their gradients add up in
it. The idea is that of Prefix Grouper (arXiv 2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...experience.fields import values_equal
from ...experience.model_inputs import ModelInputs
from ...experience.vision import Named, VisionTensors
from ...runtime.sequence import SequenceGroup
from ..attention import Segments

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
    `Segments`. vision: of each different prompt. saved: tokens of the samples that the row does without.
    """

    columns: T
    indices: T
    lengths: list[int]
    continues: list[int | None]
    vision: VisionTensors
    saved: int

    @classmethod
    def of(cls, inputs: ModelInputs) -> SharedSequence | None:
        """The row of a batch; None where no two samples share a prompt, or nobody says so.

        Samples share one when they have the same group id, the same prompt tokens and the same media.
        """
        if inputs.group_ids is None:
            return None
        samples, ids = _samples(inputs), inputs.sequences.flatten().cpu()
        vision = _vision_of(inputs.vision, len(inputs.group_ids))
        if samples is None or vision is None:
            return None
        groups = _groups(inputs.group_ids.tolist(), samples, ids, vision)
        if len(groups) == len(samples):
            return None
        plan = _Plan(len(ids))
        for members in groups:
            plan.add([samples[index] for index in members])
        columns, device = torch.cat(plan.columns), inputs.sequences.device
        return cls(
            columns=columns.to(device),
            indices=plan.indices.to(device),
            lengths=plan.lengths,
            continues=plan.continues,
            vision=VisionTensors([vision[members[0]] for members in groups]),
            saved=sum(each.stop - each.start for each in samples) - len(columns),
        )

    @classmethod
    def alone(cls, inputs: ModelInputs) -> SharedSequence:
        """The row of a batch in which nothing is shared: each sample's own tokens, without padding."""
        mask, offset, columns, lengths = inputs.attention_mask.cpu().flatten() != 0, 0, [], []
        for width in inputs.sample_lengths:
            columns.append(offset + mask[offset : offset + width].nonzero().flatten())
            lengths.append(len(columns[-1]))
            offset += width
        tokens, device = torch.cat(columns), inputs.sequences.device
        indices = torch.zeros(len(mask), dtype=torch.long)
        indices[tokens] = torch.arange(len(tokens))
        return cls(tokens.to(device), indices.to(device), lengths, [None] * len(lengths), inputs.vision, 0)

    def inputs(self, inputs: ModelInputs) -> ModelInputs:
        """What the model reads: the row in place of the samples."""
        tokens = self.select(inputs.sequences)
        return ModelInputs(tokens, torch.ones_like(tokens), inputs.action_mask, list(self.lengths), vision=self.vision)

    def select(self, values: T) -> T:
        """Values (..., rows, S) of each token of the inputs to (..., 1, tokens of the row)."""
        return values.flatten(-2)[..., self.columns].unsqueeze(-2)

    def segments(self, group: SequenceGroup | None = None) -> Segments:
        """Who attends to whom in the row. group: the ranks that hold it together."""
        return Segments(self.lengths, self.columns.device, self.continues, group)


@dataclass
class _Plan:
    """A row in the making; size: rows * S of the inputs."""

    size: int
    columns: list[T] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    continues: list[int | None] = field(default_factory=list)
    filled: int = 0

    def __post_init__(self) -> None:
        self.indices = torch.zeros(self.size, dtype=torch.long)

    def add(self, samples: list[_Sample]) -> None:
        """One group: its prompt, then its completions."""
        first, prompt = samples[0], len(self.lengths)
        begins = self.filled
        self._part(first.start, first.middle, None)
        for each in samples:
            self.indices[each.start : each.middle] = torch.arange(begins, begins + each.middle - each.start)
            if each.stop > each.middle:
                self._part(each.middle, each.stop, prompt)

    def _part(self, start: int, stop: int, continues: int | None) -> None:
        count = stop - start
        self.indices[start:stop] = torch.arange(self.filled, self.filled + count)
        self.columns.append(torch.arange(start, stop))
        self.lengths.append(count)
        self.continues.append(continues)
        self.filled += count


def _samples(inputs: ModelInputs) -> list[_Sample] | None:
    """Every sample's tokens; None where one has masked tokens between others, or no prompt."""
    mask, samples = inputs.attention_mask.cpu() != 0, []
    widths = inputs.sample_lengths
    actions = inputs.num_actions or [inputs.action_mask.shape[1]] * len(widths)
    offset, mask = 0, mask.flatten()
    for width, count in zip(widths, actions):
        real = mask[offset : offset + width].nonzero().flatten()
        middle = width - count
        if not len(real) or real[-1] - real[0] + 1 != len(real) or real[0] >= middle:
            return None
        samples.append(_Sample(offset + int(real[0]), offset + middle, offset + max(middle, int(real[-1]) + 1)))
        offset += width
    return samples


def _vision_of(vision: VisionTensors, size: int) -> list[Named] | None:
    """The tensors of each sample; None where they came joined and nobody says whose they are."""
    if len(vision.samples) == size:
        return vision.samples
    return None if vision.names else [{}] * size


def _groups(ids: list[int], samples: list[_Sample], tokens: T, vision: list[Named]) -> list[list[int]]:
    """Indices of the samples of each different prompt, in the order of their first ones."""
    found: dict[tuple, list[list[int]]] = {}
    order: list[list[int]] = []
    for index, (group, sample) in enumerate(zip(ids, samples)):
        alike = found.setdefault((group, tokens[sample.start : sample.middle].numpy().tobytes()), [])
        own = vision[index]
        for members in alike if group >= 0 else ():
            if vision[members[0]] is own or values_equal(vision[members[0]], own):
                members.append(index)
                break
        else:
            alike.append([index])
            order.append(alike[-1])
    return order
