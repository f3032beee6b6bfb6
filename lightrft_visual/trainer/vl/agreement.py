"""Engine and trainer agree: every rollout is compared before it is trained on, and a probe where none shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...config.vl import RolloutConfig
from ...experience.prompts import PromptBatch
from ...experience.types import Experience
from ...observe.metrics import MetricsAccumulator
from ...rollout.parity import ParityGate, RolloutCheck
from .updates import comparable

PROBE_PROMPTS = 4  # that engine and trainer both score when the gate looks


class Agreement:
    """The parity gate over a run. figure: its latest, which is what `parity` reports.

    gate: None measures nothing by probes. ahead: rollouts may be of earlier policies, whose tokens cannot be compared.
    """

    def __init__(self, gate: ParityGate | None, settings: RolloutConfig, ahead: bool) -> None:
        self.gate, self.settings, self.ahead = gate, settings, ahead
        self.probe: PromptBatch | None = None
        self.difference = 0.0
        self._synced = False  # whether the engine was given trained weights, after those of the start

    def follow(self, batch: PromptBatch) -> None:
        """Probes are made with prompts just used: theirs are the caches that could be stale."""
        count = min(PROBE_PROMPTS, len(batch)) if self.gate is not None else 0
        self.probe = batch.select(list(range(count))) if count else None

    def probe_now(self) -> None:
        """Sample and score the probe. Raises RolloutError with the likely cause. A collective."""
        if self.gate is not None and self.probe is not None:
            self.difference = self.gate.check(self.probe, self.settings.temperature)

    def after_sync(self, step: int, evaluated: bool, full_distribution: bool) -> None:
        """A probe where no rollout follows that would show a difference, and every `parity_every` steps."""
        unseen = not full_distribution or (self.ahead and not self._synced)
        self._synced = True
        every = self.settings.parity_every
        if evaluated or unseen or (every and step % every == 0):
            self.probe_now()

    def check_reference(self, reference: Callable | None) -> None:
        """Before the first step the reference is the policy."""
        if self.gate is not None and self.probe is not None and reference is not None:
            self.gate.check_reference(reference, self.probe, self.settings.temperature)

    def of_rollouts(self) -> RolloutCheck:
        """To be fed with a step's scores, settled, and reported."""
        return RolloutCheck(self.gate, self.probe, self.settings.temperature)

    def check(self, batches: Sequence[Experience], version: int, metrics: MetricsAccumulator) -> None:
        """Compare a step's batches, whose policy was scored already, and report it. A collective."""
        check = self.of_rollouts()
        for each in batches:
            check.add(each.action_log_probs, each.rollout_log_probs, comparable(each, each.action_mask, version))
        check.settle()
        self.report(check, metrics)

    def report(self, check: RolloutCheck, metrics: MetricsAccumulator) -> None:
        """parity: the latest figure, of these rollouts or, where they cannot be compared, of the last probe. Ahead of
        the trainer only tokens of the present weights can be; without any no difference is told."""
        if check.compared and check.gate is not None:
            self.difference = check.difference
        if check.compared or not self.ahead:
            metrics.add_max("rollout_logp_diff_max", check.largest)
        metrics.add_max("parity", self.difference)
