"""The trainer's weights under checkpoint names, whole: from ZeRO shards in buckets, and with LoRA merged."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import nn
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from ..errors import RolloutError
from ..runtime.checkpoint.export import TRANSPOSED, KeptShare
from ..runtime.checkpoint.manifest import is_adapted, plain_name
from ..runtime.host_memory import in_buckets
from ..runtime.train_engine import TrainEngine

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

T = torch.Tensor
# Of weights that ZeRO-3 gathers at once. Each gathering ends with a wait for the device, so many small ones are slow.
BUCKET_BYTES = 512 * 2**20
# model -> {a weight's name: that in the files of its checkpoint}, of weights that are only renamed.
_renamed: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Weight:
    """One tensor of the checkpoint. parameters: what must be whole when `value` makes it."""

    name: str
    parameters: list[nn.Parameter]
    value: Callable[[], T]


def whole_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Of parameters when they are whole."""
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters)


def named_weights(
    engine: TrainEngine, bucket_bytes: int = BUCKET_BYTES, share: KeptShare | None = None
) -> Iterator[tuple[str, T]]:
    """(checkpoint name, tensor) of every weight of the policy, in module order; tied weights come once.

    Tensors are the trainer's own, where nothing has to be gathered or merged: read them at once. LoRA layers come
    as base + scale * B A, leaving the layers themselves as they are.

    Args:
        engine: with the policy.
        bucket_bytes: gathered at a time under ZeRO-3 (one larger weight alone), so all ranks must consume in step; a
            gathered tensor stays as long as it is referred to.
        share: gets what the sums keep.
    """
    model = engine.module.model
    plain = (_Weight(name, [each], partial(getattr, each, "data")) for name, each in model.named_parameters())
    weights = _merged(model, share) if is_adapted(model) else plain
    for bucket in in_buckets(weights, bucket_bytes, lambda weight: whole_bytes(weight.parameters)):
        with engine.gathered([parameter for weight in bucket for parameter in weight.parameters]):
            for weight in bucket:
                yield weight.name, weight.value().detach()


@dataclass(frozen=True)
class EngineWeights:
    """What the rollout engine takes of the actor's weights: all, or LoRA's adapters alone; gathered in each pass."""

    engine: Any
    actor: TrainEngine

    def __iter__(self) -> Iterator[tuple[str, T]]:
        if self.engine.adapters_alone:
            return adapter_weights(self.actor)
        if self.engine.file_names:
            whole = itertools.chain(named_weights(self.actor), _kept_buffers(self.actor.module.model))
            return _as_in_files(self.actor.module.transformer, whole)
        return named_weights(self.actor)


