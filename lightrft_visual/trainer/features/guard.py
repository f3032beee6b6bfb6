"""The guard of a run as a hook: statistics of rollouts, gold that training never sees, alarms and what follows them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...config.shared import GuardConfig
from ...observe.guard.divergence import PairedScores
from ...observe.guard.watch import Alarm, Guard
from ...observe.recorder import ALARMS, GOLD
from ..hooks import StepData, StepHook, StopRun
from ..run_state import RunState


class _BackToBest(StopRun):
    """The guard's `rollback`: the run ends at the checkpoint of the best gold, whose model is exported."""

    def settle(self, state: RunState, rewound: bool = False) -> str:
        """The checkpoint becomes the newest one, too."""
        state.roll_back()
        trainer = state.trainer
        return (
            f"{self.reason} went back to the best gold: step {trainer.step}, "
            f"eval_gold {trainer.latest_eval['eval_gold']:.3g}"
        )


class GuardHook(StepHook):
    """Feeds a `Guard` with each step and each evaluation, and tells its alarms. What it looks at in a kind of run, the
    run's parts say.

    gold: whether there is a judge; then every `gold_every` steps it scores the rollouts. paying: components of the
    reward that raise it by rising.
    """

    name = "guard"

    def __init__(self, config: GuardConfig, gold: bool, paying: Sequence[str]) -> None:
        self.config, self.gold = config, gold
        self.guard = Guard(config)
        self.guard.paying = paying
        self.scores: Any = None
        self.paired_scores: PairedScores | None = None

    def on_scores(self, rollouts: Any) -> Any:
        """Gold comes before media are released."""
        due = self.gold and self.config.judges_rollouts and self.context.step() % self.config.gold_every == 0
        self.scores = self.paired_scores = None  # also where a signal ends the judge
        self.scores = self.context.parts.gold_of(rollouts) if due else None
        return rollouts

    def on_experience(self, step: StepData) -> StepData:
        """Statistics, and gold where it was asked."""
        self.paired_scores = None
        if self.config.watch:
            parts = self.context.parts
            parts.add_statistics(step)
            if self.scores is not None:
                self.paired_scores = parts.add_gold(step, self.scores, self.context.step() + 1)
        return step

    def on_metrics(self, metrics: Mapping[str, float]) -> None:
        """Alarms of a step. Raises StopRun by policy."""
        if self.paired_scores is not None:
            self._keep("step", self.paired_scores)
        alarms = self.guard.after_step(self.context.step(), metrics, self.paired_scores)
        if alarms:
            self._tell(alarms, self.guard.best)

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Alarms of an evaluation, whose best weights are kept. Raises StopRun by policy."""
        paired_scores = getattr(metrics, "paired_scores", None)
        if paired_scores is not None:
            self._keep("evaluation", paired_scores)
        best = self.guard.best
        alarms = self.guard.after_evaluation(self.context.step(), metrics, paired_scores)
        if self.config.keeps_best:
            self._keep_best()
        if alarms:
            self._tell(alarms, None if best is None else self.guard.best)

    def _keep_best(self) -> None:
        if self.guard.best is None:  # gold is named, as the settings were checked
            self.context.console.message("gold gave no valid score: the next evaluation is kept as checkpoint-best")
        elif self.guard.best[1] == self.context.step():
            with self.context.timer.phase("save"):
                self.context.state.save_best()

    def _keep(self, kind: str, paired_scores: PairedScores) -> None:
        self.context.recorder.log_line(GOLD, self.context.step(), {"kind": kind, **asdict(paired_scores)})

    def _tell(self, alarms: list[Alarm], best: tuple[float, int] | None) -> None:
        for alarm in alarms:
            self.context.recorder.log_line(ALARMS, alarm.step, asdict(alarm))
            self.context.console.message(f"guard, step {alarm.step}: {alarm.text}")
        step, signal = self.context.step(), ", ".join(alarm.signal for alarm in alarms)
        self.context.report.write_news(step)
        if self.config.policy == "stop" or (self.config.policy == "rollback" and best is None):
            raise StopRun(f"stopped by the guard at step {step} ({signal})")
        if self.config.policy == "rollback":
            raise _BackToBest(f"the guard ({signal}, step {step})", export=True)

    def state_dict(self) -> dict[str, Any]:
        return self.guard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.guard.load_state_dict(state)
        if self.config.keeps_best and self.guard.best != self.context.state.best_kept():
            self.guard.best = None
            self.context.console.message(
                "checkpoint-best is not of this run up to here: the next evaluation is kept as it"
            )


def build(parts: Any) -> GuardHook:
    """Always: evaluations have a best one also where nothing is watched."""
    return GuardHook(parts.config.guard, parts.gold is not None, parts.maker.rewards.paying)
