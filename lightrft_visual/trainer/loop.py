"""The one training loop, for models that see and models that draw.

A step is `train_step`, then `sync`; what a step writes, evaluates, saves and survives is here. `vl/trainer.py` and
`diffusion/trainer.py` say what the two are for a kind of model. Features follow by hooks (`hooks.py`).
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ..config.shared import OutputConfig
from ..errors import CheckpointError, NonFiniteError, RewardError, StoppedBySignal, TooManyInvalid
from ..observe.console import RunConsole
from ..observe.environment import FAILED, FINISHED, STOPPED
from ..observe.metrics import MetricsAccumulator
from ..observe.recorder import Record, RunRecorder
from ..observe.report.page import ReportWriter
from ..runtime import collectives, watchdog
from ..runtime.checkpoint.behind import collectives_first
from ..runtime.phase_timer import PhaseTimer
from ..runtime.start_up import log_stage, start_is_over
from ..runtime.train_engine import StepResult, TrainEngine
from ..runtime.usercode.calls import masked, what_happened
from .hooks import HookContext, Hooks, StepData, StopRun
from .run_state import RunState, final_folder

MOST_NONFINITE = 3  # skipped steps in a row that end a run

__all__ = ["Evaluated", "LoopSettings", "PolicyTrainer", "RunParts", "StepData"]


@dataclass
class LoopSettings:
    """What the loop reads of a configuration. total_steps counts rollout steps; resume_folder: of `check_output`;
    model: what is trained, as a `fingerprint`; step_size: prompts, rows or pairs of a step, as they would be on
    one rank; taken_over: is called once nothing of the checkpoint was refused."""

    total_steps: int
    output: OutputConfig
    resume_folder: Path | None = None
    model: dict[str, Any] | None = None
    step_size: int = 0
    taken_over: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class RunParts:
    """What runs of all kinds are made of; a kind adds its own, among them the configuration and an evaluation."""

    loop: LoopSettings
    recorder: RunRecorder
    timer: PhaseTimer
    hooks: Hooks
    console: RunConsole = field(init=False)

    def __post_init__(self) -> None:
        self.console = RunConsole(self.loop.total_steps, line_every=self.loop.output.logging_steps)

    def closed_behind(self) -> tuple[Any, ...]:
        """What a trainer closes after its hooks and engines, in this order."""
        return ()


class Evaluated(dict[str, float]):
    """An evaluation's metrics by name, the same on every rank; empty where there is no evaluation data.

    records: of rollouts to show. sheet: records of a contact sheet. Media of both are on rank 0. paired_scores: reward
    and gold of each prompt, where there is gold.
    """

    def __init__(
        self,
        metrics: Mapping[str, float] | None = None,
        records: Sequence[Record] = (),
        sheet: Sequence[Record] = (),
        paired_scores: Any = None,
    ) -> None:
        super().__init__(metrics or {})
        self.records, self.sheet, self.paired_scores = list(records), list(sheet), paired_scores


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
    """`fit` runs the loop; a subclass says what a step is, and how it is synchronised and evaluated.

    parts: of `VLParts` or `DiffusionParts`. callbacks: hooks of a user, after those of the configuration.
    """

    def __init__(self, parts: Any, callbacks: Sequence[Any] = ()):
        self.parts, self.config = parts, parts.config
        self.settings, self.recorder = parts.loop, parts.recorder
        self.console, self.timer, self.hooks = parts.console, parts.timer, parts.hooks
        self.report = ReportWriter(self.recorder.folder, active=self.recorder.active and self.settings.output.report)
        self.save_every, self.eval_every = self.settings.output.intervals(self.settings.total_steps)
        self.step = 0  # finished rollout steps
        self.nonfinite_streaks: dict[str, int] = {}  # skipped steps in a row, by the prefix of their metrics
        self.update_counts = {True: 0, False: 0}  # of the policy in this process: applied, and skipped
        self.latest_eval: dict[str, float] = {}
        self.evaluated_step = -1
        self.first_eval: dict[str, float] = {}
        self.most_invalid = 1.0  # share of a step's samples above which the run ends; all of them always end it
        self.state = RunState(self, self.settings.output, self.settings.resume_folder)
        self.hooks.build(parts, callbacks)
        self._hook_context = HookContext(
            parts, partial(getattr, self, "step"), self.settings.total_steps, self.state, self.recorder, self.console,
            self.timer, self.report,
        )  # fmt: skip
        with ExitStack() as unused:
            unused.callback(self._hook_context.close)  # hooks of users outlive a run that does not start
            self.hooks.setup(self._hook_context)
            unused.pop_all()
        watchdog.follow(self.timer)

    # -- what a kind of model adds -------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Before the first step: bring the engine to the trainer's weights and check that they agree."""

    @abstractmethod
    def train_step(self) -> StepData:
        """One step, from prompts to the optimizer. What it returns is reported."""

    @abstractmethod
    def sync(self) -> None:
        """Bring the new weights to the engine and check that they agree."""

    def evaluate(self) -> Evaluated:
        """The fixed evaluation of the present weights, or of those that hooks lend; empty where nothing is held out."""
        if self.parts.evaluation is None:
            return Evaluated()
        if self.step == 0:
            log_stage("evaluating the model as it is")
        with self.evaluated_weights():
            return self.parts.evaluation.run(self.step)

    def evaluated_weights(self) -> AbstractContextManager[Any]:
        """What is evaluated inside: the weights that hooks lend, or the model's own."""
        return self.hooks.weights_for("evaluation") or nullcontext()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain state for exact resume; weights, optimizers and hooks aside."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""

    def close(self) -> None:
        """Release what hooks, engines and scorers hold; call it after `fit`, before the process group ends."""
        with ExitStack() as behind:
            for each in reversed(self.parts.closed_behind()):
                behind.callback(each.close)
            for engine in self.engines().values():
                behind.callback(engine.close)
            behind.callback(self._hook_context.close)
            self.hooks.close()

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `load_state_dict` takes on this rank, of the states of another number of ranks. Where all ranks save the
        same, it is that."""
        return states[0]

    @abstractmethod
    def engines(self) -> dict[str, TrainEngine]:
        """What trains, by the name of its part of a checkpoint."""

    def save_engines(self, folder: Path) -> None:
        """Weights and optimizer states of this rank into `folder`; every rank calls it."""
        with collectives_first():
            for name, engine in self.engines().items():
                engine.save(str(folder), name)

    def load_engines(self, folder: Path, saved_ranks: int | None = None) -> None:
        """The inverse of `save_engines`. saved_ranks: how many ranks saved, where they were not as many."""
        for name, engine in self.engines().items():
            engine.load(str(folder), name, saved_ranks)

    @abstractmethod
    def export(self, folder: Path) -> None:
        """The trained model for other programs into `folder`; every rank calls it, rank 0 writes."""

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last evaluation's metrics.

        Raises NonFiniteError after too many skipped steps in a row, or where all were, and whatever a stage raises;
        what was written until then stays. Meanwhile SIGTERM, in the main thread, asks for a checkpoint and an orderly
        end.
        """
        export: bool | None = None  # whether the model is written; None while steps are to be made
        self.ending, ended_well = (FINISHED, ""), False
        try:
            with self.state.listening():
                self._begin()
                with start_up_objects_aside():
                    while export is None and self.hooks.stopping is None and self.step < self.settings.total_steps:
                        done = self.step
                        if self.state.stop_requested():  # by a signal; the last step ends it anyway
                            export = self._stop()
                            break
                        self.state.mark()
                        try:
                            self._finish_step(self.train_step())
                        except StoppedBySignal as error:  # by scoring, on all ranks alike
                            export = self._stop(str(error), rewound=self.step == done)
                        except TooManyInvalid:  # of a server that is down, on all ranks alike
                            self._keep(rewound=self.step == done)
                            raise
                        except StopRun as stop:  # before the step has trained
                            export = self._end(stop, rewound=True)
                if export is None:
                    self._check_trained()
                    export = True if self.hooks.stopping is None else self._end(self.hooks.stopping)
                if export:
                    with self.timer.phase("save"):
                        self.state.save_final(final_folder(self.settings.output))
            ended_well = True
            return self.latest_eval
        except BaseException as error:
            self.ending = FAILED, masked(what_happened(error)).removeprefix("raised ")
            raise
        finally:
            self.console.close()
            self.recorder.log_end(*self.ending)
            report = self.report.write()
            self.recorder.close(failed=not ended_well)
            if ended_well and export:
                files = {"report": report} if report else {}
                files["model"] = final_folder(self.settings.output)
                self.console.done(self.step, self.latest_eval, self.first_eval, files)

    def _check_trained(self) -> None:
        """Raise NonFiniteError where every update of a run was skipped. One that goes on has trained before."""
        applied, skipped = self.update_counts[True], self.update_counts[False]
        if skipped and not applied and self.state.resume_folder is None:
            raise NonFiniteError(
                f"nothing was trained: in all of {skipped} updates the loss or a gradient was not finite, so the model "
                "is as it was; metrics.csv and rollouts/ hold what they were made of"
            )

    def _begin(self) -> None:
        self.state.check_space(sum(engine.saved_bytes for engine in self.engines().values()))
        self.state.resume()
        with self.timer.phase("sync"):
            self.start()
        self.hooks.check_states()
        if self.evaluated_step != self.step and (self.step == 0 or self.evaluation_due()):
            if self.step > 0:
                log_stage("making the evaluation that this step lacks")
            self._evaluate()
            if self.step > 0 and self.save_every > 0:  # the checkpoint may be the best one, and lacks the metrics
                with self.timer.phase("save"):
                    self.state.save_due()
        device, total = get_accelerator().device_name(), self.settings.total_steps
        log_stage(f"training from step {self.step + 1} of {total} on {device}" if self.step < total else "ending")
        start_is_over()
        self.timer.collect()

    def _keep(self, rewound: bool) -> None:
        """Save what an error would cost, where there is a step. rewound: as of `RunState.stop`."""
        if self.step == 0:
            return
        try:
            with self.timer.phase("save"):
                self.state.keep(rewound)
            self.console.message(f"a checkpoint of step {self.step} is saved")
        except CheckpointError as error:  # on all ranks alike; it must not hide what ends the run
            self.console.message(f"no checkpoint of step {self.step} is saved: {error}")

    def _stop(self, why: str = "", rewound: bool = False) -> bool:
        with self.timer.phase("save"):
            self.state.stop(rewound)
        said = f"stopped by signal at step {self.step}; a checkpoint is saved"
        self.ending = STOPPED, said
        self.console.message(f"{why}\n{said}" if why else said)
        if self.console.output.lost is not None and not self.state.signalled():
            raise self.console.output.lost  # nobody has asked for the end
        return False

    def _end(self, stop: StopRun, rewound: bool = False) -> bool:
        """Whether the model is written. rewound: as of the last finished step."""
        with self.timer.phase("save"):
            said = stop.settle(self.state, rewound)
        self.ending = STOPPED, said
        self.console.message(said)
        return stop.export

    def _finish_step(self, data: StepData) -> None:
        """What follows on `train_step`: the engine's weights, what is written and shown, evaluation and checkpoint."""
        self.hooks.report(data.metrics)
        metrics = data.metrics.reduce()
        share = metrics.get("reward_invalid_share", 0.0)
        if share >= 1 or share > self.most_invalid:
            raise self._too_many_invalid(share, metrics.get("dropped_stale_share", 0.0))
        self.step += 1
        with self.timer.phase("sync"):
            self.hooks.on_sync()
            self.sync()
        metrics |= self.timer.reduce()
        self.recorder.log_step(self.step, metrics)
        self.console.step(self.step, metrics)
        if self.step >= self.report.next_step:
            self.report.write_due(self.step)
        if data.records:
            self.recorder.save_rollouts(self.step, data.records)
        self.console.samples(self.step, data.records + data.shown)
        self.hooks.on_metrics(metrics)
        last, every = self.step == self.settings.total_steps, self.save_every
        if self.evaluation_due() and (last or not self.state.stop_requested()):  # else it follows when the run goes on
            self._evaluate()
        if every > 0 and (last or self.step % every == 0):
            with self.timer.phase("save"):  # the last step as well: a finished run can be given more steps
                self.state.save_due()

    def _too_many_invalid(self, share: float, too_old: float) -> RewardError:
        """For a step of invalid samples alone, which trained nothing, or of more than are allowed."""
        allowed = f" (reward_max_invalid is {self.most_invalid:.0%})" if share < 1 else ", so there is nothing to learn"
        why = "the reward has no score for them, or they were left out, as a line before says"
        if too_old:
            why = f"{too_old:.0%} are older than max_staleness: raise it, or lower batches_ahead to it"
        return RewardError(f"step {self.step + 1}: {share:.0%} of the samples are invalid{allowed}: {why}")

    def _evaluate(self) -> None:
        with self.timer.phase("eval"):
            evaluated = self.evaluate()
        self.latest_eval, self.evaluated_step = dict(evaluated), self.step
        self.first_eval = self.first_eval or self.latest_eval
        self.state.check_metrics(evaluated)
        if not evaluated:
            return
        if evaluated.sheet:
            self.recorder.save_contact_sheet(self.step, evaluated.sheet)
        if evaluated.records:
            self.recorder.save_rollouts(self.step, evaluated.records, "eval_step")
        self.recorder.log_eval(self.step, self.latest_eval)
        self.console.evaluation(self.step, self.latest_eval)
        self.hooks.on_evaluation(evaluated)
        if self.step < self.settings.total_steps:  # at the last step `fit` writes it, as the run ends
            self.report.write_news(self.step)
        self.timer.collect()

    # -- shared by the subclasses --------------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Whether the weights of the present step are evaluated."""
        every = self.eval_every
        return self.step == self.settings.total_steps or (every > 0 and self.step % every == 0)

    def count_step(self, result: StepResult, metrics: MetricsAccumulator, prefix: str = "") -> None:
        """Record an optimizer step; a skipped one is counted, said, and too many in a row end the run.

        Args:
            result: of the step.
            metrics: what it is recorded in.
            prefix: of the metrics' names, '' for the policy's.
        """
        metrics.add(f"{prefix}learning_rate", result.learning_rate)
        metrics.add_total(f"{prefix}skipped_steps", float(not result.applied and collectives.is_rank_0()))
        if not prefix:
            self.update_counts[bool(result.applied)] += 1
        if result.applied:
            metrics.add(f"{prefix}grad_norm", result.grad_norm)
            self.nonfinite_streaks[prefix] = 0
            return
        self.nonfinite_streaks[prefix] = skipped = self.nonfinite_streaks.get(prefix, 0) + 1
        what = f"{prefix.replace('_', ' ')}loss or gradients"
        text = f"step {self.step + 1}: {what} not finite, no rank stepped ({skipped} in a row)"
        self.console.message(text)
        if skipped >= MOST_NONFINITE:
            raise NonFiniteError(text)
