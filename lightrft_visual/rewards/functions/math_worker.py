"""The child's side of the math scorer; imported in its process only."""

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from .answers import LATEX_TEXT, final_answer, tagged_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its alarms are off
_EXTRACTION = [LatexExtractionConfig(), ExprExtractionConfig()]
_MARKED = r"\$|\\boxed|\\[(\[]"  # mathematics in a text says so
_PI = re.compile(r"(?<![\\A-Za-z])(?=pi\b)")
_BEFORE = r"(?:[^\d\\^+*/(<>-]*[\s=:€£~≈])?"
_VARIABLE = r"(?:pi|π|[a-fi-knp-rt-z])(?![\w.])"  # a single g, h, l, m, o or s may be a unit
_UNIT = rf"\s(?![-:/^]|{_VARIABLE})(?:[^\d\\^+*<>=!:]|\^\{{?-?\d\}}?)+"
_NUMBER = re.compile(rf"{_MARKED}|^\**{_BEFORE}[-+]?\d[\d.,/]*(?:{_UNIT})?\**$")  # `€7`, `7 m^2`; no `3 and 4`, `7 x`
_PLAIN = re.compile(rf"{_NUMBER.pattern}|(?:^|\s)(?!pi\b)[A-Za-z][A-Za-z/]")


def _parse(text: str) -> list:
    """math-verify's reading of a text. Its own alarms stay off: the parent process keeps the time."""
    return parse(text, _EXTRACTION, parsing_timeout=None)


def _readings(text: str, latex: str, plain: re.Pattern[str]) -> list[list]:
    r"""How a text can be read: as LaTeX, and as it is where it matches `plain` or is no LaTeX.

    Of a bare `8\sqrt{3}` math-verify would take 8, as of a sentence.
    """
    read = _parse("$" + _PI.sub(r"\\", latex) + "$")
    also = not read or plain.search(LATEX_TEXT.sub("", text))
    return [parsed for parsed in (read, also and _parse(text)) if parsed]


def verify_answer(response: str, references: list[str]) -> float | None:
    """1.0 or 0.0, or None when no reference can be read as mathematics."""
    gold = [parsed for text in references for parsed in _readings(text, text, _NUMBER)]
    if not gold:
        return None
    tagged = tagged_answer(response)  # with tags nothing beside them counts, else there could be two answers
    answers = _readings(response if tagged is None else tagged, final_answer(response), _PLAIN)
    return float(any(verify(g, answer, timeout_seconds=None) for g in gold for answer in answers))
