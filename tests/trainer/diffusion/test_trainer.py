"""When hooks of a Reward FL run, whose step trains before they see it, may end it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.data.prompts import PromptRow
from lightrft_visual.errors import StoppedBySignal
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards.batch import RewardOutput
from lightrft_visual.trainer.diffusion.maker import Drawn
from lightrft_visual.trainer.diffusion.parts import DrawingSource
from lightrft_visual.trainer.diffusion.trainer import RewardFLTrainer
from lightrft_visual.trainer.hooks import Hooks, StopRun


class Update:
    """In the place of `RewardUpdate`: notes its steps, draws black images of one score."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, requests, context, step, epoch, metrics: MetricsAccumulator):
        self.steps += 1
        scored = RewardOutput(torch.ones(len(requests)), {}, torch.ones(len(requests)).bool())
        return None, Drawn(requests, [], torch.zeros(len(requests), 3, 4, 4), scored)


def reward_fl(hooks: Hooks, said: list[str]) -> SimpleNamespace:
    """As much of a trainer as a step of two updates takes."""
    sampling = SimpleNamespace(rollout_batch_size=2, n_samples_per_prompt=2)
    config = SimpleNamespace(sampling=sampling, train=SimpleNamespace(seed=1, train_batch_size=2, max_epochs=1))
    return SimpleNamespace(
        config=config, step=0, prompts=DrawingSource(config, [PromptRow("red", []), PromptRow("blue", [])]),
        timer=SimpleNamespace(phase=lambda name: nullcontext()), reward_update=Update(), hooks=hooks,
        _context=lambda: None, _finish_update=lambda result, metrics: None,
        console=SimpleNamespace(message=said.append),
    )  # fmt: skip


def ending(error: Exception):
    def ends(given):
        raise error

    return ends


@pytest.mark.parametrize("method", ["on_scores", "on_experience"])
def test_stop_run_of_a_reward_fl_step_waits_for_its_end_as_it_has_trained(method):
    seen: list[str] = []
    after = SimpleNamespace(**{method: lambda given: seen.append(method) or given})
    hooks = Hooks([SimpleNamespace(**{method: ending(StopRun("enough"))}), after])
    trainer = reward_fl(hooks, [])
    data = RewardFLTrainer.train_step(trainer)
    assert hooks.stopping.reason == "enough" and seen == [method] and trainer.reward_update.steps == 2
    assert len(data.rollouts) == 4 and data.metrics.reduce()["reward_mean"] == 1.0


@pytest.mark.parametrize("method", ["on_scores", "on_experience"])
def test_a_signal_that_ends_a_hook_of_a_reward_fl_step_leaves_the_step_to_be_finished(method):
    """The loop sees the signal itself behind the step, and saves it as a step that is done."""
    said: list[str] = []
    hooks = Hooks([SimpleNamespace(**{method: ending(StoppedBySignal("the judge did not return"))})])
    data = RewardFLTrainer.train_step(reward_fl(hooks, said))
    assert said == ["the judge did not return"] and hooks.stopping is None
    assert data.metrics.reduce()["reward_mean"] == 1.0
