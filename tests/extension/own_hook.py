"""A hook with state, as a user would add it: this file alone, named by --plugins."""

import torch

from lightrft_visual.config import registry
from lightrft_visual.trainer.hooks import StepHook


class Dice(StepHook):
    """Adds the throw of a die of its own to every reward; what it threw next depends on all throws before."""

    name = "dice"

    def __init__(self) -> None:
        self.generator, self.thrown = torch.Generator().manual_seed(5), 0

    def on_scores(self, rollouts):
        for rollout in rollouts:
            rollout.reward += float(torch.randint(1, 7, (1,), generator=self.generator))
        self.thrown += len(rollouts)
        return rollouts

    def metrics(self):
        return {"dice_thrown": self.thrown}

    def state_dict(self):
        return {"generator": self.generator.get_state(), "thrown": self.thrown}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.thrown = state["thrown"]


@registry.hooks.register("dice", about="rewards with the throw of a die", kinds=("vl",))
def dice(parts):
    return Dice()
