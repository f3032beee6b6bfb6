"""What the vision-language trainer evaluates, and what it takes from a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.algorithms.kl import get_kl_controller
from lightrft_visual.config.vl import AlgorithmConfig, RunConfig
from lightrft_visual.models.weight_copies import WeightAverage
from lightrft_visual.trainer.features.ema import EmaHook
from lightrft_visual.trainer.hooks import Hooks
from lightrft_visual.trainer.vl.trainer import VLTrainer


def trainer_with_average(shares_weights: bool) -> SimpleNamespace:
    """As much of a trainer as `_evaluated_weights` reads. Its weight is 1, the average 0; `held` is the engine's."""
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = WeightAverage([weight], 0.9)
    weight.data.fill_(1.0)
    trainer = SimpleNamespace(
        hooks=Hooks([EmaHook(ema, lent=True)]),
        maker=SimpleNamespace(engine=SimpleNamespace(shares_weights=shares_weights)),
        actor=SimpleNamespace(bring_back=lambda: trainer.used.append("brought back")),
        weight=weight,
        held=1.0,
        used=[],
    )

    def load(lent: bool = False) -> None:
        trainer.held = weight.item()
        trainer.used.append(lent)

    trainer._load_engine_weights = load
    return trainer


@pytest.mark.parametrize("shares_weights", [True, False])
def test_either_engine_samples_from_the_average(shares_weights):
    trainer = trainer_with_average(shares_weights)
    with VLTrainer._evaluated_weights(trainer):
        sampled_from = trainer.weight.item() if shares_weights else trainer.held
    assert sampled_from == 0.0
    assert trainer.weight.item() == 1.0 and trainer.held == 1.0
    assert trainer.used == ["brought back", True, False]  # weights that are lent to the average are not sent away


class Stateful:
    def __init__(self):
        self.loaded = None

    def load_state_dict(self, state):
        self.loaded = state


def resuming_trainer(coefficient: float) -> SimpleNamespace:
    algorithm = AlgorithmConfig(init_kl_coef=coefficient, kl_target=0.1)
    told = []
    return SimpleNamespace(
        config=RunConfig(algorithm=algorithm),
        prompts=Stateful(),
        agreement=SimpleNamespace(figure=0.0),
        maker=SimpleNamespace(kl_controller=get_kl_controller(algorithm), calculator=Stateful()),
        console=SimpleNamespace(message=told.append),
        told=told,
    )


STATE = {
    "sampler": {}, "rounds": 3, "parity": 0.5, "init_kl_coef": 0.1, "kl_controller": {"value": 0.07}, "calculator": {},
}  # fmt: skip


def test_the_controller_goes_on_unless_the_command_names_another_coefficient():
    same, other = resuming_trainer(0.1), resuming_trainer(0.5)
    VLTrainer.load_state_dict(same, STATE)
    VLTrainer.load_state_dict(other, STATE)
    assert same.maker.kl_controller.value == 0.07 and not same.told
    assert same.prompts.loaded is STATE and same.agreement.figure == 0.5
    assert other.maker.kl_controller.value == 0.5 and "init_kl_coef was 0.1" in other.told[0]
