"""Plans of numbers that a test gives, where what is chosen by a plan is tested and not what it counts."""

from collections.abc import Callable
from math import ceil

import pytest

from lightrft_visual.config.placement import DEVICES
from lightrft_visual.plugins.memory_plan import check
from lightrft_visual.plugins.memory_plan.table import Item, Phase, Plan

UNIT = DEVICES["h100-80gb"].memory / 100


@pytest.fixture
def made_plans(monkeypatch) -> Callable[..., None]:
    """Plans by hundredths of an H100: weights take 5, a sample of a rollout's micro-batch 0.2, one of a training's
    `kept[how]`, by gradient checkpointing. A step takes `seconds[how]`, and `call` more for each micro-batch."""

    def make(kept: dict[str, float], seconds: dict[str, float] | None = None, call: float = 1.0) -> None:
        def of_model(planner, config):
            how = config.model.gradient_checkpointing

            def plan(each) -> Plan:
                weights, size = Item("policy: weights", 5 * UNIT), each.train.micro_train_batch_size
                scored = Item("forwards", each.rollout.micro_rollout_batch_size * 0.2 * UNIT)
                trained = Item("activations", size * kept[how] * UNIT)
                lasts = (seconds or {}).get(how, 0.0) + call * ceil(each.train.train_batch_size / planner.ranks / size)
                moments = [("load", (), 0.0), ("score", (scored,), 0.0), ("train", (trained,), lasts)]
                phases = tuple(Phase(name, (weights, *items), time) for name, items, time in moments)
                return Plan("a model", planner.device, planner.ranks, planner.local, phases)

            return plan

        monkeypatch.setattr(check.Planner, "_of_model", of_model)

    return make