def _as_in_files(model: PreTrainedModel, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """By the names, and in the parts, that the files had which transformers loaded: what engines know.

    transformers renames modules of older checkpoints, and holds the experts of a layer in one tensor. Where it takes
    several tensors to make one of a file's, or the engine turns them itself, names stay as they are. Of weights that
    are renamed and no more it is asked once: hundreds of names at every sync cost a tenth of a second."""
    changes = getattr(model, "_weight_conversions", None) or []
    joined = any(isinstance(each, WeightConverter) and len(each.target_patterns) > 1 for each in changes)
    if joined or model.config.model_type in TRANSPOSED:
        changes = []
    renamed = _renamed.setdefault(model, {})
    for name, tensor in weights:
        if not changes or name in renamed:
            yield renamed.get(name, name), tensor
            continue
        made = revert_weight_conversion(model, {name: tensor})
        if [part is tensor for part in made.values()] == [True]:
            renamed[name] = next(iter(made))
        yield from made.items()


def adapter_weights(engine: TrainEngine) -> Iterator[tuple[str, T]]:
    """(name in the trainer's model, tensor) of LoRA's adapters alone, whole. Each rank must read all of them."""
    named = [(name, parameter) for name, parameter in engine.module.model.named_parameters() if ".lora_" in name]
    with engine.gathered([parameter for _, parameter in named]):
        for name, parameter in named:
            yield name, parameter.detach()


def _merged(model: PeftModel, share: KeptShare | None) -> Iterator[_Weight]:
    from peft.tuners.lora import LoraLayer

    base, adapters = model.get_base_model(), {}
    for module in base.modules():
        if isinstance(module, LoraLayer):  # of experts each adapts a parameter, and they stand around each other
            name = getattr(module, "parameter_name", "weight")
            adapters[id(getattr(module.get_base_layer(), name))] = module
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        layer = adapters.get(id(parameter))
        own = layer.named_parameters() if layer is not None else ()
        together = [parameter, *(part for key, part in own if not key.startswith("base_layer."))]
        yield _Weight(plain_name(name), together, partial(_sum, parameter, layer, share))


def _sum(parameter: nn.Parameter, layer: LoraLayer | None, share: KeptShare | None) -> T:
    """A weight with its adapters, as a new tensor where it has any."""
    tensor = parameter.data
    if layer is not None:
        for adapter in layer.active_adapters:
            change = layer.get_delta_weight(adapter)
            tensor = tensor + change.to(tensor.dtype) if share is None else share.sum(tensor, change)
    return tensor


def gathered_state_dict(engine: TrainEngine, keep: bool) -> dict[str, T]:
    """All weights under checkpoint names on the host, and what a checkpoint holds beside them (running means of
    batch norms). A collective. keep: whether this rank keeps them (rank 0); elsewhere the result is empty."""
    state: dict[str, T] = {}
    share = KeptShare()
    whole = named_weights(engine, share=share if keep else None)
    for name, tensor in itertools.chain(whole, _kept_buffers(engine.module.model)):
        if keep:
            state[name] = tensor.to("cpu", copy=True)
    share.warn("the export's folder `lora` has all of it; or train longer, or at a larger rate")
    return state


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, T]]:
    """(checkpoint name, tensor) of the buffers that a checkpoint holds; no rank has them divided."""
    base = model.get_base_model() if is_adapted(model) else model
    held = base.state_dict().keys()
    return ((name.replace(".base_layer.", "."), buffer) for name, buffer in base.named_buffers() if name in held)


POST_BUCKET_BYTES = 64 * 2**20
THREADS = min(4, len(os.sched_getaffinity(0)))  # of the host, while nothing else runs on it
ALIGNED = 64  # bytes
HEADER = ALIGNED  # bytes before a memory file's content: `checksum_found`
CHUNK_BYTES = 256 * 2**10  # written and hashed at once: what stays in a core's own cache in between


class WeightsRefused(RolloutError):
    """A version whose bytes are not those that were posted; the worker keeps the weights that it has."""


@dataclass(frozen=True)
class FileAt:
    """A memory file. path: for processes of the trainer's host and user; name: which no other file has. On another
    host the path may be that of something else."""

    path: str
    name: str


@dataclass(frozen=True)
class TensorAt:
    """One tensor inside a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors in a row. file: on the trainer's host; stored: the same in Ray's object store, for workers that
    cannot reach it."""

    tensors: tuple[TensorAt, ...]
    bytes: int
    checksum: int
    file: FileAt | None = None
    stored: Any = None


@dataclass(frozen=True)
class Posted:
    """A version of the weights. number: counts the versions of a run, each of which is other weights."""

    number: int
    buckets: tuple[Bucket, ...]

    @property
    def near(self) -> bool:
        """Whether processes of this host and user can map all of it."""
        return all(bucket.file is not None and reachable(bucket.file) for bucket in self.buckets)


def checksum_found(file: T) -> np.ndarray:
    """(1) uint64, the first bytes of a memory file, by which the processes of this host that map it tell each other
    about its content: the checksum that one of them has found; 0 for none."""
    return file[:8].numpy().view(np.uint64)


