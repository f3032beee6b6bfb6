"""The child's side of the math scorer; imported in its process only."""

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from .answers import final_answer, tagged_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its alarms are off
_EXTRACTION = [LatexExtractionConfig(), ExprExtractionConfig()]


def _parse(text: str) -> list:
    """math-verify's reading of a text. Its own alarms stay off: the parent process keeps the time."""
    return parse(text, _EXTRACTION, parsing_timeout=None)


def verify_answer(response: str, references: list[str]) -> float | None:
    """1.0 or 0.0, or None when no reference can be read as mathematics.

    A reference is read as it is and, for a bare expression such as `(1, 2)`, as LaTeX too.
    """
    texts = [form for text in references for form in (text, f"${text}$")]
    gold = [parsed for parsed in map(_parse, texts) if parsed]
    if not gold:
        return None
    tagged = tagged_answer(response)  # with tags nothing beside them counts, else there could be two answers
    said = response if tagged is None else tagged
    answers = [parsed for parsed in map(_parse, (said, f"${final_answer(response)}$")) if parsed]
    return float(any(verify(g, answer, timeout_seconds=None) for g in gold for answer in answers))
