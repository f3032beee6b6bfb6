"""Several scorers as one: a weighted sum with every part by name."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...config.shared import RewardConfig
from ...errors import ConfigError
from ..batch import Call, Job, RewardBatch, Scores, Source, named_components, run_jobs, weighted_sum
from ..recipe import ANY_LABEL, recipe_from_components
from ..registry import Catalogue


class MultiScorer(Source):
    """components {name: weight} and kwargs {name: settings}, as in `reward.components` and `reward.kwargs`; its
    servers and functions have the time limits, key and failures of reward_config, which a run gives.

    The score is the weighted sum over the components that apply; the outputs are each component by name, and the sum
    again as `avg` (Flow-GRPO's name for it) unless one has this name. A sample on which a component failed is failed.
    """

    name = "multi"

    def __init__(
        self,
        components: Mapping[str, Any],
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        reward_config: RewardConfig | None = None,
    ) -> None:
        recipe = recipe_from_components(components, kwargs)
        self._catalogue = Catalogue(replace(reward_config or RewardConfig(), reward_transport="inprocess"))
        entries = [entry for entry in recipe.entries[ANY_LABEL] if entry.weight != 0]
        if not entries:
            raise ConfigError("multi: every component has weight 0")
        self._sources = [(entry, self._catalogue.resolve(entry, {})) for entry in entries]
        self.parts = [source for _, source in self._sources]
        self.uses_device = any(getattr(part, "uses_device", False) for part in self.parts)

    def score(self, batch: RewardBatch, call: Call) -> Scores:
        """The weighted sum, with every component beside it."""
        size, everything = len(batch), list(range(len(batch)))
        jobs = [
            Job(e.name, source, everything, torch.full((size,), e.weight, dtype=torch.float64), e.score_key)
            for e, source in self._sources
        ]
        columns, by_name = run_jobs(jobs, batch, call)
        reasons = sum(by_name.values(), Counter())
        total, _ = weighted_sum(columns, size, torch.zeros(size, dtype=torch.bool))
        failed = torch.stack([column.failed for column in columns]).any(dim=0)
        return Scores(total, failed, {"avg": total, **named_components(columns)}, reasons)

    def close(self) -> None:
        """End what the components started."""
        self._catalogue.close()
