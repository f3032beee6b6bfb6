"""The form of a response."""

import re

from ...errors import ConfigError

THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


class Format:
    """1 when the whole response matches `pattern`, else 0. Only the response is read: the prompt often shows the form
    it asks for, and would make the score a constant 1."""

    def __init__(self, pattern: str = THINK_ANSWER) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"format: pattern {pattern!r} is not a regular expression: {error}") from error
        # Without it the search would go on from each of many tags.
        self._end = "</answer>" if pattern == THINK_ANSWER else ""

    def __call__(self, completions: list[str]) -> list[float]:
        return [
            float(bool(each.rstrip().endswith(self._end) and self._pattern.fullmatch(each))) for each in completions
        ]
