"""The reference follows the policy now and then (TR-DPO, arXiv 2404.09656), for `ref_update_steps`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...models.weight_copies import FollowingWeights
from ..hooks import StepHook


class ReferenceRefreshHook(StepHook):
    """Moves the frozen reference towards the trained weights after every few steps."""

    name = "reference"

    def __init__(self, following: FollowingWeights) -> None:
        self.following = following

    def on_sync(self) -> None:
        """The step in progress is finished by now."""
        self.following.step(self.context.step())

    def state_dict(self) -> dict[str, Any]:
        return self.following.state_dict()

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return self.following.state_of_ranks(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.following.load_state_dict(dict(state))


def build(parts: Any) -> ReferenceRefreshHook | None:
    """For `ref_update_steps`, where the reference has weights of its own (no LoRA)."""
    algorithm, frozen = parts.config.algorithm, parts.reference_module
    if not algorithm.ref_update_steps or frozen is None:
        return None
    trained = parts.actor.module.parameters
    return ReferenceRefreshHook(
        FollowingWeights(frozen, trained, algorithm.ref_update_steps, algorithm.ref_update_mixup)
    )
