"""Mixtures of experts: the experts of the rollout, or of the old log-probs, again in training (`routing_replay`).

Engine and trainer round differently, and so send some tokens to other experts; so does the trainer after an update.
R2 and R3 of arXiv 2510.11370: 'old' uses the choices again that the old log-probs were made with, 'rollout' those of
the engine, for the old log-probs too. References, teachers and critics choose for themselves.
"""

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

    def __init__(self, routers: Routers, mode: str, balances: bool = False) -> None:
        self.routers, self.mode = routers, mode
        routers.use(mode, balances)

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
    """For a mixture of experts. ConfigError where its blocks are not built as those that are known."""
    algorithm, routers = parts.config.algorithm, parts.actor.module.backbone.routers
    mode, balances = algorithm.routing_replay, algorithm.router_aux_loss_coef > 0
    if routers is None and (mode != "off" or balances):
        raise ConfigError("routing_replay and router_aux_loss_coef: this model's routers are not known; leave them out")
    return None if routers is None else RoutingHook(routers, mode, balances)
