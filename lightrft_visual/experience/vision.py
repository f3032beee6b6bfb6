"""Vision inputs of samples, by the names that a model's forward takes: held once a prompt, joined when a model reads.

The samples of a prompt hold one and the same dict of tensors, from the processor to the replay buffer. Nothing writes
into these tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DataError
from ..runtime.host_copies import known_on_host, on_host, to_device
from .fields import values_equal

T = torch.Tensor

Named = dict[str, T]

# Names of transformers, and those of the replay contract where they are others.
_SHOWN = {
    "image_grid_thw": "image_grid_thws",
    "video_grid_thw": "video_grid_thws",
    "second_per_grid_ts": "video_seconds_per_grid",
}
_host_pixels = WeakTensorKeyDictionary()
PATCHES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}  # rows: t*h*w of each grid
# Beside pixels that are padded up to the largest of a batch these say what of them is real.
SIZES = ("image_sizes", "pixel_attention_mask", "image_position_ids")
_FILL = {"image_position_ids": -1}
PER_GRID = {"second_per_grid_ts": ("video_grid_thw", 1.0)}  # one number a row of the grids, and what stands for none


class InParts(Mapping[str, T]):
    """One sample's tensors in parts: those of the prompt, which its group shares, then those of each observation. Read
    by name they come joined."""

    def __init__(self, parts: Iterable[Named]):
        self.parts = tuple(parts)

    def __getitem__(self, name: str) -> T:
        found = VisionTensors(self.parts).get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for part in self.parts for name in part))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InParts) and values_equal(self.parts, other.parts)

    __hash__ = None  # type: ignore[assignment]


Sample = dict[str, T] | InParts


def parts_of(sample: Sample) -> tuple[Named, ...]:
    """What a sample is made of: the prompt's tensors, then those of observations."""
    return sample.parts if isinstance(sample, InParts) else (sample,)


