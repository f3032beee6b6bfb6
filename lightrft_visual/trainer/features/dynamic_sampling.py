"""DAPO's dynamic sampling (arXiv 2503.14476): keep groups whose rewards differ, sample more prompts for the others."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...experience.rollouts import PromptBatch, Rollout, Rollouts, SamplingSettings
from ...observe.metrics import COUNTED, SPENT
from ...runtime import collectives
from ..vl.maker import ExperienceMaker


class GroupRef(NamedTuple):
    """A group that some rank holds. Sorted, groups that differ come first, then those of earlier prompts."""

    is_equal: bool  # all its rewards
    round: int
    group_id: int
    rank: int
    draws: bool = False  # its responses are images


@dataclass
class DynamicSampling:
    """Collects groups until all ranks together have as many as they want whose rewards differ.

    The ranks share what they find: a rank without luck is given groups of another one. Which groups make up the batch
    does not depend on the number of ranks. Where the model also draws, the batch keeps as many groups of answers and of
    drawings as the first round brought: a kind that is mastered does not give its place to the other one.

    wanted: groups of this rank. tries: rounds of sampling at most, the first included. After the last round the batch
    is filled up with groups of equal rewards (they carry no gradient), so that its size stays; how many, over all
    ranks, is counted in `filled`. apart: as in `is_informative`.
    """

    wanted: int
    tries: int
    apart: bool = False
    found: dict[GroupRef, list[Rollout]] = field(default_factory=dict)  # on this rank, of the best so far
    rounds: int = 0
    filled: int = 0

    def collect(self, sample_round: Callable[[int], list[Rollout]]) -> list[Rollout]:
        """Rollouts of `wanted` groups. sample_round(k) samples and scores round k; every rank calls it alike."""
        rank = collectives.rank()
        while True:
            self.found |= {
                GroupRef(not is_informative(group, self.apart), self.rounds, number, rank, group[0].prompt.draws): group
                for number, group in by_group(sample_round(self.rounds)).items()
            }
            self.rounds += 1
            shares, gathered = zip(*collectives.all_gather_object((self.wanted, list(self.found))))
            refs = [ref for each in gathered for ref in each]
            if self.rounds == 1:
                kinds = Counter(ref.draws for ref in refs)
            best = best_of_each_kind(refs, kinds)
            self.found = {ref: self.found[ref] for ref in best if ref in self.found}
            self.filled = sum(ref.is_equal for ref in best)
            if self.rounds >= self.tries or (not self.filled and len(best) == sum(shares)):
                break
        return [rollout for group in self._exchange(best, list(shares)) for rollout in group]

    def _exchange(self, best: list[GroupRef], shares: list[int]) -> list[list[Rollout]]:
        """This rank's groups, once those that other ranks lack have changed place. A collective."""
        rank = collectives.rank()
        targets = balanced(best, shares)
        outgoing = [
            {ref: self.found[ref] for ref, target in targets.items() if (ref.rank, target) == (rank, other)}
            for other in range(len(shares))
        ]
        groups = {ref: group for sent in collectives.exchange_objects(outgoing) for ref, group in sent.items()}
        return [groups[ref] for ref in sorted(groups)]


def best_of_each_kind(refs: list[GroupRef], kinds: Mapping[bool, int]) -> list[GroupRef]:
    """The best groups of all ranks, sorted. kinds: how many of each; what is not among them now never will be."""
    return sorted(ref for kind, count in kinds.items() for ref in sorted(r for r in refs if r.draws == kind)[:count])


def balanced(refs: list[GroupRef], shares: list[int]) -> dict[GroupRef, int]:
    """The rank that each group goes to: its own as long as that has room, else the first that has."""
    room, targets = list(shares), {}
    for ref in refs:
        if room[ref.rank]:
            room[ref.rank] -= 1
            targets[ref] = ref.rank
    for ref in refs:
        if ref not in targets:
            targets[ref] = next(rank for rank, left in enumerate(room) if left)
            room[targets[ref]] -= 1
    return targets


def by_group(rollouts: list[Rollout]) -> dict[int, list[Rollout]]:
    """Rollouts of each prompt together, by group id, in order of first appearance."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.group_id, []).append(rollout)
    return groups


def is_informative(group: list[Rollout], apart: bool = False) -> bool:
    """Whether the valid rewards of a group differ; apart: or any of the rewards that are summed in them, for estimators
    that compare each by itself."""
    valid = [rollout for rollout in group if rollout.valid]
    columns = [[rollout.reward for rollout in valid]]
    if apart:
        names = {name for rollout in valid for name, weight in rollout.weights.items() if weight}
        columns = [[rollout.components[name] for rollout in valid if name in rollout.components] for name in names]
        columns = [[score for score in column if score == score] for column in columns]  # without NaN: it did not apply
    # In float32, in which they are compared for advantages: sums of the same rewards may differ in their last bits.
    return any(len({*torch.tensor(column, dtype=torch.float32).tolist()}) > 1 for column in columns)


class ResamplingMaker:
    """Takes an `ExperienceMaker`'s place in a step; what `generate` returns is scored already.

    Args:
        maker: draws and scores each round.
        tries: rounds at most.
        more: further prompts, as many as a step has; the same ones again where there are no others.
        components: compare each reward by itself, see `is_informative`.
    """

    def __init__(
        self, maker: ExperienceMaker, tries: int, more: Callable[[], PromptBatch], components: bool = False
    ) -> None:
        self.maker, self.tries, self.more, self.components = maker, tries, more, components

    def __getattr__(self, name: str) -> Any:
        return getattr(self.maker, name)

    def generate(self, prompts: PromptBatch, sampling: SamplingSettings | None = None) -> Rollouts:
        """Rollouts of as many prompts as were given. A collective."""
        rounds: list[tuple[SamplingSettings, dict[str, float]]] = []

        def sample_round(number: int) -> list[Rollout]:
            batch = prompts if number == 0 else self.more()
            rollouts = self.maker.generate(batch, sampling, sleep=number + 1 == self.tries)
            self.maker.judge(rollouts)
            rounds.append((rollouts.sampling, rollouts.counts))
            return rollouts

        dynamic = DynamicSampling(len(prompts), self.tries, self.components)
        kept = dynamic.collect(sample_round)
        self.maker.sleep()
        found = {"dynamic_rounds": dynamic.rounds, "dynamic_filled_groups": dynamic.filled}
        counts = over_rounds([counts for _, counts in rounds]) | found
        return Rollouts(kept, rounds[0][0], counts=counts, scored=True)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """They are scored; hooks learn it now, of those that are kept."""
        return self.maker.settings.hooks.on_scores(rollouts)


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of a step of those of its rounds of sampling, which are all of one size: counts and seconds are summed,
    shares averaged."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in rounds for name in each):
        values = [each[name] for each in rounds if name in each]
        found[name] = sum(values) / (1 if name.endswith((*COUNTED, SPENT)) else len(values))
    return found
