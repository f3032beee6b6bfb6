"""A rollout engine whose work is done by workers in other processes. The core asks for its class and `check_remote`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from ....config import registry
from ....config.constraints import load_target
from ....config.vl import RunConfig
from ....errors import ConfigError
from ....experience.rollouts import Completion, PromptFeatures, SamplingSettings
from ....experience.vision import VisionTensors
from ....models.loading import Checkpoint, open_checkpoint
from ....rollout.engine import Finished, RolloutEngine
from ....rollout.weight_sync import Posted
from ....runtime import collectives
from .device_weights import WeightSender, by_device, check_transfer
from .episodes import EpisodeEngine, RemoteEpisodes, for_workers
from .in_flight import Begun, InFlight, asked_for
from .partial import PartialRollouts
from .pool import WorkerPool
from .ray_workers import Cluster, check_cluster
from .worker import EngineSpec

T = torch.Tensor
AGAIN, COPIED, SENT = "again", "copied", "sent"  # how a version went over, for `Workers.update`


class Workers:
    """The workers of a run with the way to them: pool, weights and their versions. All ranks make one together.

    spec: of each worker's engine.
    """

    sender: WeightSender | None = None  # where rank 0 sends weights from device to device

    def __init__(self, config: Any, spec: EngineSpec) -> None:
        resources, turns = config.distributed.resources, config.asynchronous.ahead + 2  # see `WeightPost`
        self.cluster = Cluster(resources, spec)
        several = collectives.world_size() > 1
        self.pool = WorkerPool(self.cluster.workers, collectives.is_rank_0(), shared=several)
        self.post = self.cluster.post(turns) if collectives.is_rank_0() else None
        self.version = 0
        if self.post is not None and by_device(config, spec.devices):
            self.sender = WeightSender(self.pool, self.cluster.address(), resources.weight_transfer == "device")

    def update(self, named_tensors: Iterable[tuple[str, T]], at_once: bool = True) -> None:
        """Give the workers the next version of the weights. A collective: each rank reads all tensors, rank 0 hands
        them over. Raises on every rank what fails there, such as RolloutError where a worker refuses them, and what
        fails on this rank.

        named_tensors: read a second time, for the host's way, where workers fail while they go from device to device.
        """
        self.version += 1
        way = self._told(self._given(iter(named_tensors), at_once, self.sender))
        if way == AGAIN:
            way = self._told(self._given(iter(named_tensors), at_once, None))
        self.pool.copied = way == COPIED

    def _told(self, own: str | Exception) -> str:
        """What rank 0 says of the version. Raises what failed there or here."""
        collectives.meet()  # for however long the workers take
        told = collectives.broadcast_object(own)
        for each in (told, own):
            if isinstance(each, Exception):
                raise each
        return told

    def _given(self, tensors: Iterator[tuple[str, T]], at_once: bool, sender: WeightSender | None) -> str | Exception:
        """How the version went over, which rank 0 knows, or what failed on this rank."""
        posted, sent = None, False
        try:
            try:
                if self.post is not None:
                    posted, sent = self._handed(tensors, sender)
            finally:
                for _ in tensors:  # other ranks gather each weight with this one
                    pass
            if self.post is not None and posted is None and not sent:
                return AGAIN
            self.pool.give_weights(self.version, posted, at_once and not sent)
        except Exception as error:
            return error
        return SENT if posted is None else COPIED

    def _handed(self, tensors: Iterator[tuple[str, T]], sender: WeightSender | None) -> tuple[Posted | None, bool]:
        """(the version in the host's memory, whether the workers have it already)."""
        self.post.number = self.version - 1
        if sender is None or not sender.ready(self.version):
            return self.post.post(tensors), False
        through = sender.through(tensors)
        # One worker that is started again finds no other to do its work.
        posted = self.post.post(through) if self.pool.size == 1 else None
        for _ in through:
            pass
        return posted, sender.finish()

    def measured(self, waited: float, begun: Iterable[list[Future]]) -> dict[str, float]:
        """What `RemoteEngine.measured` says; begun: batches that are under way."""
        full = sum(all(future.done() for future in futures) for futures in begun)
        return {"idle_trainer": waited, "idle_engines": 1 - self.pool.busy_share(), "buffer_level": float(full)}

    def close(self) -> None:
        """End the workers. A collective: the other ranks leave the cluster before rank 0 ends it."""
        self.pool.close()
        if self.sender is not None:
            self.sender.close()
        if not self.cluster.first:
            self.cluster.close()
        collectives.barrier()
        if self.cluster.first:
            self.cluster.close()


class RemoteEngine(RolloutEngine):
    """The engine that `rollout.engine_type` names, once in each worker, on devices of their own. See `RolloutEngine`.

    adapters_alone: whether `update_weights` takes LoRA's adapters by the names of the trainer's model, and nothing
    else, because the workers' models have adapters too. ahead: whether batches are begun before they are asked for;
    workers then take over weights between two pieces of work, and each completion tells the policies of its tokens.
    partial: makes what is begun in segments, where the run wants that. reads_patches: whether the workers' engines do.
    answered: whether environments answer, which read what belongs to a prompt.
    """

    streams = True
    episodes = RemoteEpisodes  # the stage that the trainer has beside it

    def __init__(
        self,
        workers: Workers,
        adapters_alone: bool = False,
        ahead: bool = False,
        partial: PartialRollouts | None = None,
        reads_patches: bool = True,
        file_names: bool = False,
        answered: bool = False,
    ) -> None:
        self.partial, self.reads_patches, self.file_names = partial, reads_patches, file_names
        self.answered = answered
        self.workers, self.adapters_alone, self.ahead = workers, adapters_alone, ahead
        self.policies: dict[int, int] = {}  # version of the weights -> policy version
        self.waited = 0.0
        self._begun: dict[tuple[int, ...], Begun] = {}  # by the prompts' seeds
        self._kept: list[dict[str, Any] | None] = []  # batches of a checkpoint that are not asked for yet

    @classmethod
    def from_config(cls, config: RunConfig, checkpoint: Checkpoint) -> RemoteEngine:
        """The engine of a run. checkpoint: what the trainer opened, by a path that the workers can read too."""
        entry = registry.engines[config.rollout.engine_type]
        target, devices = f"{__name__}:worker_engine", config.rollout.engine_tp_size
        sent = for_workers(config)
        exact = config.distributed.deterministic
        spec = EngineSpec(target, (sent,), torch.get_num_threads(), sent.plugins, devices, exact)
        workers, ahead = Workers(config, spec), config.asynchronous.ahead > 0
        alone = entry.adapters_alone and config.model.lora_rank > 0
        files = not entry.adapters_alone  # else the workers' models are transformers' own
        partial = _partial(config, workers, checkpoint)
        return cls(workers, alone, ahead, partial, entry.reads_patches, files, config.episodes.used)

    def generate(
        self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """n completions a prompt, in order; a prompt's are made by one worker.

        What was begun before is waited for; anything else goes before what was.

        Args:
            prompts: what is continued.
            settings: n, and how tokens are chosen.
            finished: called with (number of a prompt, its completions), in the order of the prompts.
        """
        begun = self._begun.pop(_key(prompts), None)
        batch = begun or Begun({}, self._submit(prompts, settings, urgent=True))
        made: list[list[Completion]] = []
        asked = time.perf_counter()
        for completions in batch.completions(self._told):
            self.waited += time.perf_counter() - asked if begun is not None else 0.0
            made.append(completions)
            if finished is not None:
                finished(len(made) - 1, completions)
            asked = time.perf_counter()
        return made

    def begin(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> None:
        """Start on prompts for which `generate` will ask later, with whatever weights are there until then. What a
        checkpoint holds of them is not drawn again."""
        kept = Begun.kept(self._kept.pop(0), prompts, settings) if self._kept else None
        if kept is not None:
            self._begun[_key(prompts)] = kept
            return
        if self.partial is not None:
            futures = self.partial.begin(self._sent(prompts), settings)
        else:
            futures = self._submit(prompts, settings, urgent=False)
        self._begun[_key(prompts)] = Begun(asked_for(prompts, settings), futures)

    def state_dict(self) -> Mapping[str, Any]:
        """What is begun and not asked for yet. To be read it is waited for."""
        return InFlight(list(self._begun.values()), self._told)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The batches of `state_dict`, which are to be begun next, come from there."""
        self._begun.clear()
        self._kept = list(state.get("begun", ()))

    def _submit(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, urgent: bool) -> list[Future]:
        sent, pool = self._sent(prompts), self.workers.pool
        return [pool.submit(sent[piece], settings, urgent=urgent) for piece in pool.pieces(len(sent))]

    def _sent(self, prompts: Sequence[PromptFeatures]) -> list[PromptFeatures]:
        """The prompts without what no worker reads, which is most of their bytes where engines preprocess images."""
        left_out: dict[str, Any] = {} if self.answered else {"reference": None, "label": None, "metadata": {}}
        if not self.reads_patches:
            left_out["vision"] = VisionTensors()
        return [replace(prompt, **left_out) for prompt in prompts]

    def _told(self, completions: list[Completion], version: int | None) -> list[Completion]:
        """With versions of the policy in the place of those of weights. version: of all tokens; None where each tells
        its own, as it was made in segments."""
        if not self.ahead:
            return completions
        drawn_by = [each.versions if version is None else [version] * len(each.token_ids) for each in completions]
        told = [[self.policies.get(one, 0) for one in own] for own in drawn_by]
        return [replace(each, versions=own) for each, own in zip(completions, told)]

    def note_policy(self, version: int) -> None:
        """The weights that were given last are those of this policy version."""
        self.policies[self.workers.version] = version

    def measured(self) -> dict[str, float]:
        """Since the last call: `idle_trainer`, seconds that it waited for rollouts begun before; `idle_engines`, the
        share of the workers' time without work; and `buffer_level`, batches that are finished and wait."""
        waited, self.waited = self.waited, 0.0
        return self.workers.measured(waited, (each.futures for each in self._begun.values()))

    def update_weights(self, named_tensors: Iterable[tuple[str, T]]) -> None:
        """Give every worker the next version; see `Workers.update`."""
        self.workers.update(named_tensors, at_once=not self.ahead)

    def reset_caches(self) -> None:
        """Each worker does before its next piece of work; not where work runs ahead, which takes them over."""
        if not self.ahead:
            self.workers.pool.forget()

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


def _partial(config: RunConfig, workers: Workers, checkpoint: Checkpoint) -> PartialRollouts | None:
    """As many responses in a call as the batches under way have for each worker."""
    if not config.asynchronous.partial_rollouts:
        return None
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt * (config.asynchronous.ahead + 1)
    slots = math.ceil(samples / collectives.world_size() / len(workers.pool.workers))
    return PartialRollouts(workers.pool, checkpoint.tokenizer, config.asynchronous.partial_tokens, slots)


def _key(prompts: Sequence[PromptFeatures]) -> tuple[int, ...]:
    return tuple(prompt.seed for prompt in prompts)


def check_remote(config: RunConfig) -> None:
    """Raise ConfigError for a run whose engine cannot be in workers of its own, or that has nowhere to start them."""
    entry = registry.engines[config.rollout.engine_type]
    if entry.worker is None:
        raise ConfigError(f"placement split: engine {entry.name} cannot run in a worker of its own; use vllm or hf")
    check_transfer(config, config.rollout.engine_tp_size)
    check_cluster(config.distributed.resources)


def worker_engine(config: RunConfig) -> RolloutEngine:
    """The engine of a worker, in its process."""
    checkpoint = open_checkpoint(config.model.pretrain, config.model, config.data)
    made_by = registry.engines[config.rollout.engine_type].worker
    engine = (load_target(made_by) if isinstance(made_by, str) else made_by)(config, checkpoint)
    return EpisodeEngine(config, checkpoint, engine) if config.episodes.used else engine
