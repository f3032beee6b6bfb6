"""The one training loop, for models that see and models that draw.

A step: `data = collect()`, `learn(data)`, `sync()`. What differs between kinds of models is in the hooks below; what a
step writes, evaluates, saves and survives is here.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config.shared import GuardConfig
from ..config.vl import OutputConfig, TrainConfig
from ..errors import ConfigError, NonFiniteError, RewardError, StoppedBySignal
from ..guard.gains import Look
from ..guard.watch import Alarm, Guard
from ..observe.console import RunConsole
from ..observe.metrics import MetricsAccumulator
from ..observe.recorder import RunRecorder
from ..observe.rollouts import Record
from ..report.writer import ReportWriter
from ..strategy import watchdog
from ..strategy.deepspeed import StepResult
from ..strategy.phase_timer import PhaseTimer
from ..strategy.start_up import say
from .run_state import RunState, final_folder

logger = logging.getLogger(__name__)

MOST_NONFINITE = 3  # skipped steps in a row that end a run


@dataclass
class LoopSettings:
    """What the loop reads of a configuration. total_steps counts rollout steps; resume_folder: of `check_output`;
    model: what is trained, as a `fingerprint`."""

    total_steps: int
    output: OutputConfig
    train: TrainConfig
    resume_folder: Path | None = None
    model: dict[str, Any] | None = None
    guard: GuardConfig = field(default_factory=GuardConfig)


@dataclass
class StepData:
    """One step on this rank, from `collect` to `learn` and the outputs.

    batches: what is trained on, in micro-batches. metrics: of this step; every stage adds its own, and the loop reduces
    them over ranks. records: of the rollouts that people are shown; look: reward and gold of each group, where gold
    scored them; both the same on every rank.
    """

    batches: list[Any]
    metrics: MetricsAccumulator = field(default_factory=MetricsAccumulator)
    records: list[Record] = field(default_factory=list)
    look: Look | None = None


class Evaluated(NamedTuple):
    """An evaluation's metrics and the records of the rollouts to show, both may be empty; reward and gold of each
    prompt where there is gold; of models that see and draw, the records of a sheet of drawings. The same on every
    rank."""

    metrics: dict[str, float]
    records: list[Record]
    look: Look | None = None
    drawings: Sequence[Record] = ()


@contextmanager
def start_up_objects_aside() -> Iterator[None]:
    """Python's garbage collector leaves alone what exists now: libraries and models, millions of objects that stay.

    Walking through them takes a tenth of a second or two, every few steps, in the middle of whatever runs just then.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class PolicyTrainer(ABC):
    """`fit` runs the loop; a subclass says how experience is made, trained on, synchronised and evaluated."""

    def __init__(self, settings: LoopSettings, recorder: RunRecorder, console: RunConsole, timer: PhaseTimer):
        self.settings, self.recorder, self.console, self.timer = settings, recorder, console, timer
        self.report = ReportWriter(recorder.folder, active=recorder.active and settings.output.report)
        self.step = 0  # finished rollout steps
        self.nonfinite_in_a_row = 0
        self.latest_eval: dict[str, float] = {}
        self.evaluated_step = -1
        self.guard = Guard(settings.guard)
        self.alarmed: Alarm | None = None  # the last alarm of a policy that ends the run
        self.most_invalid = 1.0  # share of a step's samples above which the run ends; all of them always end it
        self.state = RunState(self, settings.output, settings.resume_folder)
        watchdog.follow(timer)

    # -- hooks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Before the first step: bring the engine to the trainer's weights and check that they agree."""

    @abstractmethod
    def collect(self) -> StepData:
        """This step's rollouts, scored and turned into experience."""

    @abstractmethod
    def learn(self, data: StepData) -> None:
        """Train on a step's data, which it uses up: `data.batches` is empty afterwards. Adds to `data.metrics`."""

    @abstractmethod
    def sync(self) -> None:
        """Bring the new weights to the engine and check that they agree."""

    @abstractmethod
    def evaluate(self) -> Evaluated:
        """The fixed evaluation of the present weights; empty where there is no evaluation data."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain state for exact resume, weights and optimizers aside."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""

    @abstractmethod
    def save_engines(self, folder: Path) -> None:
        """Weights and optimizer states of this rank into `folder`; every rank calls it."""

    @abstractmethod
    def load_engines(self, folder: Path) -> None:
        """The inverse of `save_engines`."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """The trained model for other programs into `folder`; every rank calls it, rank 0 writes."""

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last evaluation's metrics.

        Raises NonFiniteError after too many skipped steps in a row, and whatever a stage raises; what was written
        until then stays. Meanwhile SIGTERM, in the main thread, asks for a checkpoint and an orderly end.
        """
        try:
            with self.state.listening():
                return self._run()
        finally:
            self.console.close()
            self.report.write()
            self.recorder.close()

    def _run(self) -> dict[str, float]:
        self.state.resume()
        with self.timer.phase("sync"):
            self.start()
        if self.step == 0:
            self._evaluate()
        say(f"training from step {self.step + 1}")
        self.timer.collect()
        with start_up_objects_aside():
            finished = self._steps()
        if finished:
            with self.timer.phase("save"):
                self.state.save_final(final_folder(self.settings.output))
        return self.latest_eval

    def _steps(self) -> bool:
        """Whether the model is to be exported: all steps were made, or the guard went back to the best ones. A signal
        and the guard's `stop` end them earlier, with a checkpoint."""
        while self.step < self.settings.total_steps:
            self.state.mark()
            done = self.step
            try:
                self._one_step()
            except StoppedBySignal as error:  # by scoring, on all ranks alike: in `collect` or in an evaluation
                return self._stop(str(error), rewound=self.step == done)
            if self.alarmed is not None:
                return self._end_by_guard(self.alarmed)
            if self.step < self.settings.total_steps and self.state.stop_requested():
                return self._stop()
        return True

    def _stop(self, why: str = "", rewound: bool = False) -> bool:
        with self.timer.phase("save"):
            self.state.stop(rewound)
        said = f"stopped by signal at step {self.step}; a checkpoint is saved"
        self.console.message(f"{why}\n{said}" if why else said)
        return False

    def _end_by_guard(self, alarm: Alarm) -> bool:
        """By `guard.policy`: a checkpoint, or back to the best one. True where the model is to be exported."""
        if self.settings.guard.policy == "stop":
            with self.timer.phase("save"):
                self.state.save()
            self.console.message(f"stopped by the guard at step {self.step} ({alarm.signal}); a checkpoint is saved")
            return False
        at = self.step
        with self.timer.phase("save"):
            self.state.roll_back()
        self.console.message(
            f"the guard ({alarm.signal}, step {at}) went back to the best gold: step {self.step}, "
            f"eval_gold {self.latest_eval['eval_gold']:.3g}"
        )
        return True

    def _one_step(self) -> None:
        data = self.collect()
        with self.timer.phase("train"):
            self.learn(data)
        metrics = data.metrics.reduce()
        self._check_valid(metrics)
        self.step += 1
        with self.timer.phase("sync"):
            self.sync()
        self._report(data, metrics | self.timer.reduce())
        output, last = self.settings.output, self.step == self.settings.total_steps
        if self.evaluation_due():
            self._evaluate()
        if output.save_steps > 0 and (last or self.step % output.save_steps == 0):
            self._save()  # the last step as well: a finished run can be given more steps

    def _save(self) -> None:
        with self.timer.phase("save"):
            self.state.save()

    def _check_valid(self, metrics: Mapping[str, float]) -> None:
        """Raise RewardError for a step of invalid samples alone, which trained nothing, or of more than are allowed."""
        share = metrics.get("reward_invalid_share", 0.0)
        if share < 1 and share <= self.most_invalid:
            return
        allowed = f" (reward_max_invalid is {self.most_invalid:.0%})" if share < 1 else ", so there is nothing to learn"
        stale = metrics.get("dropped_stale_share", 0.0)
        why = f"{stale:.0%} are older than max_staleness" if stale else "the reward has no score for them"
        raise RewardError(f"step {self.step + 1}: {share:.0%} of the samples are invalid{allowed}: {why}")

    def _report(self, data: StepData, metrics: Mapping[str, float]) -> None:
        self.recorder.log_step(self.step, metrics)
        self.console.step(self.step, metrics)
        self.report.after_step(self.step)
        if self.settings.output.save_trajectories:
            self.recorder.save_rollouts(self.step, data.records)
            self.console.samples(self.step, data.records)
        self._keep_look("step", data.look)
        self._tell(self.guard.after_step(self.step, metrics, data.look))

    def _evaluate(self) -> None:
        with self.timer.phase("eval"):
            self.latest_eval, records, look, _ = self.evaluate()
            self.evaluated_step = self.step
        self.state.check_metrics(self.latest_eval)
        if not self.latest_eval:
            return
        self.recorder.save_eval_rollouts(self.step, records)
        self.recorder.log_eval(self.step, self.latest_eval)
        self.console.evaluation(self.step, self.latest_eval)
        self._keep_look("evaluation", look)
        alarms = self.guard.after_evaluation(self.step, self.latest_eval, look)
        if self.settings.guard.keeps_best:
            self._keep_best()
        self._tell(alarms)
        if self.step < self.settings.total_steps:  # at the last step `fit` writes it, as the run ends
            self.report.write()
        self.timer.collect()

    def _keep_best(self) -> None:
        """A checkpoint of these weights where no evaluation before had more gold. ConfigError where there is none."""
        if self.guard.best is None:
            raise ConfigError(
                "guard.keep_best (and policy rollback) keeps the checkpoint of the best eval_gold, and this evaluation "
                f"has none ({', '.join(self.latest_eval)}): name a judge by --gold_recipe or --gold_fn"
            )
        if self.guard.best[1] == self.step:
            with self.timer.phase("save"):
                self.state.save_best()

    def _keep_look(self, kind: str, look: Look | None) -> None:
        if look is not None:
            self.recorder.log_look(self.step, {"kind": kind, **asdict(look)})

    def _tell(self, alarms: list[Alarm]) -> None:
        """Warn; by policy the run ends after this step."""
        for alarm in alarms:
            self.recorder.log_alarm(alarm.step, alarm.record())
            self.console.message(f"guard, step {alarm.step}: {alarm.text}")
            if self.settings.guard.policy != "warn":
                self.alarmed = alarm
        if alarms:
            self.report.write()

    # -- shared by the subclasses --------------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Whether the weights of the present step are evaluated."""
        every = self.settings.output.eval_steps
        return self.step == self.settings.total_steps or (every > 0 and self.step % every == 0)

    def _gold_due(self) -> bool:
        """Whether the rollouts of the step in progress are scored by gold."""
        every = self.settings.guard.gold_every
        return every > 0 and self.step % every == 0

    def count_step(self, result: StepResult, metrics: MetricsAccumulator, prefix: str = "") -> None:
        """Record an optimizer step in `metrics`; a skipped one is counted, said, and too many in a row end the run."""
        metrics.add(f"{prefix}learning_rate", result.learning_rate)
        metrics.add_max(f"{prefix}skipped_steps", 0.0 if result.applied else 1.0)
        if result.applied:
            metrics.add(f"{prefix}grad_norm", result.grad_norm)
            self.nonfinite_in_a_row = 0
            return
        self.nonfinite_in_a_row += 1
        text = (
            f"step {self.step + 1}: loss or gradients not finite, no rank stepped ({self.nonfinite_in_a_row} in a row)"
        )
        self.console.message(text)
        if self.nonfinite_in_a_row >= MOST_NONFINITE:
            raise NonFiniteError(text)
