"""Mixtures of experts: the experts of the rollout, or of the old log-probs, again in training (`routing_replay`).

Engine and trainer round differently, and so send some tokens to other experts; so does the trainer after an update.
R2 and R3 of arXiv 2510.11370: 'old' uses the choices again that the old log-probs were made with, 'rollout' those of
the engine, for the old log-probs too. References, teachers and critics choose for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, RolloutError
from ...experience.rollouts import Rollouts
from ...models.routing import Routers
from ..hooks import StepHook

MEASURED = 16  # rollouts of a step on each rank whose experts are kept to compare with, where they are not used again


class RoutingHook(StepHook):
    """Chooses which rollouts keep the record of their experts, and reports `routed_otherwise`."""

    name = "routing"

    def __init__(self, routers: Routers, mode: str) -> None:
        self.routers, self.mode = routers, mode
        routers.use(mode)

    def on_rollouts(self, rollouts: Rollouts) -> Rollouts:
        """Raises RolloutError where the engine recorded nothing that could be used again."""
        for index, rollout in enumerate(rollouts):
            if self.mode == "rollout" and rollout.experts is None and rollout.valid:
                raise RolloutError("routing_replay rollout: the engine does not say which experts it chose; use old")
            if rollout.distorted or self.mode == "old" or (self.mode == "off" and index >= MEASURED):
                rollout.experts = None
        return rollouts

    def metrics(self) -> Mapping[str, float]:
        """See `Routers.metrics`."""
        return self.routers.metrics()


def build(parts: Any) -> RoutingHook | None:
    """For a mixture of experts. Raises ConfigError where another model, or ranks that divide sequences, cannot do what
    `routing_replay` asks for."""
    mode, routers = parts.config.algorithm.routing_replay, parts.actor.module.backbone.routers
    if routers is None and mode != "off":
        raise ConfigError(f"routing_replay {mode} is for mixtures of experts: this model has no routers; leave it out")
    if mode == "old" and parts.config.distributed.sp_size > 1:
        raise ConfigError("routing_replay old: with sp_size no rank sees all choices of a sequence; use rollout")
    return None if routers is None else RoutingHook(routers, mode)
