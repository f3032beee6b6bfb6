"""A run that is killed in its second step, when it comes to a place between rollout and checkpoint."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.launch import run_diffusion, run_vl

# In the order of a step. Two of them are met several times a step: there the kill comes in the midst of it.
ENDING = {
    "metrics written": ("observe.recorder:RunRecorder.log_step", "after"),
    "about to save": ("trainer.run_state:RunState.save", "before"),
}
READING = {
    "rollouts sampled": ("rewards.engine:RewardComputationEngine.score_rollouts", "before"),
    "rewards computed": ("rewards.engine:RewardComputationEngine.score_rollouts", "after"),
    "log-probs computed": ("trainer.fast_exp_maker:assign_advantages", "before"),
    "advantages computed": ("trainer.fast_exp_maker:assign_advantages", "after"),
    "buffer partly filled": ("replay.buffer:NaiveReplayBuffer.append", "after"),
    "buffer filled": ("replay.buffer:NaiveReplayBuffer.plan", "before"),
    "first of two updates done": ("trainer.vl.updates:PolicyUpdate.step", "after"),
    "all updates done": ("trainer.vl.trainer:VLTrainer.learn", "after"),
    "weights synchronised": ("trainer.vl.trainer:VLTrainer.sync", "after"),
    **ENDING,
}
DRAWING = {
    "pictures drawn": ("trainer.diffusion.maker:DiffusersEngine.generate", "after"),
    "rewards computed": ("rewards.engine:RewardComputationEngine.score_media", "after"),
    "advantages computed": ("trainer.diffusion.maker:DiffusionExperienceMaker._advantages", "after"),
    "buffer partly filled": ("replay.buffer:NaiveReplayBuffer.append", "after"),
    "buffer filled": ("replay.buffer:NaiveReplayBuffer.plan", "before"),
    "first of two updates done": ("trainer.diffusion.trainer:DiffusionTrainer._finish_update", "after"),
    "all updates done": ("trainer.diffusion.trainer:DiffusionTrainer.learn", "after"),
    "old policy moved": ("trainer.diffusion.trainer:DiffusionTrainer.sync", "after"),
    **ENDING,
}
CALLS_A_STEP = {"buffer partly filled": 2, "first of two updates done": 2}


def kill_at(place: str, target: str, moment: str) -> None:
    """Replace the function of the place by one that ends this process at its second step's (first) call."""
    module_name, _, path = target.partition(":")
    owner = importlib.import_module(f"lightrft_visual.{module_name}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, left = getattr(owner, name), [CALLS_A_STEP.get(place, 1) + 1]

    @functools.wraps(original)
    def dying(*args, **kwargs):
        left[0] -= 1
        if moment == "before" and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def main(draws: bool, place: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """One run in this process, its output into the file `log`; the process ends here.

    draws: a diffusion run with no preset. place: of `DRAWING` or `READING`, or none.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    sys.argv = ["killed_run.py", *arguments]
    config = config_or_exit(DiffusionRunConfig, preset=None) if draws else config_or_exit(RunConfig)
    places = DRAWING if draws else READING
    if place in places:
        kill_at(place, *places[place])
    (run_diffusion if draws else run_vl)(config)
    sys.stdout.flush()
    os._exit(0)
