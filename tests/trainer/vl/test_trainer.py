"""What the vision-language trainer evaluates, and what it takes from a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.algorithms.kl import get_kl_controller
from lightrft_visual.batches.sampling import SamplingSettings
from lightrft_visual.config.vl import AlgorithmConfig, OutputConfig, RunConfig, TrainConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.weight_copies import WeightAverage
from lightrft_visual.trainer.vl.trainer import VLTrainer, check_budget


def trainer_with_average(shares_weights: bool) -> SimpleNamespace:
    """As much of a trainer as `_evaluated_weights` reads. Its weight is 1, the average 0; `held` is the engine's."""
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = WeightAverage([weight], 0.9)
    weight.data.fill_(1.0)
    trainer = SimpleNamespace(
        config=RunConfig(output=OutputConfig(eval_ema=True), train=TrainConfig(enable_ema=True)),
        parts=SimpleNamespace(ema=ema),
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
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = WeightAverage([weight], 0.9)
    weight.data.fill_(1.0)  # what load_engines has put there
    told = []
    return SimpleNamespace(
        config=RunConfig(algorithm=algorithm),
        parts=SimpleNamespace(sampler=Stateful(), ema=ema, following=None),
        maker=SimpleNamespace(kl_controller=get_kl_controller(algorithm), calculator=Stateful()),
        console=SimpleNamespace(message=told.append),
        replay=None,
        told=told,
    )


STATE = {
    "sampler": {}, "rounds": 3, "parity": 0.0, "init_kl_coef": 0.1, "kl_controller": {"value": 0.07}, "calculator": {},
    "ema": None,
}  # fmt: skip


def test_the_controller_goes_on_unless_the_command_names_another_coefficient():
    same, other = resuming_trainer(0.1), resuming_trainer(0.5)
    VLTrainer.load_state_dict(same, STATE)
    VLTrainer.load_state_dict(other, STATE)
    assert same.maker.kl_controller.value == 0.07 and not same.told
    assert other.maker.kl_controller.value == 0.5 and "init_kl_coef was 0.1" in other.told[0]


def test_an_average_that_begins_with_the_resume_begins_at_the_resumed_weights():
    trainer = resuming_trainer(0.1)
    VLTrainer.load_state_dict(trainer, STATE)
    assert trainer.parts.ema.copies[0].tolist() == [1.0]


def test_a_budget_of_tokens_holds_a_prompt_with_its_image():
    config = RunConfig()
    config.rollout.prompt_max_len, config.rollout.generate_max_len = 256, 32
    check_budget(config, 576)  # no budget
    config.train.packing_samples, config.train.max_tokens_per_batch = True, 288
    config.check()
    check_budget(config, 0)
    with pytest.raises(ConfigError, match="max_tokens_per_batch 288 .* 576 tokens of an image = 832"):
        check_budget(config, 576)


def probed_steps(steps: int, ahead: bool) -> list[int]:
    """After which of the first steps of a run the engine's new weights are probed."""
    found: list[int] = []

    def nothing() -> None:
        pass

    trainer = SimpleNamespace(
        config=RunConfig(),
        parts=SimpleNamespace(following=None, evaluation=None),
        maker=SimpleNamespace(
            engine=SimpleNamespace(wake=nothing), settings=SimpleNamespace(sampling=SamplingSettings())
        ),
        ahead=object() if ahead else None,
        synced=False,
        _offload=nothing,
        _load_engine_weights=nothing,
        _policy_is_new=nothing,
        _check_parity=lambda: found.append(trainer.step),
    )
    for trainer.step in range(1, steps + 1):
        VLTrainer.sync(trainer)
    return found


def test_the_first_weights_are_probed_where_no_rollout_would_show_them():
    """Rollouts ahead are of a policy that is gone when they are trained on: nothing can be compared with them."""
    assert probed_steps(51, ahead=False) == [50]
    assert probed_steps(51, ahead=True) == [1, 50]
