"""Multiple choice: the letter that was chosen."""

from __future__ import annotations

import re
from typing import Any

from ...errors import ConfigError
from .answers import any_reference, final_answer


class Choice:
    """1 when the chosen letter equals the reference's, 0 when it differs or none can be read; None without a reference.

    letters: the options, such as "ABCD". Read are, in this order: a letter alone, "answer is B" or "answer: (B)", the
    last letter in brackets, and a leading "B." or "B:". An article "A" inside a sentence is not an answer.
    """

    needs_reference = True

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        if not letters.isalpha():
            raise ConfigError(f"choice: letters is {letters!r}; give the option letters, such as ABCD")
        upper, both = f"[{letters.upper()}]", f"[{letters.upper()}{letters.lower()}]"
        lead = r"(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*[(\[*]*"
        self._forms = [
            re.compile(rf"^[\s(\[*]*({both})[\s)\].:*]*$"),
            re.compile(rf"{lead}({upper}(?![\w'])|{both}(?=[\s)\].*]*$))"),
            re.compile(rf"[(\[]({both})[)\]]"),
            re.compile(rf"^\s*({both})[.:)]\s"),
        ]

    def letter(self, text: str) -> str | None:
        """The chosen letter in upper case, or None."""
        for form in self._forms:
            found = form.findall(text)
            if found:
                return found[-1].upper()
        return None

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | None]:
        chosen = [self.letter(final_answer(completion)) for completion in completions]
        return [
            any_reference(reference, lambda option, given=given: given is not None and self.letter(option) == given)
            for given, reference in zip(chosen, references)
        ]