class MemoryFile:
    """Memory for `size` bytes that other processes of the host can map, while this object lives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._name = f"lightrft_weights_{secrets.token_hex(16)}"
        self._descriptor = os.memfd_create(self._name)
        os.ftruncate(self._descriptor, HEADER + self.size)
        self._map = mmap.mmap(self._descriptor, HEADER + self.size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.content, self.found = whole[HEADER:], checksum_found(whole)
        weakref.finalize(self, os.close, self._descriptor)  # also when the process ends, before os is gone

    @property
    def at(self) -> FileAt:
        """Where a process of the same user and host finds it."""
        return FileAt(f"/proc/{os.getpid()}/fd/{self._descriptor}", self._name)


class WeightPost:
    """The trainer's side: writes versions into memory files, of which `turns` take turns for each place.

    Workers may still read a version, and even compute with it where it lies, when the next ones are written: there are
    two turns where all take over a version at once, and one more for each batch that is generated ahead, which is how
    long work with an old version can take.

    store: puts an array into the object store and returns its reference; None where every worker shares this memory.
    shared: whether any does.
    """

    def __init__(
        self,
        bucket_bytes: int = POST_BUCKET_BYTES,
        turns: int = 2,
        store: Callable[[Any], Any] | None = None,
        shared: bool = True,
    ) -> None:
        self.turns = turns
        self.bucket_bytes, self.store, self.shared = bucket_bytes, store, shared
        self.number = 0
        self._files: dict[tuple[int, int], MemoryFile] = {}  # by (turn, place)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")

    def post(self, named_tensors: Iterable[tuple[str, T]]) -> Posted:
        """The next version: all tensors, written while others still come, a bucket by each thread."""
        self.number += 1
        buckets: list[Bucket] = []
        writing: deque[Future] = deque()
        for index, (tensors, size) in enumerate(cut(named_tensors, self.bucket_bytes)):
            if len(writing) == THREADS:  # under ZeRO-3 what waits is held whole
                buckets.append(writing.popleft().result())
            writing.append(self._threads.submit(self._bucket, self._file(index, size), tensors, size))
        return Posted(self.number, (*buckets, *(each.result() for each in writing)))

    def _bucket(self, file: MemoryFile, tensors: list[tuple[str, T, int]], size: int) -> Bucket:
        content, digest = file.content[:size].numpy(), xxhash.xxh3_64()
        ends = [*(start for _, _, start in tensors[1:]), size]
        file.found[0] = 0
        for (_, tensor, start), end in zip(tensors, ends):
            written = start + _written(tensor.detach(), file.content[start : start + tensor.nbytes], digest)
            digest.update(content[written:end])
        layout = tuple(
            TensorAt(name, tensor.dtype, tuple(tensor.shape), start, tensor.nbytes) for name, tensor, start in tensors
        )
        checksum = digest.intdigest()
        stored = self.store(content) if self.store is not None else None
        return Bucket(layout, size, checksum, file.at if self.shared else None, stored)

    def _file(self, index: int, size: int) -> MemoryFile:
        key = (self.number % self.turns, index)
        if key not in self._files or self._files[key].size < size:
            self._files[key] = MemoryFile(max(size, ALIGNED))
        return self._files[key]


def cut(named_tensors: Iterable[tuple[str, T]], most: int) -> Iterator[tuple[list[tuple[str, T, int]], int]]:
    """((name, tensor, where it begins) of a bucket, its bytes), at most `most`. A tensor stays whole, however large."""
    for bucket in in_buckets(named_tensors, most, lambda each: _aligned(each[1].nbytes)):
        starts = [0, *itertools.accumulate(_aligned(tensor.nbytes) for _, tensor in bucket)]
        yield [(name, tensor, start) for (name, tensor), start in zip(bucket, starts)], starts[-1]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _written(tensor: T, into: T, digest: xxhash.xxh3_64) -> int:
    """Write a tensor into as many bytes; how many of them were hashed on the way, while they were in a cache."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return 0
    source, target = tensor.reshape(-1).view(torch.uint8).numpy(), into.numpy()
    for start in range(0, len(source), CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        target[chunk] = source[chunk]
        digest.update(target[chunk])
    return len(source)


def reachable(file: FileAt) -> bool:
    """Whether this process can map a memory file: it is on the trainer's host, and the same user's."""
    try:
        return os.readlink(file.path).startswith(f"/memfd:{file.name}") and os.access(file.path, os.R_OK)
    except OSError:
        return False


class MappedFiles:
    """Memory files of the trainer that this process maps. They are kept: finding the pages of a new map takes about as
    long as copying them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[FileAt, T]] = {}  # by path, which may come back with another file

    def content(self, bucket: Bucket) -> tuple[T, np.ndarray]:
        """The bytes of a bucket, and what is known of them. Raises WeightsRefused where its file cannot be mapped."""
        file = bucket.file
        try:
            known, whole = self._known.get(file.path, (None, None))
            if known != file:
                if not reachable(file):
                    raise FileNotFoundError(f"{file.name} is not there")
                # Shared, so that `take_over` knows it; nobody but the trainer writes the content.
                size = os.stat(file.path).st_size
                whole = torch.from_file(file.path, shared=True, size=size, dtype=torch.uint8)
                self._known[file.path] = file, whole
            return whole[HEADER : HEADER + bucket.bytes], checksum_found(whole)
        except (OSError, RuntimeError) as error:
            raise WeightsRefused(f"the trainer's memory {file.path} cannot be mapped: {error}") from error


def received(
    posted: Posted, fetch: Callable[[Any], Any] | None = None, files: MappedFiles | None = None
) -> list[tuple[str, T]]:
    """The tensors of a version, all of whose buckets were checked; views of what was mapped or fetched, to be copied.

    Args:
        posted: where the buckets are, and their checksums; WeightsRefused for other bytes than those.
        fetch: gets an array of the object store; None where all buckets are files of this host.
        files: those that this process has mapped already; None: none.
    """
    known = files or MappedFiles()

    def content(bucket: Bucket) -> tuple[T, np.ndarray | None]:
        near = bucket.file is not None and (bucket.stored is None or reachable(bucket.file))
        return known.content(bucket) if near else (torch.from_numpy(fetch(bucket.stored)), None)

    def check(index: int) -> None:
        (own, found), bucket = contents[index], posted.buckets[index]
        if found is not None and int(found[0]) == bucket.checksum:
            return
        checksum = xxhash.xxh3_64_intdigest(own[: bucket.bytes].numpy())
        if checksum != bucket.checksum:
            raise WeightsRefused(
                f"bucket {index} of weight version {posted.number} has the checksum {checksum:016x}, posted was "
                f"{bucket.checksum:016x}: it was damaged on its way, and the worker keeps its weights"
            )
        if found is not None:
            found[0] = checksum

    with ThreadPoolExecutor(THREADS) as threads:
        contents = list(threads.map(content, posted.buckets))
        # In another order in each process: those of a host share the work, and nobody waits for one that died at it.
        order = random.Random(os.getpid()).sample(range(len(contents)), len(contents))
        list(threads.map(check, order))
    return [
        (at.name, content[at.start : at.start + at.bytes].view(at.dtype).view(at.shape))
        for bucket, content in zip(posted.buckets, (own for own, _ in contents))
        for at in bucket.tensors
    ]


@torch.no_grad()
def take_over(parameter: nn.Parameter, tensor: T) -> None:
    """Give an engine's parameter what a worker received, in the trainer's precision: by a copy, or as it lies in memory
    that is shared with the trainer, which leaves a version alone for as long as workers may compute with it
    (`WeightPost`)."""
    mapped, held = (each.device.type == "cpu" and each.is_shared() for each in (tensor, parameter.data))
    if mapped and (tensor.device, tensor.shape) == (parameter.device, parameter.shape):
        parameter.data = tensor
    elif held or tensor.dtype != parameter.dtype:  # held: the trainer's memory, which it writes to and others read
        parameter.data = tensor.to(parameter.device, copy=True)
    else:
        parameter.copy_(tensor)
