"""Fields of single samples to fields of a batch, and back: one class a `Kind`, with make and split side by side.

`split(make(column)) == column` for every kind. `make_fields` and `split_fields` do it for all fields of a class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from ..errors import DataError
from .fields import (
    FieldSpec,
    Kind,
    batch_info,
    replay_fields,
    scatter_samples,
    split_info,
    tensors_equal,
)
from .types import BatchLayout
from .vision import VisionTensors, check_alike, texts, widened

T = torch.Tensor
Span = tuple[int, int]
Column = list[Any]  # one field's values, one per sample, None where the sample lacks it


@dataclass
class BatchingContext:
    """What all fields of a batch in the making share. lengths: S of each sample; actions: A of each."""

    items: Sequence[Any]
    packed: bool
    layout: BatchLayout
    lengths: list[int] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    action_width: int = 0  # A of the padded batch: the longest response

    def ones(self, spec: FieldSpec, sizes: list[int]) -> T:
        """A flat mask of ones, for samples of which none has one."""
        return torch.ones(sum(sizes), dtype=spec.mask_dtype, device=self.items[0].sequences.device)


@dataclass
class Splitting:
    """One batch to be split: its form, and where each sample's tokens and actions are."""

    batch: Any
    layout: BatchLayout
    size: int
    packed: bool  # one row without padding

    def spans(self, width: int, of_actions: bool) -> list[Span]:
        """First and last + 1 column of each sample's tokens, or actions alone, in a padded batch of that width."""
        if self.layout.spans is None:
            return [(0, width)] * self.size
        offset = self.layout.prompt_width if of_actions else 0
        return [(max(start - offset, 0), max(stop - offset, 0)) for start, stop in self.layout.spans]


class Codec:
    """How one kind of field is batched."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> Any:
        """The batch's value of a field from the samples' values; None where no sample has the field.

        Args:
            column: one value a sample; None stands for a sample that lacks it.
            name: of the field, for errors and for what the layout takes down.
            spec: of the field, for what fills in for missing values.
            context: of the whole batch; its layout takes down what `split` cannot see in the value.
        """
        raise NotImplementedError

    def split(self, value: Any, name: str, spec: FieldSpec, context: Splitting) -> Column:
        """The samples' values of a field, in memory of their own but for vision; the inverse of `make`.

        Args:
            value: of the batch, never None.
            name: of the field, for errors and for what the layout has taken down.
            spec: of the field.
            context: of the whole batch, with the layout that `make` has filled.
        """
        raise NotImplementedError


class Line(Codec):
    """One number a token, or an action: item (S) or (A); batch (B, S) or (B, A), or (1, total)."""

    def __init__(self, of_actions: bool) -> None:
        self.of_actions = of_actions

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> T | None:
        sizes = context.actions if self.of_actions else context.lengths
        flat = _flat(column, name, spec, sizes)
        if context.packed and spec.segments:
            return self._segments(flat, spec, context)
        if not context.packed:
            width = context.action_width if self.of_actions else context.layout.prompt_width + context.action_width
            spans = [(0, count) for count in sizes] if self.of_actions else context.layout.spans
            if flat is None and spec.mask_dtype is not None and len(set(spans)) > 1:
                flat = context.ones(spec, sizes)
            return None if flat is None else scatter_samples(flat, spans, width)
        return None if flat is None else flat.unsqueeze(0)

    @staticmethod
    def _segments(flat: T | None, spec: FieldSpec, context: BatchingContext) -> T:
        """(1, total) long: sample index + 1 on real tokens, 0 on masked ones."""
        flat = context.ones(spec, context.lengths) if flat is None else flat
        context.layout.mask_dtype = flat.dtype
        lengths = torch.tensor(context.lengths, device=flat.device)
        index = torch.arange(1, len(lengths) + 1, device=flat.device).repeat_interleave(lengths)
        return (index * (flat != 0)).unsqueeze(0)

    def split(self, value: T, name: str, spec: FieldSpec, context: Splitting) -> list[T]:
        if not context.packed:
            if value.dim() < 2:
                raise DataError(f"{name} has shape {tuple(value.shape)}; a padded batch holds one row a sample")
            spans = context.spans(value.shape[1], self.of_actions)
            if len(value) != len(spans) or max((stop for _, stop in spans), default=0) > value.shape[1]:
                told = f"does not hold {len(spans)} samples in columns {spans[:4]}"
                raise DataError(f"{name} of shape {tuple(value.shape)} {told}")
            return [own[start:stop].clone() for own, (start, stop) in zip(value, spans)]
        if spec.segments:
            value = (value != 0).to(context.layout.mask_dtype)
        sizes = context.batch.num_actions if self.of_actions else context.batch.packed_seq_lens
        return _cut(value.reshape(-1), sizes, name)


class Numbers(Line):
    """Like actions, or one number for the whole sample: item (1); batch (B, 1) where all samples have just one."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> T | None:
        single = [
            index
            for index, (value, count) in enumerate(zip(column, context.actions))
            if value is not None and value.shape == (1,) and count != 1
        ]
        if not single:
            return super().make(column, name, spec, context)
        context.layout.single[name] = single
        if not context.packed and all(value is None or value.shape == (1,) for value in column):
            return _flat(column, name, spec, [1] * len(column)).unsqueeze(1)
        column = list(column)
        for index in single:
            if not context.actions[index]:
                raise DataError(f"sample {index}: {name} holds a number, but the sample has no action")
            column[index] = column[index].expand(context.actions[index])
        return super().make(column, name, spec, context)

    def split(self, value: T, name: str, spec: FieldSpec, context: Splitting) -> list[T]:
        single = context.layout.single.get(name, [])
        if value.shape == (context.size,) and not context.packed:  # made by hand, one number a sample
            return _cut(value, [1] * context.size, name)
        if context.packed:
            one_each = value.numel() == context.size != sum(context.batch.num_actions)
        else:
            alike = bool(single) or max((stop for _, stop in context.spans(1, of_actions=True)), default=1) != 1
            one_each = value.shape == (context.size, 1) and alike
        if one_each:
            return _cut(value.reshape(-1), [1] * context.size, name)
        parts = super().split(value, name, spec, context)
        for index in single:
            part = parts[index]
            # Someone may have written one number per action since; those must not be lost.
            if tensors_equal(part[:1].expand_as(part), part):
                parts[index] = part[:1].clone()
        return parts


