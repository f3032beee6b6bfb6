"""What runs in a rollout worker's process: one engine, and the weights that it was last given."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....config.constraints import load_target
from ....config.recipes import load_plugins
from ....errors import LightRFTVisualError, RolloutError
from ....rollout.weight_sync import FileAt, MappedFiles, Posted, reachable, received
from ....runtime.host_memory import free_port
from .device_weights import Meeting, TransferFailed, WeightReceiver

TORN = -1  # the version of an engine that has got some tensors of one, and generates with none


class LacksWeights(RolloutError):
    """The worker has another version of the weights than the call asks for, and was not told where that one is."""


@dataclass(frozen=True)
class EngineSpec:
    """How a worker builds its engine. target: 'module:function' of arguments; threads: of its operations, as many as
    the trainer's, so that both add in the same order. plugins: of the run. devices: accelerators of each worker.
    deterministic: as of the run."""

    target: str
    arguments: tuple
    threads: int
    plugins: str | None = None
    devices: int = 1
    deterministic: bool = False


class Worker:
    """One engine in a process of its own. Its calls come one at a time."""

    receiver: WeightReceiver | None = None

    def __init__(self, spec: EngineSpec, fetch: Callable[[Any], Any] | None = None) -> None:
        # Ray's processes inherit the trainer's place among its ranks; an engine here is alone.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of torchrun: the engine would wait for its store
        import torch

        from ....runtime.seeding import choose_deterministic

        torch.set_num_threads(spec.threads)
        if spec.deterministic:
            choose_deterministic()
        load_plugins(spec.plugins)
        self.fetch, self.files = fetch, MappedFiles()
        self.engine = load_target(spec.target)(*spec.arguments)
        self.version, self.caches = 0, 0

    def describe(self, probe: FileAt | None = None) -> dict[str, Any]:
        """Its process, the version of its weights, and whether it can map the trainer's memory file `probe`."""
        near = probe is not None and reachable(probe)
        return {"pid": os.getpid(), "version": self.version, "shares_memory": near}

    def load(self, posted: Posted) -> int:
        """Take over a version of the weights, all of it or, where it raises WeightsRefused, nothing; not an older one
        than it has, as where this call was overtaken by `take`."""
        if posted.number > self.version:
            found = iter(received(posted, self.fetch, self.files))
            hands_on = getattr(self.engine, "post", None) is not None and posted.near
            self.engine.update_weights(found, **({"posted": posted} if hands_on else {}))
            self.version = posted.number
        return self.version

    def join(self, meeting: Meeting, rank: int) -> None:
        """Become a member of the group in which weights go from device to device."""
        self._leave()
        self.receiver = WeightReceiver(meeting, rank)

    def take(self, number: int) -> int:
        """Take over a version that the group sends. Where it raises, the engine may have got some tensors of it; no
        work is done with those."""
        if self.receiver is None:
            raise TransferFailed("it is in no group; it was started again, or has left one")
        try:
            tensors = self.receiver.receive(number)
            self.version = TORN
            self.engine.update_weights(tensors)
            self.receiver.check()
        except BaseException:
            self._leave()
            raise
        self.version = number
        return self.version

    def _leave(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def run(self, version: int, posted: Posted | None, caches: int, arguments: tuple) -> Any:
        """(the engine's `generate` of the arguments, version of its weights). Raises LacksWeights, and what the engine
        raises.

        Args:
            version: of the weights; a later one, which another process of the run has given it, will do.
            posted: where that version is, if the caller knows.
            caches: a count; where it has moved on, what was computed of earlier prompts is forgotten.
            arguments: of `generate`.
        """
        if version != self.version and (posted is not None or version > self.version):
            if posted is None:
                raise LacksWeights(f"the worker has weight version {self.version}, asked for is {version}")
            self.load(posted)
        if caches != self.caches:
            self.engine.reset_caches()
            self.caches = caches
        try:
            return self.engine.generate(*arguments), self.version
        except LightRFTVisualError:
            raise
        except Exception as error:
            raise RolloutError(f"the worker's engine failed: {type(error).__name__}: {error}") from error
