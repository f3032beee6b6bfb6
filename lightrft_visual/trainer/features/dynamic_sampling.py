"""Dynamic sampling (DAPO): a maker that draws again until enough groups have rewards that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...algorithms.dynamic_sampling import DynamicSampling
from ...experience.rollouts import PromptBatch, Rollout, Rollouts, SamplingSettings
from ...observe.metrics import COUNTED, SPENT
from ..vl.maker import ExperienceMaker


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
        rounds: list[Rollouts] = []

        def sample_round(number: int) -> list[Rollout]:
            batch = prompts if number == 0 else self.more()
            rollouts = self.maker.generate(batch, sampling, sleep=number + 1 == self.tries)
            self.maker.judge(rollouts)  # the engine sleeps by the last round: rewards may be models
            rounds.append(rollouts)
            return rollouts

        dynamic = DynamicSampling(len(prompts), self.tries, self.components)
        kept = dynamic.collect(sample_round)
        self.maker.sleep()
        found = {"dynamic_rounds": dynamic.rounds, "dynamic_filled_groups": dynamic.filled}
        counts = over_rounds([each.counts for each in rounds]) | found
        return Rollouts(kept, rounds[0].sampling, counts=counts, scored=True)

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