class Sample(Codec):
    """Item of one shape for all samples; batch (B, *shape)."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> T | None:
        present = [value for value in column if value is not None]
        if not present:
            return None
        like = present[0]
        for index, value in enumerate(column):
            if value is not None and (value.shape != like.shape or value.dtype != like.dtype):
                raise DataError(
                    f"sample {index}: {name} is {value.dtype} {tuple(value.shape)}, where others of its batch are "
                    f"{like.dtype} {tuple(like.shape)}"
                )
        return torch.stack([torch.full_like(like, spec.fill) if value is None else value for value in column])

    def split(self, value: T, name: str, spec: FieldSpec, context: Splitting) -> list[T]:
        return [sample.clone() for sample in value.unbind()]


class Samples(Sample):
    """A dict of such tensors. Masked texts of different lengths are padded with zeros behind, and cut again."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> dict[str, T] | None:
        present = [value for value in column if value is not None]
        if not present:
            return None
        keys = present[0].keys()
        for index, value in enumerate(column):
            if value is not None and value.keys() != keys:
                raise DataError(
                    f"sample {index}: {name} has {sorted(value)}, where others of its batch have {sorted(keys)}"
                )
        columns = {key: [value and value[key] for value in column] for key in keys}
        for key in texts(present[0]):
            lengths = [0 if value is None else len(value) for value in columns[key]]
            context.layout.lengths[key] = lengths
            columns[key] = [value if value is None else widened(value[None], max(lengths))[0] for value in columns[key]]
        return {key: super(Samples, self).make(each, f"{name}[{key}]", spec, context) for key, each in columns.items()}

    def split(self, value: dict[str, T], name: str, spec: FieldSpec, context: Splitting) -> list[dict[str, T]]:
        columns = {key: super(Samples, self).split(each, name, spec, context) for key, each in value.items()}
        if any(len(each) != context.size for each in columns.values()):
            raise DataError(f"{name} does not hold {context.size} samples under each key")
        for key, lengths in context.layout.lengths.items():
            columns[key] = [sample[:length].clone() for sample, length in zip(columns[key], lengths, strict=True)]
        return [{key: each[index] for key, each in columns.items()} for index in range(context.size)]


