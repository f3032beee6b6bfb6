"""Graphs of the rollout's own forwards, kept for its update: nothing is replayed, and importance ratios are 1 exactly.

LeanGRPO (github.com/coderwayne3025/LeanGRPO) calls this Retain. The update then costs a backward; the graphs of all
trained steps of all samples of a rank are held until the rewards are there, so they are kept up to a size only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...algorithms.diffusion.denoising_batch import first_share
from ...config.devices import GIB
from ...config.diffusion import DiffusionRunConfig
from ...experience.diffusion_sampling import KeptSteps
from ...experience.types import ExperienceDiffusion
from ...models.diffusion.policy import DiffusionPolicy
from ...rollout.diffusion_sampler import DiffusionSampler
from ...runtime import collectives

logger = logging.getLogger(__name__)
T = torch.Tensor

WORTH = 0.5  # share of samples that count, below which a replay of them is quicker than the backward of all


class Graphed(NamedTuple):
    """A micro-batch of the rollout with the graph of its trained steps."""

    experience: ExperienceDiffusion
    kept: KeptSteps


@dataclass
class RolloutGraphs:
    """Which steps of a rollout keep their graph.

    weights: of the policy, which are there anyway. limit: bytes of all graphs of a rank's step. fraction: share of the
    stochastic steps that is trained on, from the first.
    """

    weights: list[T]
    limit: float
    fraction: float
    bytes: float | None = None  # of all graphs, once they are measured

    @classmethod
    def from_config(cls, config: DiffusionRunConfig, policy: DiffusionPolicy) -> RolloutGraphs | None:
        """Those of a run; None where an update takes more or other forwards than the rollout's.

        Of several experts a window may leave one without any step, and DeepSpeed needs a gradient of each.
        """
        if not config.rollout_graphs_serve or len(policy.trainable) > 1:
            return None
        limit = config.train.rollout_graph_gib * GIB
        return cls(list(policy.parameters()), limit, config.algorithm.timestep_fraction)

    def fit(self, forward: Callable[[], T], samples: int, sampler: DiffusionSampler) -> bool:
        """Whether the graphs of this many samples are within the limit on all ranks; `forward` of one is measured by
        the first call, which is a collective."""
        if self.bytes is None:
            mine = kept_bytes(forward, self.weights) * samples * len(self.steps(sampler, 0))
            self.bytes = collectives.all_reduce_max(torch.tensor(float(mine), dtype=torch.float64)).item()
            does = "are kept for" if self.bytes <= self.limit else "would be too large to keep for"
            if collectives.is_rank_0():
                logger.info(
                    "graphs of the rollout %s its update: %.2f GiB, rollout_graph_gib %g",
                    does, self.bytes / GIB, self.limit / GIB,
                )  # fmt: skip
        return self.bytes <= self.limit

    def steps(self, sampler: DiffusionSampler, window: int) -> list[int]:
        """The trained ones of a rollout whose window begins there."""
        return first_share(sampler.stochastic_steps(window), self.fraction).tolist()


@torch.enable_grad()
def kept_bytes(forward: Callable[[], T], weights: Iterable[T]) -> int:
    """Bytes of what autograd keeps of a forward, without the weights."""
    own, found = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def note(tensor: T) -> T:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result  # until here it holds what is counted: no two of them lie at one address
    return sum(found.values())


def worth_using(graphed: list[Graphed], only_advantages_count: bool) -> bool:
    """Whether a backward of all samples is less work than the replay of those that count. A collective."""
    if not only_advantages_count:
        return True
    experiences = [each.experience for each in graphed]
    counted = sum(int((each.valid & each.advantages.bool()).sum()) for each in experiences)
    numbers = torch.tensor([counted, sum(len(each.valid) for each in experiences)], dtype=torch.float64)
    counted, samples = collectives.all_reduce_sum(numbers).tolist()
    return counted >= WORTH * samples
