"""Training on the groups whose rewards are there, while the last replies of remote scorers are under way.

A sample that is finished last is scored last, so a step would wait for one whole reply with nothing to do. Here its
other micro-batches go forward and backward meanwhile, with the advantages and denominators that the batch will have if
every reward is valid. The rest of the step runs as always; where it arrives at other numbers, the gradients are
discarded, and the update is made from the beginning. So what is trained does not depend on when replies come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...config.vl import RunConfig
from ...observe.metrics import MetricsAccumulator
from ...replay.buffer import NaiveReplayBuffer
from ...replay.codecs import packed_lengths
from ...replay.items import strip_padding
from ...replay.plan import MicroBatch
from ...rewards.engine import RewardComputationEngine
from ...strategy import collectives
from ...strategy.phase_timer import PhaseTimer
from .stages import BeingScored
from .updates import PolicyUpdate, Share, TrainBatch

logger = logging.getLogger(__name__)

# Difference of ranks' loads up to which samples stay where their rewards come in. More, and they move, with nothing
# trained before.
UNEVEN = 0.1
LONGEST_REST = 32  # steps; after what was in vain, each time twice as many as before
LOOK_AGAIN = 0.1  # seconds of waiting for replies after which a signal is looked for


@dataclass
class Begun:
    """An update that was begun: its batch and samples as expected, and what is left of the micro-batches so far."""

    buffer: NaiveReplayBuffer
    batch: TrainBatch
    kl_coef: float
    shares: list[Share]


@dataclass
class EarlyUpdate:
    """The part of a step's update that is made while rewards are under way.

    plan: the step's one train batch of a buffer; a collective. stopping: whether this process was asked to end.
    group_size: samples of a prompt. Raises nothing for rewards that fail: the scoring that follows does.
    """

    update: PolicyUpdate
    new_buffer: Callable[[], NaiveReplayBuffer]
    plan: Callable[[NaiveReplayBuffer], TrainBatch]
    stopping: Callable[[], bool]
    timer: PhaseTimer
    group_size: int
    on: bool = True
    begun: Begun | None = None
    rest: int = 0  # steps for which nothing is begun
    next_rest: int = 1

    def begin(self, step: BeingScored, kl_coef: float) -> None:
        """Train on all micro-batches but the last one, each as soon as its rewards are there. A collective."""
        if not self.on:
            return
        if self.rest > 0:
            self.rest -= 1
            return
        buffer = self.new_buffer()
        for experience in step.experiences:
            buffer.append(experience)
        own = list(buffer)
        batch = self.plan(buffer)
        moved = any(mine is not planned for mine, planned in zip(own, buffer)) or len(own) != len(buffer)
        if _on_any_rank(moved):  # to ranks that do not learn their rewards in time
            self._rest_longer()
            return
        self.begun = Begun(buffer, batch, kl_coef, [])
        groups = _Groups(step, buffer, self.group_size)
        for index, micro_batch in enumerate(batch.micro_batches[:-1]):
            with self.timer.phase("reward"):
                ready = self._ready(groups, micro_batch)
            if _on_any_rank(not ready):
                return
            with self.timer.phase("train"):
                self.begun.shares.append(self.update.accumulate(buffer, batch, index, kl_coef))

    def _ready(self, groups: _Groups, micro_batch: MicroBatch) -> bool:
        """Wait for the rewards of a micro-batch and fill in its advantages; False where it cannot be trained on."""
        if micro_batch.filler:
            return True
        missing = groups.missing(micro_batch)
        for group in missing:
            while not groups.answered(group, LOOK_AGAIN):
                if self.stopping():
                    return False
        return all(groups.fill(group) for group in missing)

    def take(self, buffer: NaiveReplayBuffer, batch: TrainBatch, kl_coef: float, metrics: MetricsAccumulator) -> list:
        """What is left of this update's first micro-batches where they were trained on as the update would now do it;
        else nothing, and their gradients are gone. A collective."""
        begun, self.begun = self.begun, None
        if begun is None:
            return []
        shares = begun.shares
        differs = _on_any_rank(not _same(begun, buffer, batch, kl_coef))
        share = len(shares) / len(batch.micro_batches)
        metrics.add("trained_while_scoring", 0.0 if differs else share)
        metrics.add("discarded_while_scoring", share if differs else 0.0)
        if not differs:
            self.next_rest = 1
            return shares
        if shares:
            self.update.discard(buffer, batch, kl_coef)
            self._begin_less_often(buffer)
        return []

    def _begin_less_often(self, buffer: NaiveReplayBuffer) -> None:
        """After gradients were discarded. A collective."""
        if _on_any_rank(any(item.valid is not None and not bool(item.valid) for item in buffer)):
            self._rest_longer()
            return
        self.on = False
        logger.warning(
            "train_while_scoring: advantages of a group changed with those of others, so what was trained while "
            "rewards were under way was discarded; from here on nothing is trained before all of them are there"
        )

    def _rest_longer(self) -> None:
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


class _Groups:
    """The samples of a buffer by the micro-batches of experience that hold whole groups, in the order of the buffer."""

    def __init__(self, step: BeingScored, buffer: NaiveReplayBuffer, group_size: int):
        self.step, self.buffer = step, buffer
        self.parts: list[range] = []  # of experience
        self.samples: list[range] = []
        first, sample = 0, 0
        while first < len(step.experiences):
            last, count = first, 0
            while last < len(step.experiences) and (count == 0 or count % group_size):
                count += len(step.experiences[last].action_mask)
                last += 1
            self.parts.append(range(first, last))
            self.samples.append(range(sample, sample + count))
            first, sample = last, sample + count
        self.filled: set[int] = set()

    def missing(self, micro_batch: MicroBatch) -> list[int]:
        """The numbers of those that a micro-batch reads and that have no rewards yet."""
        wanted = set(micro_batch.indices)
        return [i for i, own in enumerate(self.samples) if i not in self.filled and wanted.intersection(own)]

    def answered(self, group: int, seconds: float) -> bool:
        """Whether its replies are there, after waiting so long at most."""
        own = self.samples[group]
        return self.step.early is None or self.step.early.answered(own.start, own.stop, seconds)

    def fill(self, group: int) -> bool:
        """Advantages into the buffer; False where a reward is not valid, or none was asked for."""
        made = self.step.with_advantages(self.parts[group], self.samples[group])
        if made is None:
            return False
        items = [item for experience in made for item in strip_padding(experience)]
        self.buffer.items[self.samples[group].start : self.samples[group].stop] = items
        self.filled.add(group)
        return True


def finished_first(buffer: NaiveReplayBuffer, step: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches by their longest responses, as engines finish them, and where these are equal by their last
    samples; fillers at the end."""

    def order(micro_batch: MicroBatch) -> tuple[bool, int, int]:
        lengths = packed_lengths([buffer[index] for index in micro_batch.indices])[1]
        return micro_batch.filler, max(lengths), max(micro_batch.indices)

    return sorted(step, key=order)


