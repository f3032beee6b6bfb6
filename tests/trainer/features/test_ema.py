"""The average of the weights as a hook: what it follows, what it lends, and where it goes on."""

from types import SimpleNamespace

import torch

from lightrft_visual.models.weight_copies import WeightAverage
from lightrft_visual.trainer.features.ema import EmaHook
from lightrft_visual.trainer.hooks import Hooks


def followed(lent: bool = True) -> tuple[torch.nn.Parameter, EmaHook]:
    """A weight of 1 whose average, begun before it moved, is 0."""
    weight = torch.nn.Parameter(torch.zeros(1))
    hook = EmaHook(WeightAverage([weight], 0.5), lent)
    weight.data.fill_(1.0)
    return weight, hook


def test_the_average_follows_the_steps_that_were_applied_and_is_lent():
    weight, hook = followed()
    for purpose in ("evaluation", "export"):
        with hook.weights_for(purpose):
            assert weight.item() == 0.0
        assert weight.item() == 1.0 and followed(lent=False)[1].weights_for(purpose) is None
    hook.on_update(SimpleNamespace(applied=False))
    assert hook.average.copies[0].tolist() == [0.0]
    hook.on_update(SimpleNamespace(applied=True))
    assert hook.average.copies[0].tolist() == [0.5]
    Hooks([hook]).load_state_dict({"guard": {}})  # it was not kept: it begins at the resumed weights
    assert hook.average.copies[0].tolist() == [1.0]
