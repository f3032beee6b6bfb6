"""Selective sample replay (VL-Rethinker, arXiv 2504.08837): samples that teach stand in for those that do not.

A group whose rewards are all equal has no advantage. Its samples give their places in the step to samples of earlier
steps, drawn by the size of their advantage; those bring the log-probs of the policy that sampled them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...experience.buffer import NaiveReplayBuffer, items_from_state, items_to_state
from ...experience.items import AnyItem, part_of
from ...runtime import collectives
from ...runtime.seeding import derive_seed
from ..hooks import StepHook
from .dynamic_sampling import shared_out


class Kept(NamedTuple):
    """A sample that some rank keeps. key: larger is drawn first."""

    key: float
    sample_id: int
    rank: int
    index: int


class KeptState(Mapping[str, Any]):
    """The state of samples as they are now, made when it is read: every step has one, and few are written."""

    def __init__(self, kept: Sequence[AnyItem]) -> None:
        self._items = list(kept)

    def __getitem__(self, key: str) -> list[dict[str, Any]]:
        return items_to_state({"kept": self._items}[key])

    def __iter__(self) -> Iterator[str]:
        return iter(["kept"])

    def __len__(self) -> int:
        return 1


@dataclass
class SelectiveReplay(StepHook):
    """The samples of earlier steps that had an advantage, on this rank its own; refills each step's buffer of them.
    `replayed_share` and `replayed_age` say with how much, and how old it is.

    capacity: samples of each part of the loss, such as answers and drawn images, kept over all ranks, the oldest
    dropped first. They are drawn in proportion to |advantage|, none twice in a step. seed: of the run.
    """

    capacity: int
    seed: int
    mask_truncated: bool = False  # the loss masks samples that were cut off
    kept: list[AnyItem] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)
    name = "replay"

    def on_buffer(self, buffer: NaiveReplayBuffer) -> NaiveReplayBuffer:
        step = self.context.step()
        samples, versions = self.refill(buffer, step)
        self.found = {"replayed_share": len(versions) / samples}
        if versions:
            self.found["replayed_age"] = step - sum(versions) / len(versions)
        return buffer

    def metrics(self) -> dict[str, float]:
        return self.found

    def refill(self, buffer: NaiveReplayBuffer, step: int) -> tuple[int, list[int]]:
        """Replace samples without advantage, in place, and keep those that have one. A collective.

        Answers stand in for answers, drawn images for drawn images. What is drawn depends on the seed, the step and the
        samples alone. Where more samples lack an advantage than are kept, the rest of them stays.

        Returns, over all ranks: the samples of the step, and the policy versions of those that stand in for others.
        """
        _mark(buffer.items, replayed=False)
        new: list[AnyItem] = []
        own: dict[int, list[int]] = {}  # the numbers of samples without advantage, by kind
        for item in buffer.items:
            if teaches(item, self.mask_truncated):
                new.append(item)
            else:
                own.setdefault(part_of(item), []).append(int(item.sample_id))
        offers, lacking, counts = zip(*collectives.all_gather_object((self._offers(step), own, len(buffer))))
        versions = []
        for kind in sorted({kind for each in lacking for kind in each}):
            offered = sorted((kept for each in offers for kept in each.get(kind, ())), reverse=True)
            versions += self._refill(buffer, kind, offered, [each.get(kind, []) for each in lacking])
        self.kept += new
        told = collectives.all_gather_object((versions, [(part_of(each), _age(each)) for each in self.kept]))
        everywhere = [version for each, _ in told for version in each]
        self._keep_newest([pair for _, each in told for pair in each])
        return sum(counts), everywhere

    def _refill(self, buffer: NaiveReplayBuffer, kind: int, offered: list[Kept], lacking: list[list[int]]) -> list[int]:
        """Of one part. lacking: the numbers of each rank's samples without advantage. Returns the policy
        versions of those that now stand here. A collective."""
        replaced = set(sorted(number for each in lacking for number in each)[: len(offered)])
        drawn = offered[: len(replaced)]
        fresh = [(index, item) for index, item in enumerate(buffer.items) if part_of(item) == kind]
        indices = [index for index, item in fresh if int(item.sample_id) in replaced]
        rank, shares = collectives.rank(), [len(replaced & {*each}) for each in lacking]
        shared = shared_out({each: self.kept[each.index] for each in drawn if each.rank == rank}, drawn, shares)
        arrived = [copy(item) for _, item in sorted(shared.items(), key=lambda pair: pair[0].sample_id)]
        _mark(arrived, replayed=True)
        for index, item in zip(indices, arrived):
            buffer.items[index] = item
        return [int(buffer.items[index].policy_version) for index in indices]

    def _keep_newest(self, ages: list[tuple[int, tuple[int, int]]]) -> None:
        """The last `capacity` of each kind stay. ages: (kind, age) of all ranks' samples."""
        oldest = {kind: sorted(age for own, age in ages if own == kind)[-self.capacity :][0] for kind in dict(ages)}
        self.kept = [item for item in self.kept if _age(item) >= oldest[part_of(item)]]

    def _offers(self, step: int) -> dict[int, list[Kept]]:
        """Every kept sample with its key, by kind: log weight plus Gumbel noise, of which the largest are a draw
        without replacement (Efraimidis and Spirakis 2006)."""
        rank = collectives.rank()
        offers: dict[int, list[Kept]] = {}
        for index, item in enumerate(self.kept):
            number = int(item.sample_id)
            uniform = (derive_seed(self.seed, "selective replay", step, number) % 2**52 + 0.5) / 2**52
            gumbel = -math.log(-math.log(uniform))
            key = math.log(advantage_size(item)) + gumbel
            offers.setdefault(part_of(item), []).append(Kept(key, number, rank, index))
        return offers

    def state_dict(self) -> Mapping[str, Any]:
        return KeptState(self.kept)

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        kept = [item for state in states for item in items_from_state(state["kept"])]
        return {"kept": items_to_state(kept[collectives.rank() :: collectives.world_size()])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = [each for each in items_from_state(state["kept"]) if teaches(each, self.mask_truncated)]


def _age(item: AnyItem) -> tuple[int, int]:
    """By which samples come in the same order on any number of ranks; numbers alone begin anew with other batches."""
    return int(item.policy_version), int(item.sample_id)


def _mark(items: list[AnyItem], replayed: bool) -> None:
    """Say of samples, in their info, whether they are of an earlier step."""
    for item in items:
        item.info = {**(item.info or {}), "replayed": replayed}


def teaches(item: AnyItem, mask_truncated: bool) -> bool:
    """Whether a sample is better or worse than its group, and no cut off one that the loss masks. Its tokens may have
    advantages all the same, of a KL in the reward, of whitening or of a teacher."""
    info = item.info or {}
    masked, compared = mask_truncated and bool(info["truncated"]), info.get("group_advantage")
    return not masked and advantage_size(item) > 0 and (compared is None or bool(compared != 0))


def advantage_size(item: AnyItem) -> float:
    """Mean |advantage| over the tokens of a sample that count; 0 of an invalid one."""
    if item.valid is not None and not bool(item.valid):
        return 0.0
    sizes = item.advantages.abs()
    if item.action_mask is not None and item.action_mask.shape == sizes.shape:
        sizes = sizes[item.action_mask.bool()]
    return sizes.mean().item() if sizes.numel() else 0.0


def build(parts: Any) -> SelectiveReplay | None:
    """For `selective_replay`, samples over all ranks."""
    algorithm = parts.config.algorithm
    most = algorithm.selective_replay
    return SelectiveReplay(most, parts.config.train.seed, algorithm.mask_truncated) if most else None