class Counts(Sample):
    """Item () long; batch (B), counted where samples do not say, None if there is nothing to count."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> T | None:
        if all(value is None for value in column) and not any(item.vision.count(spec.media) for item in context.items):
            return None
        like = next((value for value in column if value is not None), torch.zeros((), dtype=torch.long))
        told, grids = [], f"{spec.media}_grid_thw"
        for index, (value, item) in enumerate(zip(column, context.items)):
            counted, names = item.vision.count(spec.media), item.vision.names
            # Without grids only the sample can say: a medium may take several rows of pixels.
            if value is not None and (grids in names or not names) and int(value) != counted:
                raise DataError(f"sample {index}: {name} is {int(value)}, but its {grids}s hold {counted}")
            raw = getattr(item, f"raw_{spec.media}s", None)
            if raw and grids in names and len(raw) != counted:
                raise DataError(f"sample {index}: raw_{spec.media}s are {len(raw)}, but its {grids}s hold {counted}")
            told.append(counted if value is None else int(value))
        return torch.stack([torch.full_like(like, count) for count in told])


class Vision(Codec):
    """The samples' own tensors, by reference in both directions: nothing is copied until a model reads them."""

    def make(self, column: list[VisionTensors], name: str, spec: FieldSpec, context: BatchingContext) -> VisionTensors:
        together = VisionTensors.gather(column)
        check_alike(together.samples)
        return together

    def split(self, value: VisionTensors, name: str, spec: FieldSpec, context: Splitting) -> list[VisionTensors]:
        counts = {kind: self._counts(context.batch, kind, context.size) for kind in ("image", "video")}
        return [VisionTensors([own]) for own in value.shared_out(context.size, counts)]

    @staticmethod
    def _counts(batch: Any, kind: str, size: int) -> list[int] | None:
        """Media of each sample, where the batch counts them or holds a list of them for each, not all empty."""
        counts, raw = getattr(batch, f"{kind}_counts"), getattr(batch, f"raw_{kind}s", None) or ()
        if counts is not None:
            return counts.tolist()
        listed = len(raw) == size and any(raw) and all(isinstance(own, list | tuple | None) for own in raw)
        return [len(own or ()) for own in raw] if listed else None


