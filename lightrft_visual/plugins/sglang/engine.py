"""SGLang beside the trainer: its `Engine`, whose scheduler is a process of its own on the same device.

Written against the source of the version that `arguments.VERSION` names, and checked against its signatures.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...config.vl import RunConfig
from ...errors import RolloutError
from ...experience.rollouts import Completion, PromptFeatures, SamplingSettings
from ...models.loading import Checkpoint
from ...rollout.engine import Finished
from ...rollout.resident import ResidentEngine
from ...runtime.start_up import importing
from ...runtime.train_engine import TrainEngine
from .arguments import context_length, prepare_environment, require_package, server_arguments, share_of_free
from .mapping import buckets, completion, request, within_context

WEIGHTS, CACHE = "weights", "kv_cache"  # SGLang's tags of memory that can be released


class SGLangEngine(ResidentEngine):
    """Generation by `sglang.Engine`. One rank is one engine.

    actor: not read, as weights come by `update_weights`. Raises ConfigError without the package or for settings that it
    does not know, RolloutError when the engine cannot be built or answers something else than it was asked.
    """

    def __init__(self, config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine | None = None):
        require_package()
        prepare_environment()
        self.enable_sleep, self.context_length = config.rollout.enable_engine_sleep, context_length(config)
        self.tokenizer, self.eos_ids = checkpoint.tokenizer, checkpoint.eos_ids
        self.banned_ids = checkpoint.family.banned_ids(checkpoint.tokenizer)
        self.engine = self._build(config, checkpoint)

    def _build(self, config: RunConfig, checkpoint: Checkpoint) -> Any:
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        device = 0 if on_cpu else int(accelerator.current_device())
        arguments = server_arguments(config, checkpoint, device, on_cpu)
        if not on_cpu:
            accelerator.empty_cache()  # what PyTorch keeps would count as taken
            free, total = torch.accelerator.get_memory_info()  # as SGLang asks
            arguments["mem_fraction_static"] = share_of_free(config.rollout.engine_mem_util, total, free)
        with _process_as_it_was():
            with importing():
                import sglang
            try:
                engine = sglang.Engine(**arguments)
                engine.flush_cache()  # the first call sets signal handlers too
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise RolloutError(f"SGLang could not load {checkpoint.path}: {told}") from error
        return engine

    def generate(
        self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """n completions per prompt, in order.

        Args:
            prompts: what is continued.
            settings: n, and how tokens are chosen.
            finished: called with (number of a prompt, its completions) as soon as all of these are there.
        """
        self.make_ready()
        own = [within_context(prompt, settings, self.context_length) for prompt in prompts]
        asked = [request(prompt, each, self.banned_ids, self.eos_ids) for prompt, each in zip(prompts, own)]
        made: list[list[Completion]] = [[] for _ in prompts]

        async def one(number: int) -> None:
            outputs = await self.engine.async_generate(**asked[number])
            if len(outputs) != own[number].n:
                raise RolloutError(f"SGLang returned {len(outputs)} completions where {own[number].n} were asked for")
            told = prompts[number], own[number], self.eos_ids, self.tokenizer
            made[number] = [completion(output, *told) for output in outputs]
            if finished is not None:
                finished(number, made[number])

        async def all_of_them() -> None:
            await asyncio.gather(*(one(number) for number in range(len(prompts))))

        try:
            self.engine.loop.run_until_complete(all_of_them())
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"  # requests of the failed call may still be under way
            if isinstance(error, RolloutError):
                raise
            raise RolloutError(f"SGLang failed while generating: {self.failure}") from error
        return made

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load new weights in place, then drop every cache that was computed with the old ones.

        An engine that sleeps is woken, but for a KV cache that went with the old weights: `wake` or `generate` takes it
        back, when the caller has made room for it.
        """
        if self.asleep:
            self.wake()
        _send(self.engine, named_tensors)
        self.lacks_weights = False
        if not self.lacks_cache:
            self.reset_caches()

    def reset_caches(self) -> None:
        """The prefix cache and that of processed images; the one of image embeddings is off."""
        answer = self.engine.flush_cache()
        if not answer.success:
            raise RolloutError(f"SGLang kept its caches, which hold what older weights computed: {answer.message}")

    def _let_go(self, keep_weights: bool) -> None:
        """Kept weights stay on the device."""
        held = [] if self.lacks_cache or self.asleep else [CACHE]  # what is released already must not be named again
        if tags := held if keep_weights else [*held, WEIGHTS]:
            self.engine.release_memory_occupation(tags=tags)

    def _take_back(self, what: str | None) -> None:
        self.engine.resume_memory_occupation(tags=[what or CACHE])
        if what == CACHE:
            self.reset_caches()

    def close(self) -> None:
        """Shut the engine down. SGLang ends every process that this one has started: do it last."""
        self.engine.shutdown()


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Inside, SGLang starts; what it changes of this process for all others is put back.

    It takes over SIGTERM, which asks a run for a checkpoint, and the way in which new processes are started. It gives
    NCCL other settings, with which this process would no more reach the trainer. It draws ports by Python's generator:
    ranks, which are seeded alike, would all draw the same.
    """
    method, nccl, state = multiprocessing.get_start_method(allow_none=True), _nccl(), random.getstate()
    random.seed()
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        multiprocessing.set_start_method(method, force=True)
        random.setstate(state)
        for name in _nccl():
            del os.environ[name]
        os.environ.update(nccl)


def _nccl() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def _send(engine: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give `sglang.Engine` new weights; its caches stay. Raises RolloutError where it refuses them."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        monkey_patch_torch_reductions()  # the other process may count devices otherwise: named by their uuid
    device = accelerator.current_device_name()
    _accepted(engine.begin_weight_update())
    try:
        for bucket in buckets(named_tensors):
            flat = FlattenedTensorBucket(named_tensors=[(name, tensor.to(device)) for name, tensor in bucket])
            handed = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            payload = MultiprocessingSerializer.serialize(handed)
            _accepted(engine.update_weights_from_tensor([payload], load_format="flattened_bucket", flush_cache=False))
    finally:
        ended = engine.end_weight_update()
    _accepted(ended)


def _accepted(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RolloutError(f"SGLang refuses the weights: {message}")
