"""A term of the loss, as a user would add it: this file alone, named by --plugins."""

from lightrft_visual.algorithms.loss_terms import LossTerm, aggregate
from lightrft_visual.config import registry

WEIGHT = 0.5


class Calm(LossTerm):
    """Keeps log-probs of sampled tokens small in size, by their squares, which its own part of the forward makes."""

    def forward(self, call, inputs, seed):
        output = call(inputs)
        return output, {"squares": output.log_probs.square()}

    def share(self, inputs, mode, denominators):
        squares = aggregate(inputs.extra["squares"], inputs.action_mask, mode, denominators)
        return WEIGHT * squares, {"calm": squares.detach()}


@registry.loss_terms.register("calm", about="log-probs of sampled tokens near to 0")
def calm(config):
    return Calm()
