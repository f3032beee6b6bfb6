"""A calculator in Python's notation."""

from functools import cache

from ...errors import RewardError
from ...runtime.usercode.sandbox import CallTimeout, Worker, from_json
from ..tools import ToolEnvironment

SECONDS = 2.0


class PythonCalculator(ToolEnvironment):
    """One tool, `python`, that evaluates arithmetic and nothing else.

    It is no interpreter: names, attributes, assignments, imports and loops are refused by a list of what is allowed
    (`calculator.py`), so no code of the model ever runs. Each expression is evaluated in a process with a time limit,
    because allowed ones may still take long. That process has the user's own rights: the list is what protects.
    """

    def __init__(self) -> None:
        super().__init__([self.python])

    def python(self, expression: str) -> str:
        """Evaluate an arithmetic expression in Python's notation and return its value.

        Args:
            expression: numbers, + - * / // % **, comparisons, lists, and abs, ceil, comb, cos, exp, factorial, floor,
                gcd, log, log10, max, min, pi, pow, round, sin, sqrt, sum, tan
        """
        try:
            value, error = from_json(_worker().call({"expression": expression}, SECONDS))
        except CallTimeout:
            raise ValueError(f"no result within {SECONDS:g} s") from None
        except RewardError as failure:  # the process sent what is no answer
            raise ValueError(str(failure)) from None
        if error:
            raise ValueError(error)
        return value


@cache
def _worker() -> Worker:
    """One process for all episodes: evaluations leave nothing behind."""
    return Worker("lightrft_visual.rollout.builtin.calculator:evaluate")
