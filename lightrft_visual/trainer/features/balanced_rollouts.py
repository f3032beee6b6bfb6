"""Prompts dealt to ranks by the length that their responses are expected to have, for generation alone.

Lengths are running means by label. Responses go home before anything reads them: rewards, groups and training are those
of a run without, and so are the responses, whose seeds are their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...experience.rollouts import PromptFeatures, Rollouts
from ...runtime import collectives
from ..hooks import StepHook

NEW = 0.3  # weight of a step's mean length in the running one


def deal(costs: Sequence[Sequence[float]]) -> list[list[tuple[int, int]]]:
    """(home rank, index there) of what each rank takes, the most expensive first. costs: of each rank's own.

    The most expensive goes to whoever has the least so far, and stays at home where that is as good.
    """
    loads: list[float] = [0.0] * len(costs)
    taken: list[list[tuple[int, int]]] = [[] for _ in costs]
    for cost, index, home in sorted((-cost, i, home) for home, own in enumerate(costs) for i, cost in enumerate(own)):
        rank = min(range(len(costs)), key=lambda rank: (loads[rank], rank != home, rank))
        loads[rank] -= cost
        taken[rank].append((home, index))
    return taken


def _continued(prompts: Sequence[PromptFeatures]) -> list[Any]:
    """What of prompts makes the answers to them theirs; other limits, seeds and variants do not."""
    told = ((each.group_id, each.text, each.token_ids, each.images, each.videos, each.vision) for each in prompts)
    return [part for each in told for part in each]


class BalancedRolloutsHook(StepHook):
    """Sends prompts to other ranks before generation, and their responses back. longest: most tokens of a response."""

    name = "balanced_rollouts"

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.means: dict[str | None, float] = {}  # alike on all ranks
        self._seen: dict[str | None, tuple[int, int]] = {}  # tokens and responses of this rank's last step, by label
        self._own: list[PromptFeatures] = []
        self._asked: list[Any] = []  # what this rank generates for
        self._dealt: list[list[tuple[int, int]]] = []

    def on_prompts(self, requests: list[PromptFeatures]) -> list[PromptFeatures]:
        """What this rank generates. A collective."""
        told = collectives.all_gather_object(([each.label for each in requests], self._seen))
        self._learn([seen for _, seen in told])
        self._own = requests
        self._dealt = deal([list(map(self.expected, labels)) for labels, _ in told])
        # What no engine reads stays at home.
        sent = [replace(each, reference=None, metadata={}) for each in requests]
        outgoing = [[sent[i] for home, i in each if home == collectives.rank()] for each in self._dealt]
        arrived = [iter(each) for each in collectives.exchange_objects(outgoing)]
        taken = [next(arrived[home]) for home, _ in self._dealt[collectives.rank()]]
        self._asked = _continued(taken)
        return taken

    def on_rollouts(self, rollouts: Rollouts) -> Rollouts:
        """The responses to this rank's own prompts, in their order. A collective. Raises ConfigError, on all ranks,
        where a hook that came later has other prompts continued on one."""
        outgoing: list[list[tuple[int, list]]] = [[] for _ in self._dealt]
        n = rollouts.sampling.n
        continued = _continued([each.prompt for each in rollouts[::n]])
        changed = [*map(id, continued)] != [*map(id, self._asked)]
        for number, (home, index) in enumerate(self._dealt[collectives.rank()]):
            group = rollouts[n * number : n * (number + 1)]
            outgoing[home].append((index, [replace(each, prompt=None) for each in group]))
        received = collectives.exchange_objects([None] * len(outgoing) if changed else outgoing)
        if any(sent is None for sent in received):
            raise ConfigError("on_prompts of a hook changes prompts behind balance_rollouts: leave one of them out")
        arrived = sorted(pair for sent in received for pair in sent)
        rollouts[:] = [replace(each, prompt=self._own[index]) for index, group in arrived for each in group]
        lengths: dict[str | None, list[int]] = {}
        for each in rollouts:
            lengths.setdefault(each.prompt.label, []).append(len(each.token_ids))
        self._seen, self._own, self._asked = {label: (sum(own), len(own)) for label, own in lengths.items()}, [], []
        return rollouts

    def expected(self, label: str | None) -> float:
        """Tokens of a response: of its label so far, or else of all labels."""
        return self.means.get(label) or (sum(self.means.values()) / len(self.means) if self.means else self.longest)

    def _learn(self, seen: Sequence[Mapping[str | None, tuple[int, int]]]) -> None:
        for label in sorted({label for each in seen for label in each}, key=str):
            pairs = [each[label] for each in seen if label in each]
            mean = sum(tokens for tokens, _ in pairs) / sum(responses for _, responses in pairs)
            old = self.means.get(label)
            self.means[label] = mean if old is None else (1 - NEW) * old + NEW * mean

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.means, self._seen = dict(state["means"]), dict(state["seen"])

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All that was seen counts once: rank 0 tells it."""
        seen: dict[str | None, tuple[int, int]] = {}
        for label, (tokens, responses) in (pair for state in states for pair in state["seen"].items()):
            before = seen.get(label, (0, 0))
            seen[label] = before[0] + tokens, before[1] + responses
        return {"means": states[0]["means"], "seen": seen if collectives.is_rank_0() else {}}


def build(parts: Any) -> BalancedRolloutsHook | None:
    """For `balance_rollouts`, where there are several ranks. ConfigError where scorers begin before the rollouts are
    home."""
    rollout = parts.config.rollout
    if not rollout.balance_rollouts or collectives.world_size() == 1:
        return None
    if parts.maker.rewards.streams:
        raise ConfigError("balance_rollouts: remote scorers are given responses where they are made; leave it out")
    return BalancedRolloutsHook(rollout.generate_max_len)
