"""Numbers within a tolerance."""

from __future__ import annotations

import math
import re
from typing import Any

from .answers import any_reference, final_answer

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?%?")


def last_number(text: str) -> float | None:
    """The last number of a text: `1,234.5`, `-2e3`, `12%` (as 0.12), or None. A `-` after a digit is not a sign."""
    found = [m for m in _NUMBER.finditer(text) if any(c.isdigit() for c in m.group())]
    if not found:
        return None
    token = found[-1].group()
    if token[0] in "+-" and found[-1].start() > 0 and text[found[-1].start() - 1].isdigit():
        token = token[1:]
    number = float(token.rstrip("%").replace(",", ""))
    number = number / 100 if token.endswith("%") else number
    return number if math.isfinite(number) else None


class Numeric:
    """1 when the last number of the final answer equals the reference's within the tolerances, else 0.

    tolerance: relative; absolute: absolute, both as in math.isclose. None without a number in the reference.
    """

    needs_reference = True

    def __init__(self, tolerance: float = 1e-6, absolute: float = 1e-9) -> None:
        self.tolerance, self.absolute = tolerance, absolute

    def _close(self, given: float | None, option: str) -> bool:
        wanted = last_number(option)
        if given is None or wanted is None:
            return False
        return math.isclose(given, wanted, rel_tol=self.tolerance, abs_tol=self.absolute)

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | None]:
        scores: list[float | None] = []
        for completion, reference in zip(completions, references):
            given = last_number(final_answer(completion))
            options = reference if isinstance(reference, (list, tuple)) else [reference]
            numbers = [option for option in options if option is not None and last_number(str(option)) is not None]
            scores.append(any_reference(numbers, lambda option, given=given: self._close(given, option)))
        return scores