class Objects(Codec):
    """Item any object; batch a list of B."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> list | None:
        return None if all(value is None for value in column) else list(column)

    def split(self, value: list, name: str, spec: FieldSpec, context: Splitting) -> list:
        return list(value)


class Info(Codec):
    """Item dict; batch dict of columns."""

    def make(self, column: Column, name: str, spec: FieldSpec, context: BatchingContext) -> dict:
        return batch_info(column, context.layout.info)

    def split(self, value: dict, name: str, spec: FieldSpec, context: Splitting) -> list[dict]:
        return split_info(value, context.size, context.layout.info)


CODECS: dict[Kind, Codec] = {
    Kind.TOKENS: Line(of_actions=False),
    Kind.ACTIONS: Line(of_actions=True),
    Kind.NUMBERS: Numbers(of_actions=True),
    Kind.SAMPLE: Sample(),
    Kind.SAMPLES: Samples(),
    Kind.COUNTS: Counts(),
    Kind.VISION: Vision(),
    Kind.OBJECTS: Objects(),
    Kind.INFO: Info(),
}


TENSORS = (Kind.TOKENS, Kind.ACTIONS, Kind.NUMBERS, Kind.SAMPLE, Kind.COUNTS)


def _checked(column: list[Any], kind: Kind, name: str, of_items: bool = False) -> list[Any]:
    """The values of a field as they are, where all are of the type of its kind; else raises DataError. of_items: they
    are of one sample each, and a plain number may stand for a tensor ()."""
    usual = T if kind in TENSORS else Mapping if kind in (Kind.SAMPLES, Kind.INFO) else object
    single = of_items and kind in (Kind.SAMPLE, Kind.COUNTS)
    for index, value in enumerate(column):
        if not isinstance(value, usual) and value is not None:
            if not (single and isinstance(value, Real)):
                raise _odd(value, name, index if of_items else None, "tensor" if usual is T else "dict")
            column[index] = torch.tensor(value)
        for key, own in (value or {}).items() if kind is Kind.SAMPLES else ():
            if not isinstance(own, T):
                raise _odd(own, f"{name}[{key}]", index if of_items else None, "tensor")
    return column


def _odd(value: Any, name: str, index: int | None, wanted: str) -> DataError:
    where = "" if index is None else f"sample {index}: "
    return DataError(f"{where}{name} is a {type(value).__name__}, not a {wanted}")


def make_fields(items: Sequence[Any], packed: bool, layout: BatchLayout) -> dict[str, Any]:
    """The batch's value of every field of the items' class; of a packed one also its lengths.

    Args:
        items: the samples, at least one, all of one class.
        packed: whether they lie behind each other in one row, (1, total); else padded, (B, S).
        layout: takes down what the values cannot show, for `split_fields`.
    """
    specs = replay_fields(type(items[0]))
    context = BatchingContext(items, packed, layout)
    if "sequences" in specs:
        context.lengths, context.actions = packed_lengths(items)
        context.action_width = max(context.actions)
        prompts = [length - count for length, count in zip(context.lengths, context.actions)]
        width = layout.prompt_width = max(prompts)
        if not packed:  # prompts end where the actions begin, in every sample
            layout.spans = [(width - prompt, width + count) for prompt, count in zip(prompts, context.actions)]
    batch = {}
    for name, spec in specs.items():
        column = _checked([getattr(item, name) for item in items], spec.kind, name, of_items=True)
        batch[name] = CODECS[spec.kind].make(column, name, spec, context)
        absent = [index for index, value in enumerate(column) if value is None]
        if absent and batch[name] is not None:
            layout.absent[name] = absent
    return batch | ({"packed_seq_lens": context.lengths, "num_actions": context.actions} if packed else {})


def split_fields(batch: Any, specs: dict[str, FieldSpec], layout: BatchLayout) -> dict[str, list]:
    """{field: its value for each sample}; None where the batch or, by `layout`, the sample lacks the field.

    Args:
        batch: of B samples, padded or packed; DataError on a packed one that does not say how many actions they have.
        specs: the fields to split, by name.
        layout: what `make_fields` took down of it; an empty one for a batch that was made otherwise.
    """
    context = Splitting(batch, layout, batch.batch_size, getattr(batch, "is_packed", False))
    if context.packed and len(batch.num_actions or ()) != len(batch.packed_seq_lens):
        raise DataError("a packed batch needs num_actions for each of its samples")
    columns: dict[str, list] = {}
    for name, spec in specs.items():
        (value,) = _checked([getattr(batch, name)], spec.kind, name)
        column = [None] * context.size if value is None else CODECS[spec.kind].split(value, name, spec, context)
        if len(column) != context.size:
            raise DataError(f"{name} holds {len(column)} samples, the batch has {context.size}")
        for index in layout.absent.get(name, ()):
            if spec.kind is not Kind.INFO or not column[index]:  # an info dict that was filled since is kept
                column[index] = None
        columns[name] = column
    return columns


def packed_lengths(items: Sequence[Any]) -> tuple[list[int], list[int]]:
    """S and A of each text or vision-language item. Raises DataError when its fields contradict each other."""
    specs = replay_fields(type(items[0]))
    action_names = [name for name, spec in specs.items() if spec.kind is Kind.ACTIONS]
    number_names = [name for name, spec in specs.items() if spec.kind is Kind.NUMBERS]
    lengths, actions = [], []
    for index, item in enumerate(items):
        if not isinstance(item.sequences, T) or item.sequences.dim() != 1:
            raise DataError(f"sample {index}: sequences must be a tensor (S)")
        lengths.append(len(item.sequences))
        sizes: dict[str, int] = {}
        for name in (*action_names, *number_names):
            value = getattr(item, name)
            if value is not None:
                if not isinstance(value, T) or value.dim() == 0:
                    raise DataError(f"sample {index}: {name} must be a tensor with one number an action")
                sizes[name] = value.shape[0]
        own = {name: sizes[name] for name in action_names if name in sizes}
        count = max((own or sizes).values(), default=0)
        if own and min(own.values()) != count:
            raise DataError(f"sample {index}: per-action fields of different lengths: {own}")
        if count > len(item.sequences):
            raise DataError(f"sample {index}: {count} actions, but only {len(item.sequences)} tokens")
        actions.append(count)
    return lengths, actions


def _flat(column: Column, name: str, spec: FieldSpec, sizes: list[int]) -> T | None:
    """All samples' values behind each other, `spec.fill` where a sample lacks them; None if all do."""
    present = [value for value in column if value is not None]
    if not present:
        return None
    like = present[0]
    filled = [like.new_full((size,), spec.fill) if value is None else value for value, size in zip(column, sizes)]
    for index, (value, size) in enumerate(zip(filled, sizes)):
        if value.shape != (size,) or value.dtype != like.dtype:
            raise DataError(
                f"sample {index}: {name} is {value.dtype} {tuple(value.shape)}, expected {like.dtype} ({size},)"
            )
    return torch.cat(filled)


def _cut(flat: T, sizes: list[int], name: str) -> list[T]:
    """Copies of consecutive rows: an item that held a view would keep the whole batch in memory."""
    if len(flat) != sum(sizes):
        raise DataError(f"{name} has {len(flat)} rows, its samples own {sum(sizes)}")
    return [part.clone() for part in flat.split(sizes)]