class VisionTensors:
    """Vision inputs of B samples.

    samples: for each sample its tensors by name, {} without media; in each the rows (first dimension) follow the order
    of its media. The dicts are shared by reference and never changed; an episode's are several (`InParts`). A batch
    that came with all rows already joined is a single entry for all its samples, until `shared_out` says whose they
    are.
    """

    def __init__(self, samples: Iterable[Sample] = ({},)):
        self.samples = list(samples)

    @classmethod
    def of(cls, **tensors: T | None) -> VisionTensors:
        """One sample's, or a joined batch's, tensors by name; those that are None are left out."""
        return cls([{name: value for name, value in tensors.items() if value is not None}])

    @classmethod
    def gather(cls, parts: Iterable[VisionTensors]) -> VisionTensors:
        """All samples of all parts behind each other, by reference."""
        return cls(sample for part in parts for sample in part.samples)

    @classmethod
    def in_order(cls, parts: Sequence[VisionTensors]) -> VisionTensors:
        """One sample of a prompt's tensors and of those behind it, in their order."""
        return cls([InParts(each for part in parts for sample in part.samples for each in parts_of(sample))])

    @property
    def parts(self) -> list[Named]:
        """Of all samples behind each other."""
        return [part for sample in self.samples for part in parts_of(sample)]

    def __len__(self) -> int:
        return len(self.samples)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same samples, by shape, dtype and value."""
        return isinstance(other, VisionTensors) and values_equal(self.samples, other.samples)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in self.samples]
        return f"VisionTensors({shapes})"

    @property
    def names(self) -> list[str]:
        """Names that any sample has."""
        return list(dict.fromkeys(name for part in self.parts for name in part))

    @property
    def media(self) -> frozenset[str]:
        """Names of the pixels that any sample has: which of a model's towers have something to read."""
        return frozenset(name for part in self.parts for name in PATCHES if len(part.get(name, ())))

    def get(self, name: str) -> T | None:
        """The rows of all samples behind each other; None where no sample has the name."""
        own = self.parts
        parts = [part[name] for part in own if name in part]
        if name in PER_GRID and parts:
            parts = _filled(own, name, parts[0])
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        if len({part.shape[1:] for part in parts}) > 1 and all(_is_sized(part) for part in own if name in part):
            parts = _evened(parts, _FILL.get(name, 0))
        if parts[0].is_floating_point() and name not in PER_GRID:
            return torch.cat(parts)
        return to_device(torch.cat([on_host(part) for part in parts]), parts[0].device)  # sizes, which the host reads

    def joined(self) -> Named:
        """What the forward takes: every name that has rows."""
        found = {name: self.get(name) for name in self.names}
        whole = {name: tensor for name, tensor in found.items() if tensor is not None and len(tensor)}
        for name, grids in PATCHES.items():
            parts = [known_on_host(part[name]) for part in self.parts if name in part]
            if grids in whole and parts and all(part is not None for part in parts):
                _host_pixels[whole[grids]] = parts
        return whole

    def replaced(self, name: str, value: T | None) -> VisionTensors:
        """The same with another tensor, or none, under `name`, for all samples together."""
        tensors = {each: self.get(each) for each in self.names}
        return VisionTensors.of(**(tensors | {name: value}))

    def map(self, function: Callable[[T], T]) -> VisionTensors:
        """`function` applied once to each distinct tensor; what samples share they share afterwards."""
        parts = {id(part): part for part in self.parts}
        values = {id(value): value for part in parts.values() for value in part.values()}
        made = {key: function(value) for key, value in values.items()}
        others = {key: {name: made[id(own)] for name, own in part.items()} for key, part in parts.items()}
        return self.with_parts(others)

    def with_parts(self, others: Mapping[int, Named]) -> VisionTensors:
        """The same samples of other parts, by the ids of their own; samples that are one stay one."""
        made: dict[int, Sample] = {}
        for sample in self.samples:
            if id(sample) not in made:
                own = [others[id(part)] for part in parts_of(sample)]
                made[id(sample)] = InParts(own) if isinstance(sample, InParts) else own[0]
        return VisionTensors(made[id(sample)] for sample in self.samples)

    def to(self, device: torch.device | str) -> VisionTensors:
        """Every tensor on `device`; each distinct one is moved once."""
        return self.map(lambda tensor: to_device(tensor, device))

    def nbytes(self) -> int:
        """Bytes of the distinct storages that are held."""
        storages = [value.untyped_storage() for part in self.parts for value in part.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def count(self, kind: str) -> int:
        """Images or videos by the rows of the grids, or of the pixel values where a model has no grids."""
        pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
        grids = self.get(PATCHES[pixels])
        owner = self.get(pixels) if grids is None else grids
        return 0 if owner is None else len(owner)

    def shared_out(self, size: int, counts: dict[str, Sequence[int] | None]) -> list[Sample]:
        """The tensors of each of `size` samples.

        counts: images and videos of each sample, read where the rows came joined: by the grids' rows, else one row a
        medium. Without counts every sample owns one, if there are `size`. Raises DataError where that does not add up.
        """
        if len(self.samples) == size:
            return self.samples
        if len(self.samples) != 1:
            raise DataError(f"vision inputs of {len(self.samples)} samples, the batch has {size}")
        tensors = self.samples[0]
        columns = {name: _owned(tensors, name, size, counts) for name in tensors}
        return [{name: parts[i] for name, parts in columns.items() if len(parts[i])} for i in range(size)]


def pixels_on_host(grids: T) -> list[T] | None:
    """The patches that these grids of `VisionTensors.joined` divide, part by part; None where the host lacks them."""
    return _host_pixels.get(grids)


def _is_sized(part: Named) -> bool:
    return any(name in part for name in SIZES)


def _evened(parts: list[T], fill: int) -> list[T]:
    """Padded behind, along every axis but the first, to the largest of them."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    pads = [[size for n, most in zip(part.shape[:0:-1], largest[::-1]) for size in (0, most - n)] for part in parts]
    return [pad(part, each, value=fill) for part, each in zip(parts, pads)]


def _filled(samples: Sequence[Named], name: str, like: T) -> list[T]:
    grids, fill = PER_GRID[name]
    counts = [len(sample[grids]) if grids in sample else 0 for sample in samples]
    return [sample[name] if name in sample else like.new_full((n,), fill) for sample, n in zip(samples, counts)]


def _owned(tensors: Named, name: str, size: int, counts: dict[str, Sequence[int] | None]) -> list[T]:
    """Copies of each sample's rows: a view would keep the whole batch in memory."""
    value, grids = tensors[name], PATCHES.get(name)
    kind = "video" if "video" in name or name in PER_GRID else "image"
    if grids not in tensors:
        sizes = _counted(counts.get(kind), len(value), size, name, kind)
    else:
        media = _counted(counts.get(kind), len(tensors[grids]), size, grids, kind)
        patches = iter(tensors[grids].prod(-1).tolist())
        sizes = [sum(next(patches) for _ in range(n)) for n in media]
    if len(value) != sum(sizes):
        raise DataError(f"{shown(name)} has {len(value)} rows, its samples own {sum(sizes)}")
    return [part.clone() for part in value.split(sizes)]


def _counted(counts: Sequence[int] | None, length: int, size: int, name: str, kind: str) -> Sequence[int]:
    if counts is not None:
        if sum(counts) != length:
            raise DataError(f"{shown(name)} has {length} rows, its samples own {sum(counts)}")
        return counts
    if length in (0, size):
        return [length // size] * size
    raise DataError(f"{shown(name)}: {length} rows for {size} samples, and no {kind}_counts or raw_{kind}s tell whose")


def shown(name: str) -> str:
    """A tensor's name as items and batches call it."""
    return _SHOWN.get(name, name)


def check_alike(samples: Sequence[Sample]) -> None:
    """Raise DataError, naming sample and field, where a sample contradicts itself, or cannot be joined to others."""
    first: Named = {}
    parts: dict[int, tuple[int, Named]] = {}  # once each: the samples of a prompt share its parts
    for index, sample in enumerate(samples):
        for part in parts_of(sample):
            parts.setdefault(id(part), (index, part))
    for index, part in parts.values():
        for name, value in part.items():
            _check_lengths(part, name, index)
            like = first.setdefault(name, value)
            alike = value.shape[1:] == like.shape[1:] or (value.dim() == like.dim() and _is_sized(part))
            if not alike or value.dtype != like.dtype:
                raise DataError(
                    f"sample {index}: {shown(name)} is {value.dtype} {tuple(value.shape)}, which cannot be put behind "
                    f"{like.dtype} {tuple(like.shape)}"
                )
    for name, grids in PATCHES.items():
        gridless = any(len(part.get(name, ())) and grids not in part for _, part in parts.values())
        if gridless and grids in first:
            raise DataError(f"{name}: some samples have {shown(grids)} and others have {name} without them")


def _check_lengths(sample: Named, name: str, index: int) -> None:
    value, grids = sample[name], sample.get(PATCHES.get(name, ""))
    for each in (name, PATCHES.get(name, "")):
        if not isinstance(sample.get(each), torch.Tensor | None):
            raise DataError(f"sample {index}: {shown(each)} is a {type(sample[each]).__name__}, not a tensor")
    if name in PATCHES.values() and (value.dim() != 2 or value.shape[1] != 3):
        raise DataError(f"sample {index}: {shown(name)} must be (n, 3), not {tuple(value.shape)}")
    if grids is not None and grids.dim() == 2 and len(value) != int(grids.prod(-1).sum()):
        told = f"has {len(value)} patches, its {shown(PATCHES[name])} are {grids.tolist()}"
        raise DataError(f"sample {index}: {shown(name)} {told}")
    if name in PER_GRID:
        owner = PER_GRID[name][0]
        media = len(sample[owner]) if owner in sample else 0
        if value.shape != (media,):
            told = f"is {tuple(value.shape)}, its {shown(owner)} hold {media}"
            raise DataError(f"sample {index}: {shown(name)} {told}")


class VisionName:
    """A field of the contract: reads and writes one tensor of its object's `vision`.

    As the default of a dataclass field it also takes the constructor's argument, from which `adopt_given` makes
    `vision`.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, owner: Any, cls: type | None = None) -> T | None:
        return None if owner is None else owner.vision.get(self.name)

    def __set__(self, owner: Any, value: T | None) -> None:
        if "vision" in vars(owner):
            owner.vision = owner.vision.replaced(self.name, value)
        else:  # the constructor sets `vision` after the fields of the contract
            vars(owner).setdefault("_given", {})[self.name] = value


def adopt_given(owner: Any) -> None:
    """The end of a constructor: `vision` from the tensors given by their contract names, or as it was given itself.

    Where both were given, as `dataclasses.replace` does, the tensors that differ are put into it.
    """
    given = vars(owner).pop("_given", {})
    if owner.vision is None:
        owner.vision = VisionTensors.of(**given)
    elif any(value is not None for value in given.values()):
        for name, value in given.items():
            if not values_equal(owner.vision.get(name), value):
                owner.vision = owner.vision.replaced(name, value)


Conditions = dict[str, T]
NEGATIVE = "negative_"  # conditions of the unguided branch carry this prefix
MASK = "mask"


def widened(value: T, length: int) -> T:
    """The value with its second axis made longer, with zeros behind what is there. value: (B, L, ...); length: at
    least L."""
    missing = length - value.shape[1]
    return pad(value, (0, 0) * (value.dim() - 2) + (0, missing)) if missing else value


def joined(values: Sequence[T]) -> T:
    """Tensors (b, L, ...) of texts, or of any one shape (b, ...), behind each other along the first axis. Of masks,
    sizes and numbers (b) on a device that the host knows, it knows the result."""
    known = [_read_by_host(value) for value in values]
    if all(value is not None for value in known) and values[0] is not known[0]:
        return to_device(joined(known), values[0].device)
    if len({value.shape[1:] for value in values}) > 1:
        values = [widened(value, max(each.shape[1] for each in values)) for value in values]
    return torch.cat(list(values))


def samples_of(value: T, indices: list[int]) -> T:
    """Those of a tensor (B, ...); the host knows them where `joined` would have it know them."""
    known = _read_by_host(value)
    if known is None or known is value:
        return value[to_device(torch.tensor(indices), value.device)]
    return to_device(known[indices], value.device)


def _read_by_host(value: T) -> T | None:
    """The tensor on the host, of those that are small and that forwards decide by; None where it would have to wait."""
    return None if value.is_floating_point() and value.dim() > 1 else known_on_host(value)


def separate(conditions: Conditions) -> list[Conditions]:
    """The conditions (1, …) of each text of a batch, in memory of their own, without the padding up to others."""
    lengths, size = text_lengths(conditions), len(next(iter(conditions.values())))
    return [
        {
            name: value[index : index + 1, : lengths[name][index] if name in lengths else None].clone()
            for name, value in conditions.items()
        }
        for index in range(size)
    ]


def stacked(samples: Sequence[Conditions], device: torch.device) -> Conditions:
    """Conditions (B, …) on the device of samples that refer to theirs, (1, …) each; what several share moves once."""
    moved = {each: to_device(each, device) for each in {value for sample in samples for value in sample.values()}}
    return {name: joined([moved[sample[name]] for sample in samples]) for name in samples[0]}


def texts(conditions: Conditions) -> dict[str, T]:
    """The mask of each condition, by its name, that is as long as a text is: of one sample (L), of a batch (B, L)."""
    found = {}
    for name, value in conditions.items():
        mask = conditions.get(NEGATIVE + MASK if name.startswith(NEGATIVE) else MASK)
        if mask is not None and value.shape[: mask.dim()] == mask.shape:
            found[name] = mask
    return found


def used_widths(mask: T) -> list[int]:
    """Tokens of each text of a batch that is padded behind, by its mask (B, L): all L of a mask without contents (meta
    tensors, as plans compute with)."""
    return [mask.shape[1]] * len(mask) if mask.is_meta else on_host(mask).sum(dim=1).tolist()


def text_lengths(conditions: Conditions) -> dict[str, list[int]]:
    """For each condition of a batch that is padded, by its name: the length of every sample's own text, at least 1."""
    masks = texts(conditions)
    lengths = {
        id(mask): (mask.bool() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp_min(1).tolist()
        for mask in masks.values()
    }
    return {name: lengths[id(mask)] for name, mask in masks.items()}
