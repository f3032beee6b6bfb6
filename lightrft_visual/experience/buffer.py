"""The replay buffer between rollouts and training: holds single samples, gives out batches."""

import copy
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from PIL import Image

from ..errors import CheckpointError, ConfigError, DataError
from ..runtime import collectives
from ..runtime.sequence import SequenceGroup
from . import batch_plan as sampling
from .batch_plan import MicroBatch, SampleRef
from .codecs import packed_lengths
from .fields import InfoLayout, Kind, replay_fields
from .items import (
    AnyExperience,
    AnyItem,
    BufferItemDiffusion,
    BufferItemVL,
    check_batch,
    make_experience_batch,
    split_experience_batch,
    strip_padding,
)
from .types import BatchLayout, Experience, ExperienceDiffusion, ExperienceVL
from .vision import InParts, VisionTensors, parts_of

T = torch.Tensor

_CLASSES: dict[str, type] = {each.__name__: each for each in (Experience, ExperienceVL, ExperienceDiffusion)}
_PNG, _VISION = "__png__", "__vision__"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)


def items_to_state(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """A few packed batches instead of thousands of little tensors; tensors are copied to the CPU.

    Images are kept as PNG. Raises CheckpointError on an object that cannot be stored safely, with its place.
    """
    runs = [list(run) for _, run in itertools.groupby(items, key=_batchable)]
    return [_batch_to_state(run) for run in runs]


def items_from_state(state: Sequence[dict[str, Any]]) -> list[AnyItem]:
    """The inverse of `items_to_state`."""
    items: list[AnyItem] = []
    for each in state:
        values = _decode(each["fields"])
        layout = dict(each["layout"])
        layout["info"] = InfoLayout(**layout["info"])
        batch = _CLASSES[each["class"]](**values, layout=BatchLayout(**layout))
        items.extend(split_experience_batch(batch))
    return items


def _batchable(item: AnyItem) -> tuple:
    """Consecutive items with the same value go into one batch: trajectories must have equal shapes."""
    if not isinstance(item, BufferItemDiffusion):
        return ()
    specs = replay_fields(type(item)).items()
    tensors = {name: getattr(item, name) for name, spec in specs if spec.kind is Kind.SAMPLE}
    tensors.update(item.prompt_embeds or {})
    return tuple((name, value.shape, value.dtype) for name, value in tensors.items() if value is not None)


def _batch_to_state(items: list[AnyItem]) -> dict[str, Any]:
    batch = make_experience_batch(items, packing_samples=not isinstance(items[0], BufferItemDiffusion))
    names = [*replay_fields(type(batch))]
    if batch.layout.spans is None and not isinstance(batch, ExperienceDiffusion):
        names += ["packed_seq_lens", "num_actions"]
    return {
        "class": type(batch).__name__,
        "fields": {name: _encode(getattr(batch, name), name) for name in names},
        "layout": _encode(asdict(batch.layout), "layout"),
    }


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, VisionTensors):
        distinct = list({id(part): part for part in value.parts}.values())
        indices = {id(part): index for index, part in enumerate(distinct)}
        order = [
            [indices[id(part)] for part in parts_of(sample)] if isinstance(sample, InParts) else indices[id(sample)]
            for sample in value.samples
        ]
        return {_VISION: _encode(distinct, where), "samples": order}
    if isinstance(value, dict):
        return {key: _encode(each, f"{where}[{key}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encode(each, f"{where}[{index}]") for index, each in enumerate(value))
    if isinstance(value, Image.Image):
        return {_PNG: _png(value, where)}
    if type(value) not in _PLAIN and not isinstance(value, torch.dtype):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which a checkpoint of the replay buffer cannot hold"
        )
    return value


def _png(image: Image.Image, where: str) -> torch.Tensor:
    stream = io.BytesIO()
    try:
        image.save(stream, format="PNG")
    except OSError as error:
        raise CheckpointError(f"{where}: an image of mode {image.mode} cannot be stored as PNG") from error
    return torch.from_numpy(np.frombuffer(stream.getvalue(), dtype=np.uint8).copy())


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_PNG}:
            with Image.open(io.BytesIO(value[_PNG].numpy().tobytes()), formats=["PNG"]) as image:
                image.load()
                return image
        if _VISION in value:
            distinct = _decode(value[_VISION])
            return VisionTensors(
                InParts(distinct[index] for index in own) if isinstance(own, list) else distinct[own]
                for own in value["samples"]
            )
        return {key: _decode(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decode(each) for each in value)
    return value


_STATE_VERSION = 1
_MIN_VARIANCE = 1e-8


@dataclass(eq=False, repr=False)
class NaiveReplayBuffer:
    """Samples of one rank: text, vision-language or diffusion. After LightRFT.

    sample_batch_size: samples of a micro-batch; limit: samples kept, the oldest dropped first, 0 for all; cpu_offload:
    hold samples on the CPU and move batches to the accelerator; packing_samples: give out packed batches; seed: of the
    draws of `sample`; share_prefix: the models compute the prompt of a group once, so `plan` keeps groups together;
    keep_groups: so does it because their losses meet in one term; sequence: the ranks that train on the same samples.
    """

    sample_batch_size: int
    limit: int = 0
    cpu_offload: bool = True
    packing_samples: bool = False
    seed: int = 42
    share_prefix: bool = False
    keep_groups: bool = False
    sequence: SequenceGroup | None = None
    items: list[AnyItem] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.sample_batch_size < 1:
            raise ConfigError(f"sample_batch_size must be at least 1, not {self.sample_batch_size}")
        self._copies = 1 if self.sequence is None else self.sequence.size  # ranks that have the same samples
        self.counts = self.sequence is None or self.sequence.leads  # of those ranks the first one counts them
        self._generator = torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def append(self, experience: AnyExperience) -> None:
        """Add the samples of a padded or packed batch, without padding. The batch stays as it was and can be freed.

        Vision inputs are kept by reference: the samples of a prompt hold one copy of its patches.
        """
        check_batch(experience)
        if self.cpu_offload:
            experience = copy.copy(experience).to_device("cpu")
        self.items.extend(strip_padding(experience))
        if self.limit > 0:
            del self.items[: -self.limit]

    def share(self) -> None:
        """Give each rank of a sequence group the samples of all its members, once all are appended. A collective."""
        if self.sequence is None:
            return
        own = collectives.rank()
        first = own - self.sequence.index
        members = range(first, first + self.sequence.size)
        outgoing = [self.items if rank in members else [] for rank in range(collectives.world_size())]
        received = collectives.exchange_objects(outgoing)
        self.items = [item for rank in members for item in (self.items if rank == own else received[rank])]

    def clear(self) -> None:
        """Drop all samples."""
        self.items.clear()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> AnyItem:
        return self.items[index]

    def __iter__(self) -> Iterator[AnyItem]:
        return iter(self.items)

    def collate_fn(self, batch: Sequence[AnyItem]) -> AnyExperience:
        """Batch samples, packed if the buffer packs; on the samples' device."""
        return make_experience_batch(batch, self.packing_samples)

    def sample(self) -> AnyExperience:
        """`sample_batch_size` different samples, drawn at random. Raises DataError if there are fewer."""
        if self.sample_batch_size > len(self.items):
            raise DataError(f"cannot draw {self.sample_batch_size} samples, the buffer holds {len(self.items)}")
        order = torch.randperm(len(self.items), generator=self._generator)
        return self.load(MicroBatch(order[: self.sample_batch_size].tolist()))

    def gather(self, micro_batch: MicroBatch) -> AnyExperience:
        """The batch of a planned micro-batch, where the samples are held."""
        items = [self.items[index] for index in micro_batch.indices]
        if micro_batch.filler:
            items = [replace(item, valid=torch.tensor(False)) for item in items]
        return make_experience_batch(items, self.packing_samples)

    def load(self, micro_batch: MicroBatch) -> AnyExperience:
        """The batch of a planned micro-batch, on the accelerator if samples are held on the CPU."""
        experience = self.gather(micro_batch)
        return experience.to_device(get_accelerator().current_device_name()) if self.cpu_offload else experience

    @torch.no_grad()
    def fill(self, name: str, found: Sequence[tuple[MicroBatch, T]]) -> None:
        """Give the samples of planned micro-batches their values (B, A) of a per-action field; one copy to the host."""
        if not found:
            return
        joined = torch.cat([values.reshape(-1) for _, values in found])
        joined = joined.cpu() if self.cpu_offload else joined
        for (micro_batch, values), own in zip(found, joined.split([values.numel() for _, values in found])):
            items = [self.items[index] for index in micro_batch.indices]
            for item, count, padded in zip(items, packed_lengths(items)[1], own.view(values.shape), strict=True):
                setattr(item, name, padded[:count].clone())

    def plan(
        self, seed: int, *, step_size: int | None = None, token_budget: int | None = None
    ) -> list[list[MicroBatch]]:
        """Shuffled micro-batches of this rank for each optimizer step of one epoch. All ranks must call it.

        Every rank gets the same number of micro-batches in every step: for `load`, one after the other. With sample
        ids, which samples make up a step does not depend on the number of ranks, and some samples change ranks so that
        each has an equal share of every step (only if samples are held on the CPU); the indices are valid until the
        next change of the buffer. Steps of responses are made of whole groups where they fit. With `share_prefix`,
        which changes no step, micro-batches are too, and a prompt's tokens count once (see `batch_plan.micro_batches`).

        Args:
            seed: of the order; pass another one for each epoch.
            step_size: samples of one step over all ranks; None: all in one step.
            token_budget: a micro-batch holds as many samples as fit into that many tokens, packed; None:
                `sample_batch_size`.

        Raises:
            ConfigError: a token budget without packing.
            DataError: a rank holds no sample at all, or a sample is longer than the budget.
        """
        if token_budget is not None and not self.packing_samples:
            raise ConfigError("a token budget needs packing_samples")
        samples = self._references()
        steps = sampling.shuffled_steps(samples, step_size, seed)
        # Ranks, or groups of ranks that have the same samples.
        ranks, own = collectives.world_size() // self._copies, collectives.rank() // self._copies
        if ranks > 1 and self.cpu_offload and sampling.have_keys(samples):
            by_tokens = token_budget is not None
            moves = [move for step in steps for move in sampling.moves_between_ranks(step, ranks, by_tokens)]
            if moves:
                self._exchange(moves)
                samples = self._references()
                steps = sampling.shuffled_steps(samples, step_size, seed)
        plans = (sampling.micro_batches(step, ranks, self.sample_batch_size, token_budget) for step in steps)
        return [sampling.own_micro_batches(plan, own, samples) for plan in plans]

    def _exchange(self, moves: Sequence[tuple[SampleRef, int]]) -> None:
        """Give the listed samples to their new ranks. All ranks call it with the same moves.

        The samples of a prompt that go to one rank take its patches along once. Members of a group send to those of
        another that have their place in it.
        """
        part, position = divmod(collectives.rank(), self._copies)
        leaving = {sample.index: target * self._copies + position for sample, target in moves if sample.rank == part}
        outgoing = [
            [self.items[index] for index, target in leaving.items() if target == other]
            for other in range(collectives.world_size())
        ]
        staying = [item for index, item in enumerate(self.items) if index not in leaving]
        arriving = [item for sent in collectives.exchange_objects(outgoing) for item in sent]
        self.items = staying + arriving

    def batches(self, seed: int, *, token_budget: int | None = None) -> Iterator[AnyExperience]:
        """All samples once, in shuffled micro-batches; every rank gets the same number of them (see `plan`)."""
        for step in self.plan(seed, token_budget=token_budget):
            yield from map(self.load, step)

    def _references(self) -> list[SampleRef]:
        """All samples of all ranks, by rank or group of ranks."""
        rank = collectives.rank() // self._copies
        own = [
            SampleRef(
                rank,
                index,
                1 if isinstance(item, BufferItemDiffusion) else len(item.sequences),
                None if item.sample_id is None else int(item.sample_id),
                *shared,
                together=_group(item),
                media=item.vision.media if isinstance(item, BufferItemVL) else frozenset(),
            )
            for index, (item, shared) in enumerate(zip(self.items, self._shared_prompts(), strict=True))
        ]
        gathered = collectives.all_gather_object(own)[:: self._copies]
        if not all(gathered):
            raise DataError(f"replay buffer without samples; samples by rank: {[len(each) for each in gathered]}")
        return [sample for each in gathered for sample in each]

    def _shared_prompts(self) -> list[tuple[int | None, int]]:
        """(group, or None, and its prompt's tokens) of each sample."""
        if self.keep_groups:
            return [(None if item.group_id is None else int(item.group_id), 0) for item in self.items]
        if not self.share_prefix or not self.items:
            return [(None, 0)] * len(self.items)
        lengths = zip(*packed_lengths(self.items))
        return [(_group(item), length - count) for item, (length, count) in zip(self.items, lengths)]

    @torch.no_grad()
    def normalize(self, attribute: str, strategy: Any = None) -> None:
        """Bring `attribute` (such as "advantages") to mean 0 and standard deviation 1 over all ranks.

        Mean and standard deviation (population) count only actions that the action mask keeps, of samples that are not
        invalid. All ranks must call it. strategy: whose `all_reduce(tensor, "sum")` to use; None for the process group.
        Raises ConfigError if the samples have no such per-action or per-sample field; samples without a value stay so.
        """
        held = [(item, own) for item in self.items if (own := _numbers(item, attribute)) is not None]
        values = _concat([own.double() for _, own in held])
        counts = _concat([_counted(item, own) for item, own in held]).bool()
        kept = values[counts]
        sums = torch.stack([kept.sum(), counts.sum().double()])
        total, count = self._sum(sums, strategy).tolist()
        mean = total / count if count else 0.0
        squares = self._sum((kept - mean).square().sum(), strategy).item()
        if not count:
            return
        normal = (values - mean) * max(squares / count, _MIN_VARIANCE) ** -0.5
        for (item, own), part in zip(held, normal.split([own.numel() for _, own in held])):
            dtype = own.dtype if own.is_floating_point() else torch.float32
            setattr(item, attribute, part.reshape(own.shape).to(dtype, copy=True))

    @staticmethod
    def _sum(tensor: T, strategy: Any) -> T:
        if collectives.world_size() > 1:
            tensor = tensor.to(get_accelerator().current_device_name())
        return collectives.all_reduce_sum(tensor) if strategy is None else strategy.all_reduce(tensor, "sum")

    def state_dict(self) -> dict[str, Any]:
        """All samples and the random state, as plain tensors and containers (safe to load with weights_only)."""
        return {
            "version": _STATE_VERSION,
            "items": items_to_state(self.items),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the samples and the random state. Raises CheckpointError on a state of another version."""
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(f"replay buffer state of version {state.get('version')}, expected {_STATE_VERSION}")
        self.items = items_from_state(state["items"])
        self._generator.set_state(state["generator"].cpu())


def _group(item: AnyItem) -> int | None:
    """The group of a response; None without one, and of a drawn image, whose losses do not care."""
    if isinstance(item, BufferItemDiffusion) or item.group_id is None or item.group_id == -1:
        return None
    return int(item.group_id)


def _numbers(item: AnyItem, attribute: str) -> T | None:
    spec = replay_fields(type(item)).get(attribute)
    if spec is None or spec.kind not in (Kind.ACTIONS, Kind.NUMBERS, Kind.SAMPLE):
        raise ConfigError(f"{type(item).__name__} has no numbers {attribute!r} to normalize")
    return getattr(item, attribute)


def _concat(parts: list[T]) -> T:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)


def _counted(item: AnyItem, value: T) -> T:
    """Bool of the shape of `value`: which numbers count. One number for a whole sample counts once."""
    if item.valid is not None and not bool(item.valid):
        return torch.zeros_like(value, dtype=torch.bool)
    if isinstance(item, BufferItemDiffusion) or item.action_mask is None:
        return torch.ones_like(value, dtype=torch.bool)
    mask = item.action_mask.bool()
    return mask if mask.shape == value.shape else mask.any().expand(value.shape)
