"""A run that is killed in its second step, when it comes to a place between rollout and checkpoint."""

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.launch import run_script


@dataclass(frozen=True)
class Place:
    """Before or after a call of a function. call: which one of a step. rank_0: only that rank comes there, or decides
    what becomes of the save. saved: the step's checkpoint is complete by then."""

    target: str
    moment: str
    call: int = 1
    rank_0: bool = False
    saved: bool = False


STEP = "trainer.run_state:RunState.mark"  # the first thing in a step
# In the order of a step.
ENDING = {
    "metrics written": Place("observe.recorder:RunRecorder.log_step", "after"),
    "about to save": Place("trainer.run_state:RunState.save", "before"),
}
READING = {
    "rollouts sampled": Place("rewards.engine:RewardComputationEngine.score_rollouts", "before"),
    "rewards computed": Place("rewards.engine:RewardComputationEngine.score_rollouts", "after"),
    "log-probs computed": Place("trainer.vl.maker:assign_advantages", "before"),
    "advantages computed": Place("trainer.vl.maker:assign_advantages", "after"),
    "buffer partly filled": Place("experience.buffer:NaiveReplayBuffer.append", "after", call=2),
    "buffer filled": Place("experience.buffer:NaiveReplayBuffer.plan", "before"),
    "first of two updates done": Place("trainer.vl.updates:PolicyUpdate.step", "after", call=2),
    "all updates done": Place("experience.buffer:NaiveReplayBuffer.clear", "before"),
    "weights synchronised": Place("trainer.vl.trainer:VLTrainer.sync", "after"),
    **ENDING,
}
DRAWING = {
    "pictures drawn": Place("trainer.diffusion.maker:DiffusersEngine.generate", "after"),
    "rewards computed": Place("rewards.engine:RewardComputationEngine.score_media", "after"),
    "advantages computed": Place("trainer.diffusion.maker:DiffusionExperienceMaker._advantages", "after"),
    "buffer partly filled": Place("experience.buffer:NaiveReplayBuffer.append", "after", call=2),
    "buffer filled": Place("experience.buffer:NaiveReplayBuffer.plan", "before"),
    "first of two updates done": Place("trainer.diffusion.trainer:DiffusionTrainer._finish_update", "after", call=2),
    "all updates done": Place("trainer.diffusion.trainer:DiffusionTrainer._learn", "after"),
    "old policy moved": Place("trainer.diffusion.trainer:DiffusionTrainer.sync", "after"),
    **ENDING,
}
# For two ranks also inside of what takes its time, and inside a save, whose steps they make together.
LOGGED = {
    "evaluation written": Place("observe.recorder:RunRecorder.log_eval", "after"),
    "report being written": Place("observe.report.page:write_atomic", "before", rank_0=True),
}
SAVING = {
    "staging folder made": Place("runtime.checkpoint.manager:CheckpointManager._prepare", "after", rank_0=True),
    "state written": Place("trainer.run_state:RunState._write", "after"),
    # Where rank 1 dies there, rank 0 has all it needs and completes the checkpoint.
    "files hashed": Place("runtime.checkpoint.manager:CheckpointManager._describe", "after", rank_0=True),
    "manifest written": Place("runtime.checkpoint.manager:write_manifest", "after", rank_0=True),
    "folder renamed": Place("runtime.checkpoint.manager:write_atomic", "before", rank_0=True, saved=True),
    "saved": Place("trainer.run_state:RunState.save", "after", saved=True),
}
READING_TWO = {
    "generating": Place("rollout.hf:TransformersEngine.generate", "before"),
    **READING,
    "evaluating": Place("trainer.vl.evaluation:Evaluation.run", "before"),
    **LOGGED,
    **SAVING,
}
EPISODES_TWO = {
    "environments begun": Place("rollout.episodes:_Round._reset", "after"),
    "an action taken": Place("rollout.episodes:_Round._stepped", "after", call=3),
    "an observation read": Place("rollout.episodes:_Round._observed", "after"),
    **READING_TWO,
}
DRAWING_TWO = {
    "generating": Place("trainer.diffusion.maker:DiffusersEngine.generate", "before"),
    **DRAWING,
    "evaluating": Place("trainer.diffusion.evaluation:DiffusionEvaluation.run", "before"),
    **LOGGED,
    "weights written": Place("trainer.diffusion.trainer:DiffusionTrainer.save_engines", "after"),
    **SAVING,
}


def kill_at(place: Place, number: int = signal.SIGKILL) -> None:
    """Replace the function of the place by one that sends this process a signal in its second step."""
    steps = calls = 0

    def began() -> None:
        nonlocal steps
        steps += 1

    def reached() -> None:
        nonlocal calls
        calls += steps == 2
        if calls == place.call:
            os.kill(os.getpid(), number)

    around(STEP, "before", began)
    around(place.target, place.moment, reached)


def around(target: str, moment: str, action: Callable[[], None]) -> None:
    """Let every call of a function do something before or after it."""
    module_name, _, path = target.partition(":")
    owner = importlib.import_module(f"lightrft_visual.{module_name}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        if moment == "before":
            action()
        result = original(*args, **kwargs)
        if moment == "after":
            action()
        return result

    setattr(owner, name, wrapped)


def main(
    draws: bool, place: Place | None, arguments: list[str], environment: dict[str, str], log: str, number: int
) -> None:
    """One run in this process, its output into the file `log`; the process ends here.

    draws: a diffusion run with no preset. place: where to be signalled, or none. number: of the signal.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    sys.argv = ["killed_run.py", *arguments]
    config = config_or_exit(DiffusionRunConfig, preset=None) if draws else config_or_exit(RunConfig)
    if place is not None:
        kill_at(place, number)
    run_script(config)
    sys.stdout.flush()
    os._exit(0)
