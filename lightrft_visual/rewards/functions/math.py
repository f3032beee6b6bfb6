"""Mathematical answers, compared by math-verify in a process with a time limit."""

from typing import Any

from ...errors import ConfigError
from ...runtime.usercode.calls import Failed
from ...runtime.usercode.sandbox import Worker
from .answers import references_in

_WORKER = "lightrft_visual.rewards.functions.math_worker:verify_answer"


class Math:
    """1 when math-verify finds the response's final answer equal to the reference (or one of several), else 0.

    Symbolic comparison can run forever on a hostile answer, so each runs in a child process for at most `seconds`; an
    answer that takes longer is failed, not wrong. None without a reference that parses.
    """

    needs_reference = True

    def __init__(self, seconds: float = 5.0) -> None:
        if seconds <= 0:
            raise ConfigError("math: seconds must be positive")
        self.seconds = seconds
        self._worker = Worker(_WORKER)

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | Failed | None]:
        return [self._score(completion, reference) for completion, reference in zip(completions, references)]

    def _score(self, completion: str, reference: Any) -> float | Failed | None:
        known = references_in(reference)
        if not known:
            return None
        return self._worker.scored({"response": completion, "references": known}, self.seconds, "math-verify")

    def close(self) -> None:
        """End the process."""
        self._worker.close()
