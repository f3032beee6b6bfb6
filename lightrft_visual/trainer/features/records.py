"""Rollouts that people are shown, and the memory of the images of all others."""

from collections.abc import Callable
from typing import Any

from ...experience.rollouts import release_media
from ...observe.console import TABLE_EVERY
from ...observe.recorder import MEDIA, Record, gather_records, select
from ...runtime.host_memory import give_back_freed_memory
from ..hooks import StepData, StepHook


class RecordsHook(StepHook):
    """Chooses the records of each step; decoded media that no record shows leave the host's memory once scored.

    count: records of a step, over all ranks; 0 keeps none. The console's table has its two whatever it is. records_of:
    those of rollouts. releases: whether rollouts hold media that nobody needs again, once all other hooks have seen
    them.
    """

    last = True

    def __init__(self, count: int, run_seed: int, records_of: Callable[[Any], list[Record]], releases: bool) -> None:
        self.count, self.run_seed, self.records_of, self.releases = count, run_seed, records_of, releases

    def on_scores(self, rollouts: Any) -> Any:
        """Models read the patches; images themselves were generated from and scored, and are shown by the records."""
        if not self.releases:
            return rollouts
        own = select(self.records_of(rollouts), self.count, self.run_seed, self.context.step() + 1)
        self.shown = {record["sample_id"] for record in own}
        give_back_freed_memory(release_media(rollouts, self.shown))
        return rollouts

    def on_experience(self, step: StepData) -> StepData:
        """A collective where records are kept or shown."""
        number = self.context.step() + 1
        if self.count < 2 and number % TABLE_EVERY == 0:
            bare = [{key: each[key] for key in each if key not in MEDIA} for each in self.records_of(step.rollouts)]
            step.shown += gather_records(bare, 2, self.run_seed, number)
        if self.count:
            records = self.records_of(step.rollouts)
            if self.releases:  # hooks may have changed rewards since
                records = [record for record in records if record["sample_id"] in self.shown]
            step.records += gather_records(records, self.count, self.run_seed, number)
        return step


def build(parts: Any) -> RecordsHook:
    """Always: without records all media are released."""
    count, seed = parts.config.output.records_kept, parts.config.train.seed
    return RecordsHook(count, seed, parts.records_of, releases=parts.kind == "vl")
