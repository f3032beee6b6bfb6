"""Ranks of one tensor-parallel engine: weights for those that vLLM starts, prompts of those of the run."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...experience.rollouts import PromptFeatures
from ...experience.vision import VisionTensors
from ...runtime import collectives
from ...runtime.host_memory import SHARED_MEMORY
from ..weight_sync import MappedFiles, Posted, received

_FILES = MappedFiles()  # of a rank's process


def load_posted(worker: Any, posted: Posted) -> None:
    """In a rank's process, all tensors or, where it refuses them, none. worker: vLLM's."""
    worker.reload_weights(weights_iterator=iter(received(posted, files=_FILES)))


class PromptSharing:
    """Puts the prompts of `size` neighbouring ranks together, in rank order, the same list on each of them.

    The ranks of one engine must run the same scheduling decisions, so they must be given the same prompts. A collective
    of all ranks of the run at construction. Raises ConfigError when the ranks do not divide into groups.
    """

    def __init__(self, size: int):
        world = collectives.world_size()
        if world % size:
            raise ConfigError(f"engine_tp_size {size} does not divide {world} rank(s)")
        self.size, self.group = size, collectives.neighbours(size)

    def share(self, prompts: Sequence[PromptFeatures]) -> tuple[list[PromptFeatures], slice]:
        """(prompts of the whole group, where this rank's are among them). What no engine reads stays behind: patches,
        as engines make theirs, what only rewards ask for, and variants, which are asked for in calls of their own."""
        unread = {"vision": VisionTensors(), "reference": None, "label": None, "metadata": {}, "variants": []}
        own = [replace(each, **unread) for each in prompts]
        if self.group is None:
            return own, slice(0, len(own))
        gathered = collectives.all_gather_object(own, self.group)
        index = collectives.rank() % self.size
        start = sum(len(each) for each in gathered[:index])
        return [prompt for each in gathered for prompt in each], slice(start, start + len(own))


def use_private_name() -> Callable[[], None]:
    """Give the engine built next a name of its own; all ranks of the run call this together. What is returned takes the
    name away again, once the engine is built and its ranks have met: of a killed run its memory would stay.

    Under an external launcher vLLM has one name for every run of a host: two that start at once, or one that starts
    after another was killed while starting, fail with "create shm in SHMManager failed. errno: 17".
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = collectives.broadcast_object(secrets.token_hex(8))

    def group_name(communicator) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        names.append(f"{token}-{communicator.unique_name}-{ranks}-cpushm")
        return names[-1]

    def take_away() -> None:
        for path in (path for name in names for path in SHARED_MEMORY.glob(f"{name}_*")):
            path.unlink(missing_ok=True)

    names: list[str] = []
    _CPUSHMDistributed.make_group_name = staticmethod(group_name)
    return take_away
