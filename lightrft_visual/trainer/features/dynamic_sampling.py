"""DAPO's dynamic sampling (arXiv 2503.14476): keep groups whose rewards differ, sample more prompts for the others."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ...experience.rollouts import PromptBatch, Rollout, Rollouts, SamplingSettings
from ...observe.metrics import COUNTED, SPENT
from ...runtime import collectives
from ..vl.maker import ExperienceMaker

R = TypeVar("R", bound=Any)
V = TypeVar("V")


class GroupRef(NamedTuple):
    """A group that some rank holds. Sorted, groups that differ come first, then those of earlier prompts."""

    is_equal: bool  # all its rewards
    round: int
    group_id: int
    rank: int
    draws: bool = False  # its responses are images


def collect(
    wanted: int, tries: int, sample_round: Callable[[int], list[Rollout]], apart: bool = False
) -> tuple[list[Rollout], int, int]:
    """Rollouts of as many groups as are wanted whose rewards differ: those of all ranks together. A collective.

    The ranks share what they find: a rank without luck is given groups of another one. Which groups make up the batch
    does not depend on the number of ranks. Where the model also draws, the batch keeps as many groups of answers and of
    drawings as the first round brought: a kind that is mastered does not give its place to the other one. After the
    last round the batch is filled up with groups of equal rewards (they carry no gradient), so that its size stays.

    Args:
        wanted: groups of this rank.
        tries: rounds of sampling at most, the first included.
        sample_round: (k) samples and scores round k; every rank calls it alike.
        apart: as in `is_informative`.

    Returns:
        The rollouts; the rounds that were made; groups of equal rewards that fill the batch up, over all ranks.
    """
    rank = collectives.rank()
    found: dict[GroupRef, list[Rollout]] = {}  # of this rank's groups, the best so far
    for number in range(tries):
        found |= {
            GroupRef(not is_informative(group, apart), number, group_id, rank, group[0].prompt.draws): group
            for group_id, group in by_group(sample_round(number)).items()
        }
        shares, gathered = zip(*collectives.all_gather_object((wanted, list(found))))
        refs = [ref for each in gathered for ref in each]
        if number == 0:
            kinds = Counter(ref.draws for ref in refs)
        # What is not among the best of its kind now never will be.
        best = sorted(ref for kind, most in kinds.items() for ref in sorted(r for r in refs if r.draws == kind)[:most])
        found = {ref: found[ref] for ref in best if ref in found}
        filled = sum(ref.is_equal for ref in best)
        if not filled and len(best) == sum(shares):
            break
    groups = shared_out(found, best, shares)
    return [rollout for ref in sorted(groups) for rollout in groups[ref]], number + 1, filled


def shared_out(own: Mapping[R, V], refs: Sequence[R], shares: Sequence[int]) -> dict[R, V]:
    """What this rank has of all that `refs` name, once each rank has its share of them; see `balanced`. A collective.

    Args:
        own: what it has before.
        refs: of all ranks, the same on each.
        shares: of each rank.
    """
    rank, targets = collectives.rank(), balanced(refs, shares)
    outgoing = [
        {ref: own[ref] for ref in targets if (ref.rank, targets[ref]) == (rank, other)} for other in range(len(shares))
    ]
    return {ref: value for sent in collectives.exchange_objects(outgoing) for ref, value in sent.items()}


def balanced(refs: Sequence[R], shares: Sequence[int]) -> dict[R, int]:
    """The rank that each goes to: its own as long as that has room, else the first that has."""
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


def by_group(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
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

        kept, made, filled = collect(len(prompts), self.tries, sample_round, self.components)
        self.maker.sleep()
        found = {"dynamic_rounds": made, "dynamic_filled_groups": filled}
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
