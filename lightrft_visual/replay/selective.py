"""Selective sample replay (VL-Rethinker, arXiv 2504.08837): samples that teach stand in for those that do not.

A group whose rewards are all equal has no advantage. Its samples give their places in the step to samples of earlier
steps, drawn by the size of their advantage; those bring the log-probs of the policy that sampled them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..algorithms.dynamic_sampling import balanced
from ..strategy import collectives
from ..strategy.seeding import derive_seed
from .buffer import NaiveReplayBuffer
from .items import AnyItem
from .state import items_from_state, items_to_state


class Kept(NamedTuple):
    """A sample that some rank keeps. key: larger is drawn first."""

    key: float
    sample_id: int
    rank: int
    index: int


class Refilled(NamedTuple):
    """Over all ranks: samples of the step, how many of them were replaced, and the policy versions they came from."""

    samples: int
    replaced: int
    versions: list[int]


@dataclass
class SelectiveReplay:
    """The samples of earlier steps that had an advantage, on this rank its own.

    capacity: samples kept on this rank, the oldest dropped first. alpha: they are drawn in proportion to
    |advantage| ** alpha, none twice in a step. seed: of the run.
    """

    capacity: int
    alpha: float
    seed: int
    kept: list[AnyItem] = field(default_factory=list)

    def refill(self, buffer: NaiveReplayBuffer, step: int) -> Refilled:
        """Replace samples without advantage, in place, and keep those that have one. A collective.

        What is drawn depends on the seed, the step and the samples alone. Where more samples lack an advantage than are
        kept, the rest of them stays.
        """
        new = [item for item in buffer.items if teaches(item)]
        empty = [(int(item.sample_id), place) for place, item in enumerate(buffer.items) if not teaches(item)]
        offers, lacking, counts = zip(
            *collectives.all_gather_object((self._offers(step), [number for number, _ in empty], len(buffer)))
        )
        drawn = sorted((each for offer in offers for each in offer), reverse=True)
        replaced = set(sorted(number for each in lacking for number in each)[: len(drawn)])
        drawn = drawn[: len(replaced)]
        places = [place for number, place in empty if number in replaced]
        for place, item in zip(places, self._exchange(drawn, [len(replaced & {*each}) for each in lacking])):
            buffer.items[place] = item
        versions = [int(buffer.items[place].policy_version) for place in places]
        everywhere = [version for each in collectives.all_gather_object(versions) for version in each]
        self.kept = (self.kept + new)[-self.capacity :]
        return Refilled(sum(counts), len(replaced), everywhere)

    def _offers(self, step: int) -> list[Kept]:
        """Every kept sample with its key: log weight plus Gumbel noise, of which the largest are a draw without
        replacement (Efraimidis and Spirakis 2006)."""
        rank = collectives.rank()
        offers = []
        for index, item in enumerate(self.kept):
            number = int(item.sample_id)
            uniform = (derive_seed(self.seed, "selective replay", step, number) % 2**52 + 0.5) / 2**52
            gumbel = -math.log(-math.log(uniform))
            offers.append(Kept(self.alpha * math.log(advantage_size(item)) + gumbel, number, rank, index))
        return offers

    def _exchange(self, drawn: list[Kept], shares: list[int]) -> list[AnyItem]:
        """This rank's part of the drawn samples. A collective."""
        rank, targets = collectives.rank(), balanced(drawn, shares)
        parcels = [
            [(each.sample_id, self.kept[each.index]) for each in drawn if (each.rank, targets[each]) == (rank, other)]
            for other in range(len(shares))
        ]
        arrived = [pair for sent in collectives.exchange_objects(parcels) for pair in sent]
        return [item for _, item in sorted(arrived, key=lambda pair: pair[0])]

    def state_dict(self) -> dict[str, Any]:
        """The kept samples."""
        return {"kept": items_to_state(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.kept = items_from_state(state["kept"])[-self.capacity :]


def teaches(item: AnyItem) -> bool:
    """Whether a sample is better or worse than its group. Its tokens may have advantages all the same, of a KL in the
    reward, of whitening or of a teacher."""
    compared = (item.info or {}).get("group_advantage")
    return advantage_size(item) > 0 and (compared is None or bool(compared != 0))


def advantage_size(item: AnyItem) -> float:
    """Mean |advantage| over the tokens of a sample that count; 0 of an invalid one."""
    if item.valid is not None and not bool(item.valid):
        return 0.0
    sizes = item.advantages.abs()
    if item.action_mask is not None and item.action_mask.shape == sizes.shape:
        sizes = sizes[item.action_mask.bool()]
    return sizes.mean().item() if sizes.numel() else 0.0
