"""Loss terms of others: what is no term, or gives no share of the loss, is said by name."""

from __future__ import annotations

import pytest
import torch

from lightrft_visual.algorithms.loss_terms import LossDenominators, LossTerm
from lightrft_visual.algorithms.policy_losses import LossInputs, policy_loss
from lightrft_visual.config import registry
from lightrft_visual.config.vl import AlgorithmConfig
from lightrft_visual.errors import ConfigError


class Mine(LossTerm):
    def __init__(self, gives):
        self.gives = gives

    def share(self, inputs, mode, denominators):
        return self.gives


@pytest.mark.parametrize(
    "made, told",
    [
        (lambda inputs: 0.0, "the loss term 'mine' is no LossTerm: function"),
        (Mine(None), "Mine.share must return a scalar and a mapping; it gave NoneType"),
        (Mine(torch.zeros(())), "it gave Tensor"),
        (Mine((torch.zeros(2, 3), {})), r"it gave a tensor of shape \(2, 3\): sum it by `aggregate`"),
        (Mine((0.0, {})), "it gave tuple"),
        (Mine((torch.zeros(()), {"clip_frac": torch.ones(())})), "Mine.share gives clip_frac, metrics that there are"),
        (Mine((torch.zeros(()), {"loss": torch.ones(())})), "Mine.share gives loss"),
    ],
)
def test_what_is_no_term_or_no_share_of_the_loss_is_refused_by_name(monkeypatch, made, told):
    monkeypatch.setattr(registry.loss_terms, "_entries", dict(registry.loss_terms._entries))
    registry.loss_terms.register("mine", "mine")(lambda config: made)
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match=told):
        policy_loss(LossInputs(zeros, zeros, zeros, mask), AlgorithmConfig(), LossDenominators(6, 2, 3))
