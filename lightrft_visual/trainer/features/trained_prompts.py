"""How many different prompts a run has trained on so far."""

from collections.abc import Mapping
from hashlib import sha256
from itertools import chain
from typing import Any

from ...runtime.collectives import all_gather_object
from ..hooks import StepData, StepHook


class TrainedPromptsHook(StepHook):
    """The metric `trained_prompt_num` of diffusion runs, as in DiffusionNFT, Flow-GRPO and FastVideo: prompts are equal
    where their texts are."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}  # in the order in which they came

    def on_experience(self, step: StepData) -> StepData:
        """Those of all ranks. A collective."""
        mine = dict.fromkeys(sha256(prompt.encode()).hexdigest()[:16] for prompt in step.rollouts.requests.prompts)
        self.seen |= dict.fromkeys(chain.from_iterable(all_gather_object(mine)))
        return step

    def metrics(self) -> Mapping[str, float]:
        """The same on every rank."""
        return {"trained_prompt_num": float(len(self.seen))}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = dict.fromkeys(state["seen"])


def build(parts: Any) -> TrainedPromptsHook | None:
    """Where rollouts are scored: neither for pairs of a file nor for losses on the reward itself."""
    config = parts.config
    return None if config.offline or config.algorithm.entry.trains_on == "reward" else TrainedPromptsHook()