def _same(begun: Begun, buffer: NaiveReplayBuffer, batch: TrainBatch, kl_coef: float) -> bool:
    """Whether the update that was begun is the one to be made."""
    expected = begun.batch
    if begun.kl_coef != kl_coef or expected.micro_batches != batch.micro_batches:
        return False
    if [(kind.weight, kind.denominators) for kind in expected.kinds] != [
        (kind.weight, kind.denominators) for kind in batch.kinds
    ]:
        return False
    masks = zip(expected.policy_masks or expected.token_masks, batch.policy_masks or batch.token_masks, strict=True)
    if not all(torch.equal(mine, now) for mine, now in masks):
        return False
    trained = [each for each in batch.micro_batches[: len(begun.shares)] if not each.filler]
    done = {index for each in trained for index in each.indices}
    return all(torch.equal(begun.buffer[index].advantages, buffer[index].advantages) for index in done)


def _on_any_rank(flag: bool) -> bool:
    return collectives.all_reduce_max(torch.tensor([float(flag)])).item() > 0


def early_update_fits(config: RunConfig, rewards: RewardComputationEngine, ranks: int) -> bool:
    """Whether a step's only update may begin before all rewards are there: its advantages are of each group by itself,
    and nothing but the rewards stands between rollouts and training."""
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    samples, size = rollout.rollout_batch_size * rollout.n_samples_per_prompt, rollout.n_samples_per_prompt
    micro = rollout.micro_rollout_batch_size
    whole_batch = (
        algorithm.advantages_norm,
        algorithm.reward_running_norm,
        algorithm.estimator.components,
        algorithm.estimator.critic,
        algorithm.selective_replay > 0,
        algorithm.kl_target is not None,
    )
    one_update = train.max_epochs == 1 and train.train_batch_size >= samples and not train.homogeneous_batches
    at_home = config.distributed.sp_size == 1 and (ranks == 1 or not train.max_tokens_per_batch)
    return (
        train.train_while_scoring
        and rewards.streams_all
        and not any(whole_batch)
        and one_update
        and at_home
        and (micro % size == 0 or size % micro == 0)
        and not rollout.dynamic_sampling
        and not config.data.ask_key
        and config.asynchronous.max_staleness == 0
        and train.freezing_actor_steps <= 0
    )
