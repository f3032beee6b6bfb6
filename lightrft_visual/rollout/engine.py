"""What every rollout engine takes and gives back, so that the experience maker does not know which one it drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from ..batches.rollouts import PromptFeatures
from ..batches.sampling import Completion, SamplingSettings
from ..config import registry
from ..config.vl import RunConfig
from ..errors import ConfigError
from ..models.loading import Checkpoint
from ..strategy.deepspeed import TrainEngine

Finished = Callable[[int, list[Completion]], None]


class RolloutEngine(Protocol):
    """Generation on this rank. All calls are made by all ranks of a tensor-parallel group together.

    shares_weights: it samples from the trainer's own parameters, not from a copy that `update_weights` replaces.
    lacks_weights: it slept without them, and must be given new ones before it generates. streams: whether `generate`
    takes a third argument, which it calls with the number of each prompt and its completions once they are finished.
    """

    shares_weights: bool
    lacks_weights: bool
    streams: bool

    def generate(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> list[list[Completion]]:
        """n completions a prompt, in order."""

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over weights by the names of the actor's checkpoint; caches of the old ones are void.

        Once it has returned the trainer's own may leave the device. Memory that only `generate` needs may come after.
        """

    def reset_caches(self) -> None:
        """Forget what was computed of earlier prompts."""

    def sleep(self, keep_weights: bool = True) -> None:
        """Free accelerator memory while training. Without its weights it takes new ones before it generates again."""

    def wake(self) -> None:
        """Make ready for weights and generation again."""

    def close(self) -> None:
        """Release everything; nothing may be called afterwards."""


def build_engine(config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine) -> RolloutEngine:
    """The engine that `rollout.engine_type` names in the registry. Raises ConfigError, RolloutError."""
    return registry.engines.load(config.rollout.engine_type)(config, checkpoint, actor)


def engine_in_words(config: RunConfig, checkpoint: Checkpoint) -> str:
    """Which engine a run uses, and why not vLLM where vLLM lacks the model."""
    name = config.rollout.engine_type
    if not checkpoint.family.served:
        return f"{name}: vLLM has no model of type {checkpoint.config.model_type}"
    return name


def check_engine(config: RunConfig, checkpoint: Checkpoint) -> None:
    """ConfigError for settings that the engine would refuse, before any model is loaded."""
    name = config.rollout.engine_type
    engine = registry.engines[name]
    if config.asynchronous.partial_rollouts and checkpoint.family.draws:
        raise ConfigError("partial_rollouts are for responses in text, and this model draws")
    engine.check_settings(config, checkpoint)
    if checkpoint.family.draws and not engine.draws:
        raise ConfigError(f"engine {name} only writes, and this model also draws: use --engine_type hf")
