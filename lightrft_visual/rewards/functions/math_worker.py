"""The child's side of the math scorer; imported in its process only."""

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from .answers import LATEX_TEXT, final_answer, plain_numbers, tagged_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its alarms are off
_EXTRACTION = [LatexExtractionConfig(), ExprExtractionConfig()]
_PI = re.compile(r"(?<![\\A-Za-z])(?=pi\b)")
_NUMBERS = re.compile(r"(?:[\^_]\{?-?\d+\}?)|(\d[\d.,/]*)")  # exponents and indices are none
_ALGEBRA = re.compile(  # what stands beside a number that is no word and no unit
    r"\\(?!text|mathrm|Omega|circ|degree|[%,;! ])"
    r"|\d\s?(?:pi|π|[a-fi-knp-rt-z])(?![\w.])"  # a single g, h, l, m, o or s may be a unit
    r"|\d[abcnpqrtu-z]{2,3}(?![A-Za-z])"
    r"|\d\s*[-+*^]\s*(?![A-Za-z]{2})"
    r"|(?<![A-Za-z])[A-Za-z]\s*[-+*/]\s*\d"
)
_SAYS_SO = re.compile(r"\$|\\boxed|\\[(\[]")
_WORD = re.compile(r"(?:^|\s)(?!pi\b)[A-Za-z][A-Za-z/]")


def _is_plain(text: str) -> bool:
    """Whether it says itself what of it is mathematics, or is one number among words, such as `about 7 m^2`."""
    numbers = [number for number in _NUMBERS.findall(text) if number]
    return bool(_SAYS_SO.search(text)) or (len(numbers) == 1 and not _ALGEBRA.search(text.strip("* ")))


def _parse(text: str) -> list:
    """math-verify's reading of a text. Its own alarms stay off: the parent process keeps the time."""
    return parse(text, _EXTRACTION, parsing_timeout=None)


def _readings(text: str, latex: str, prose: bool) -> list[list]:
    r"""How a text can be read: as LaTeX, and as it is where it is plain or no LaTeX. prose: or holds a word.

    Of a bare `8\sqrt{3}` math-verify would take 8, as of a sentence.
    """
    read, bare = _parse("$" + _PI.sub(r"\\", latex) + "$"), LATEX_TEXT.sub("", text)
    also = not read or _is_plain(bare) or (prose and _WORD.search(bare))
    return [parsed for parsed in (read, also and _parse(text)) if parsed]


def verify_answer(response: str, references: list[str]) -> float | None:
    """1.0 or 0.0, or None when no reference can be read as mathematics."""
    said = final_answer(response)
    response = response.replace(said, plain_numbers(said))  # what stands beside it is as it was
    gold = [parsed for text in map(plain_numbers, references) for parsed in _readings(text, text, False)]
    if not gold:
        return None
    tagged = tagged_answer(response)  # with tags nothing beside them counts, else there could be two answers
    answers = _readings(response if tagged is None else tagged, final_answer(response), True)
    return float(any(verify(g, answer, timeout_seconds=None) for g in gold for answer in answers))
