"""What every rollout engine takes and gives back, so that the experience maker does not know which one it drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from ..config import registry
from ..config.vl import RunConfig
from ..errors import ConfigError
from ..experience.rollouts import PromptFeatures
from ..experience.sampling import Completion, SamplingSettings
from ..models.loading import Checkpoint
from ..runtime.deepspeed import TrainEngine

Finished = Callable[[int, list[Completion]], None]
DRAWER = "hf"  # draws beside an engine that does not


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


class EngineByKind:
    """Two engines of a model that answers by text or by images. See `RolloutEngine`.

    writer: such as vLLM, which runs the half of Emu3 that reads and writes, and has no head that draws, no guidance and
    no VQ decoder. drawer: gets the prompts that ask for an image; it samples from the trainer's own weights, so new
    ones are the writer's alone. Both are called at each `generate`, also without prompts, as ranks may have to call
    them together.
    """

    shares_weights = False

    def __init__(self, writer: RolloutEngine, drawer: RolloutEngine):
        self.writer, self.drawer = writer, drawer
        self.streams = getattr(writer, "streams", False) and drawer.streams  # engines of plugins may not say it

    @property
    def lacks_weights(self) -> bool:
        """Whether the writer slept without its weights."""
        return self.writer.lacks_weights

    def generate(
        self, prompts: Sequence[PromptFeatures], settings: SamplingSettings, finished: Finished | None = None
    ) -> list[list[Completion]]:
        """n completions per prompt, in order; finished(number, completions) as the two engines finish them."""
        made: dict[int, list[Completion]] = {}
        for engine, draws in ((self.writer, False), (self.drawer, True)):
            numbers = [number for number, prompt in enumerate(prompts) if prompt.draws == draws]
            own = [prompts[number] for number in numbers]
            if finished is None:
                completions = engine.generate(own, settings)
            else:
                completions = engine.generate(own, settings, _renumbered(finished, numbers))
            made |= dict(zip(numbers, completions, strict=True))
        return [made[number] for number in range(len(prompts))]

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The writer's."""
        self.writer.update_weights(named_tensors)

    def reset_caches(self) -> None:
        """Both engines'."""
        self.writer.reset_caches()
        self.drawer.reset_caches()

    def sleep(self, keep_weights: bool = True) -> None:
        """The writer's; the drawer holds nothing between calls."""
        self.writer.sleep(keep_weights)

    def wake(self) -> None:
        """The writer."""
        self.writer.wake()

    def close(self) -> None:
        """Both, the writer last: vLLM shuts torch's process group down."""
        self.drawer.close()
        self.writer.close()


def _renumbered(finished: Finished, numbers: list[int]) -> Finished:
    return lambda number, completions: finished(numbers[number], completions)


def build_engine(config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine) -> RolloutEngine:
    """The engine that `rollout.engine_type` names in the registry; where it only writes and the model also draws, with
    one that draws beside it. Raises ConfigError, RolloutError."""
    engine = registry.engines.load(config.rollout.engine_type)(config, checkpoint, actor)
    if not _needs_drawer(config, checkpoint):
        return engine
    return EngineByKind(engine, registry.engines.load(DRAWER)(config, checkpoint, actor))


def engine_in_words(config: RunConfig, checkpoint: Checkpoint) -> str:
    """Which engine a run uses, and why not vLLM where vLLM lacks the model."""
    name = config.rollout.engine_type
    if not checkpoint.family.served:
        return f"{name}: vLLM has no model of type {checkpoint.config.model_type}"
    return f"{name}, drawings by {DRAWER}" if _needs_drawer(config, checkpoint) else name


def check_engine(config: RunConfig, checkpoint: Checkpoint) -> None:
    """ConfigError for settings that the engine would refuse, before any model is loaded."""
    if config.distributed.split and _needs_drawer(config, checkpoint):
        raise ConfigError(
            f"placement split: engine {config.rollout.engine_type} only writes, and this model also draws; workers of "
            f"its rollouts use --engine_type {DRAWER}"
        )
    if config.asynchronous.partial_rollouts and checkpoint.family.draws:
        raise ConfigError("partial_rollouts are for responses in text, and this model draws")
    registry.engines[config.rollout.engine_type].check_settings(config, checkpoint)


def _needs_drawer(config: RunConfig, checkpoint: Checkpoint) -> bool:
    return checkpoint.family.draws and not registry.engines[config.rollout.engine_type].draws
