"""What trainers of vision-language models evaluate, and what they take from a checkpoint."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightrft_visual.algorithms.kl import get_kl_controller
from lightrft_visual.config.vl import AlgorithmConfig, RunConfig
from lightrft_visual.data.validation import Fetched
from lightrft_visual.errors import CheckpointError
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, collate
from lightrft_visual.models.weight_copies import WeightAverage
from lightrft_visual.rollout.engine import RolloutEngine
from lightrft_visual.runtime.train_engine import TrainEngine
from lightrft_visual.trainer.features.ema import EmaHook
from lightrft_visual.trainer.hooks import Hooks
from lightrft_visual.trainer.vl import parts
from lightrft_visual.trainer.vl.sft import HeldOutLoss
from lightrft_visual.trainer.vl.trainer import VLTrainer


@pytest.mark.parametrize("shares_weights", [True, False])
def test_either_engine_samples_from_the_average(shares_weights):
    weight, held, used = nn.Parameter(torch.zeros(1)), [1.0], []
    hooks = Hooks([EmaHook(WeightAverage([weight], 0.9), lent=True)])
    weight.data.fill_(1.0)  # the average is 0

    def load(lent: bool = False) -> None:
        held.append(weight.item())
        used.append(lent)

    trainer = SimpleNamespace(
        hooks=hooks, maker=SimpleNamespace(engine=SimpleNamespace(shares_weights=shares_weights)),
        actor=SimpleNamespace(bring_back=lambda: used.append("brought back")), _load_engine_weights=load,
    )  # fmt: skip
    with VLTrainer.evaluated_weights(trainer):
        assert (weight.item() if shares_weights else held[-1]) == 0.0
    assert weight.item() == 1.0 and held[-1] == 1.0
    assert used == ["brought back", True, False]  # weights that are lent to the average are not sent away


@pytest.mark.parametrize("coefficient, goes_on", [(0.1, 0.07), (0.5, 0.5)])
def test_the_controller_goes_on_unless_the_command_names_another_coefficient(coefficient, goes_on):
    algorithm, told, loaded = AlgorithmConfig(init_kl_coef=coefficient, kl_target=0.1), [], []
    state = {"rounds": 3, "parity": 0.5, "init_kl_coef": 0.1, "kl_controller": {"value": 0.07}, "calculator": {}}
    stateful = SimpleNamespace(load_state_dict=loaded.append)
    trainer = SimpleNamespace(
        config=RunConfig(algorithm=algorithm), prompts=stateful, agreement=SimpleNamespace(difference=0.0),
        maker=SimpleNamespace(kl_controller=get_kl_controller(algorithm), calculator=stateful),
        console=SimpleNamespace(message=told.append),
    )  # fmt: skip
    VLTrainer.load_state_dict(trainer, state)
    assert trainer.maker.kl_controller.value == goes_on and trainer.agreement.difference == 0.5
    assert any(each is state for each in loaded) and {} in loaded
    assert told == [] if coefficient == 0.1 else "init_kl_coef was 0.1" in told[0]


class Counts:
    """An estimator with a state that it changes in place, and a source of prompts with none."""

    def __init__(self):
        self.seen = [1]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def trainer_with(calculator) -> SimpleNamespace:
    """As much of a trainer as its state takes."""
    prompts = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    maker = SimpleNamespace(kl_controller=get_kl_controller(AlgorithmConfig()), calculator=calculator)
    config = RunConfig(algorithm=AlgorithmConfig(advantage_estimator="rloo"))
    return SimpleNamespace(config=config, prompts=prompts, agreement=SimpleNamespace(difference=0.0), maker=maker)


def test_the_state_of_an_estimator_that_was_taken_stays_while_it_goes_on():
    counts = Counts()
    taken = VLTrainer.state_dict(trainer_with(counts))
    counts.seen.append(2)
    assert taken["calculator"] == {"seen": [1]}


def test_a_key_that_an_estimator_misses_in_its_state_is_told_by_its_name():
    state = VLTrainer.state_dict(trainer_with(Counts())) | {"calculator": {"other": 1}}
    with pytest.raises(CheckpointError, match="load_state_dict of estimator rloo asks for 'seen'.* holds other"):
        VLTrainer.load_state_dict(trainer_with(Counts()), state)


class ReadsAfterTheEnd(RolloutEngine):
    """An engine that copies weights only when all of them were named, as vLLM does with a padded vocabulary.

    gone: names of tensors whose memory was given back before they were read. Reading them would end the process.
    """

    def __init__(self):
        self.gone: list[str] = []

    def update_weights(self, named_tensors) -> None:
        self.held = {name: tensor.clone() for name, tensor in list(named_tensors) if not self.left(name, tensor)}

    def left(self, name: str, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage().nbytes() == 0:
            self.gone.append(name)
        return name in self.gone


def trainer_that_offloads(engine) -> VLTrainer:
    """As much of a trainer as giving the engine its weights takes."""
    actor = nn.Module()
    actor.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    trainer = VLTrainer.__new__(VLTrainer)
    trainer.config = RunConfig()
    trainer.config.rollout.offload_trainer = True
    trainer.actor = TrainEngine(SimpleNamespace(module=actor), zero_stage=1, max_norm=1.0)
    trainer.step, trainer.prompts = 0, SimpleNamespace(runs_ahead=False)
    trainer.maker = SimpleNamespace(engine=engine, policy_is_new=lambda version: None)
    return trainer


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_weights_and_adapters_that_a_hook_lends_are_exported_of_an_actor_that_is_away(monkeypatch):
    """As after the last evaluation of a run without checkpoints, or of one that is resumed behind its last step."""
    trainer = trainer_that_offloads(ReadsAfterTheEnd())
    trainer.actor.module.model.register_parameter("lora_A", nn.Parameter(torch.ones(2, 3)))
    trainer.config.model.lora_rank = 2
    average = WeightAverage(trainer.actor.module.parameters(), decay=0.5)
    average.copies = [torch.full_like(each, 2.0) for each in average.copies]
    trainer.actor.module.transformer, exported = None, []
    trainer.parts = SimpleNamespace(
        actor=trainer.actor, config=trainer.config, checkpoint=SimpleNamespace(processor=None, tokenizer=None),
        hooks=SimpleNamespace(weights_for=lambda purpose: average.swapped()),
    )  # fmt: skip
    monkeypatch.setattr(parts, "export_lora", lambda model, folder, state: exported.append(state))
    monkeypatch.setattr(parts, "export_hf", lambda model, tokenizer, folder, state: exported.append(state))
    trainer._load_engine_weights()
    trainer.export(Path())
    assert [*exported[0]] == ["lora_A"] and len(exported[1]) >= 4
    assert all((weight == 2).all() for state in exported for weight in state.values())


def test_weights_that_a_probe_has_read_leave_before_the_next_generation():
    trainer = trainer_that_offloads(ReadsAfterTheEnd())
    trainer.maker.engine.wake, trainer.critic, trainer.parts = (lambda: None), None, SimpleNamespace(evaluation=None)
    trainer.actor.offload = lambda: None
    trainer.maker.settings = SimpleNamespace(sampling=SimpleNamespace(full_distribution=True))
    model, seen = trainer.actor.module.model, []
    trainer.agreement = SimpleNamespace(
        after_sync=lambda *given: seen.extend([bytes_of(model), bytes_of(trainer.actor.module.model)])
    )
    trainer.sync()
    assert seen[0] == 0 < seen[1] and bytes_of(model) == 0


class Sleeps(RolloutEngine):
    """What an engine on the accelerator is told, and the saving and moving of states in between."""

    def __init__(self):
        self.told: list[str] = []

    def sleep(self, keep_weights: bool) -> None:
        self.told.append("sleep")
        self.lacks_weights = not keep_weights

    def wake(self) -> None:
        self.told.append("wake")

    def update_weights(self, named_tensors) -> None:
        self.told.append(f"{len(list(named_tensors))} weights")
        self.lacks_weights = False


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_states_are_on_the_device_for_a_checkpoint_only_while_the_engine_sleeps(monkeypatch, offloads, fails):
    def save(folder: str, name: str) -> None:
        told.append("save")
        if fails:
            raise CheckpointError("full")

    trainer = trainer_that_offloads(Sleeps())
    trainer.config.rollout.offload_trainer, told, trainer.critic = offloads, trainer.maker.engine.told, None
    monkeypatch.setattr(trainer.actor, "save", save)
    monkeypatch.setattr(trainer.actor, "offload", lambda: told.append("states leave"))
    with pytest.raises(CheckpointError) if fails else nullcontext():
        trainer.save_engines(Path())
    assert told == (["sleep", "save", "states leave", "wake", "4 weights"] if offloads else ["save"])


@pytest.mark.parametrize("shares_weights,lent", [(False, False), (True, False), (False, True)])
def test_an_offloaded_actor_leaves_after_the_engine_has_read_all_of_its_weights_unless_they_are_used(
    shares_weights, lent
):
    trainer = trainer_that_offloads(ReadsAfterTheEnd())
    engine, model = trainer.maker.engine, trainer.actor.module.model
    engine.shares_weights = shares_weights
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer._load_engine_weights(lent=lent)
    assert engine.gone == [] and (bytes_of(model) > 0) == (shares_weights or lent)
    if not shares_weights:
        assert list(engine.held) == list(weights)
        assert all(torch.equal(engine.held[name], weight) for name, weight in weights.items())


def test_a_held_out_row_that_is_gone_counts_for_nothing_and_is_counted():
    """Each row's response is its number of tokens, each of which has its number as its loss; row 1 is gone."""
    responses, seen = {0: 1, 1: 9, 2: 3}, []

    def encoded(batch):
        seen.append([*batch])
        prompt = PromptFeatures("p", [1], group_id=0)
        return collate([Rollout(prompt, [n] * n, None, "", False, n) for n in batch], 0, vision=False)

    def actor(inputs, rule, with_entropy):
        count = inputs.action_mask.shape[1]
        return SimpleNamespace(log_probs=-inputs.sequences[:, -count:].float() * inputs.action_mask)

    actor.engine = SimpleNamespace(device="cpu")
    encoder = SimpleNamespace(batch=lambda rows, ids: rows, experience=encoded)
    found = Fetched([0, 2, 2], [False, True, False], {2: 3}, lost=1)
    dataset = type("Rows", (list,), {"load": lambda rows, index: responses[index]})(range(3))
    samples = SimpleNamespace(dataset=dataset, remote={1, 2}, fetch=lambda indices, step: found)
    evaluated = HeldOutLoss(samples, encoder, actor, 2).run(step=4)
    assert seen == [[1, 3], [3]]
    assert evaluated == {"eval_loss": pytest.approx((1 * 1 + 3 * 3) / 4), "eval_bad_rows": 1.0}
