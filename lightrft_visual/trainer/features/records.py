"""Rollouts that people are shown, and the memory of the images of all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...batches.rollouts import Rollout, let_go_of_media
from ...observe.rollouts import gather_records, own_choice, records_from_rollouts
from ...strategy.host import give_back_freed_memory
from ..hooks import HookContext, StepData, StepHook


class RecordsHook(StepHook):
    """Chooses the records of each step; decoded media that no record shows leave the host's memory once scored.

    count: records of a step, over all ranks; 0 keeps none.
    """

    def __init__(self, count: int, run_seed: int) -> None:
        self.count, self.run_seed = count, run_seed

    def setup(self, context: HookContext) -> None:
        """Steps are counted by the run."""
        self.finished = context.step

    def on_scores(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Models read the patches; images themselves were generated from and scored, and are shown by the records."""
        own = own_choice(records_from_rollouts(rollouts), self.count, self.run_seed, self.finished() + 1)
        give_back_freed_memory(let_go_of_media(rollouts, {record["sample_id"] for record in own}))
        return rollouts

    def on_experience(self, step: StepData) -> StepData:
        """A collective where records are kept."""
        if self.count:
            records = records_from_rollouts(step.rollouts)
            step.records += gather_records(records, self.count, self.run_seed, self.finished() + 1)
        return step


def build(parts: Any) -> RecordsHook:
    """Always: without records all media are released."""
    output = parts.config.output
    return RecordsHook(output.num_trajectories_to_save if output.save_trajectories else 0, parts.config.train.seed)
