"""Scorers that compare the final answer of a response with the reference: as text, as a number, as a letter."""

import math
import re
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

from ...data.rows import without_fraction
from ...errors import ConfigError

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?%?")
_PART = re.compile(r"(?:[\w)}%] ?[/⁄] ?\(?|\d(?: : |:)|\} ?\{|frac(?:\d\{)?|\^ ?[{(]?)$")  # of fraction, ratio, power
_PLAIN = str.maketrans("−﹣－０１２３４５６７８９％", "---0123456789%")
_DASH = re.compile(r"–(?!\s)|(?<=[=≈<({\[])–|(?<=[=≈<({\[] )–")  # one between spaces is a minus behind these alone
_APART = re.compile(r"([=≈<({\[][ \t]*|[>$*])-(?:[ \u00a0\u2009\u202f]|\\,)(?=\.?\d)")  # `x = - 3`, not `x - 3`
_GROUPS = re.compile(r"(?<![\d.,:/⁄_^])\d{1,3}(?:(?:[\u00a0\u2009\u202f]|\\,|\{,\})\d{3})+(?!\d)")  # of digits, apart
_HYPHENED = re.compile(r"(?:\d|(?<!\\)\b[A-Za-z]+)\Z")  # what makes a minus none: `3-5`, `COVID-19`, not `\approx-3`
_PERCENT = re.compile(r"(?<=\d)(?:[ \u00a0\u2009\u202f]|\\,)?\\?%")  # `5\%`, `5 %`
_EDGE = " \t\r\n.,;:!?\"'`*()[]{}"


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for index in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def tagged_answer(response: str) -> str | None:
    """The last <answer>...</answer> without outer spaces; None without one."""
    ends = [found.end() for found in _TAG_END.finditer(response)]
    # Up to the last end only: an opening without an end is searched to the end of the text, each one again.
    tagged = _TAG.findall(response, 0, ends[-1]) if ends else []
    return tagged[-1].strip() if tagged else None


def final_answer(response: str) -> str:
    r"""The last <answer>...</answer>, else the last \boxed{...}, else the whole response, without outer spaces."""
    tagged = tagged_answer(response)
    if tagged is not None:
        return tagged
    boxed = last_boxed(response)
    return (response if boxed is None else boxed).strip()


def normalise(text: str) -> str:
    """Case, repeated spaces and punctuation at the ends do not count, but of a text that is nothing else it does."""
    plain = " ".join(text.casefold().split())
    return plain.strip(_EDGE) or plain


def references_in(reference: Any) -> list[str]:
    """The reference, or each of a list or array of references, as text, 3.0 as `3` too, and what <answer> tags hold in
    their place; nothing for None."""
    reference = reference.tolist() if getattr(reference, "ndim", 0) else reference
    options = reference if isinstance(reference, (list, tuple)) else [reference]
    both = (str(each) for option in options if option is not None for each in (option, without_fraction(option)))
    return [*dict.fromkeys(text if (inside := tagged_answer(text)) is None else inside for text in both)]


def _equal(answer: str | None, reference: Any, read: Callable[[str], str | None]) -> float | None:
    """1.0 where the answer is what `read` makes of the reference, or of one of a list of references, else 0.0; None
    without a reference that can be read."""
    wanted = [option for option in map(read, references_in(reference)) if option is not None]
    return float(answer in wanted) if wanted else None


class Exact:
    """1 when the normalised final answer equals the reference (or one of them), else 0; None without a reference.

    normalised: case, repeated spaces and punctuation at the ends do not count; set it false to compare as is.
    tagged: only an answer between <answer> tags counts; else the whole response may be one.
    """

    needs_reference = True

    def __init__(self, normalised: bool = True, tagged: bool = False) -> None:
        self._form = normalise if normalised else str.strip
        self._answer = tagged_answer if tagged else final_answer

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | None]:
        given = [self._answer(completion) for completion in completions]
        answers = [None if answer is None else self._form(answer) for answer in given]
        return [_equal(answer, reference, self._form) for answer, reference in zip(answers, references)]


def plain_numbers(text: str) -> str:
    r"""The text with numbers as programs write them: `-3` for `−3` and `x = - 3`, 1234 for groups of digits apart, `5%`
    for `5\%` and `5 %`."""
    signed = _APART.sub(r"\1-", _DASH.sub("-", text.translate(_PLAIN)))
    return _GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), _PERCENT.sub("%", signed))


def last_number(text: str) -> float | None:
    """The last number of a text: `1,234.5`, `-2e3`, `12%` (as 0.12), or None, also where it is but a part, as in `3/4`
    or `10^3`. A minus behind a digit or a word is not a sign."""
    text = plain_numbers(text)
    found = list(_NUMBER.finditer(text))
    start = found[-1].start() if found else 0
    if not found or _PART.search(text, max(0, start - 7), start):
        return None
    token = found[-1].group()
    if token[0] in "+-" and _HYPHENED.search(text, max(0, start - 20), start):
        token = token[1:]
    number = float(token.rstrip("%").replace(",", ""))
    number = number / 100 if token.endswith("%") else number
    return number if math.isfinite(number) else None


class Numeric:
    """1 when the last number of the final answer equals the reference's within the tolerances, else 0.

    tolerance: relative; absolute: absolute, both as in math.isclose. None without a number in the reference. A fraction
    such as 3/4 or a power is none, `math` reads them, nor is what may be a ratio or a time: 1:5, also of `Answer 1:5`.
    """

    needs_reference = True

    def __init__(self, tolerance: float = 1e-6, absolute: float = 1e-9) -> None:
        self.tolerance, self.absolute = tolerance, absolute

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | None]:
        close = partial(math.isclose, rel_tol=self.tolerance, abs_tol=self.absolute)
        scores: list[float | None] = []
        for completion, reference in zip(completions, references):
            given = last_number(final_answer(completion))
            wanted = [number for number in map(last_number, references_in(reference)) if number is not None]
            scores.append(float(given is not None and any(close(given, each) for each in wanted)) if wanted else None)
        return scores


LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
LATEX_LETTER = re.compile(r"\$\s*(\(?[A-Za-z]\)?)\s*\$")


class Choice:
    """1 when the chosen letter equals the reference's, 0 when it differs or none can be read; None where the reference
    has none, as an option's number or its text.

    letters: the options, such as "ABCD". Read are, in this order: a letter alone, "answer is B", "answer should be B",
    "answer: (B)", "ans: B", "答案是B" or "选B", "answer B", "option B" or "choice B", the last letter in brackets, and
    a leading "B." or "B:". An article "A" inside a sentence is not an answer.
    """

    needs_reference = True

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        if not letters.isalpha():
            raise ConfigError(f"choice: letters is {letters!r}; give the option letters, such as ABCD")
        upper, both = f"[{letters.upper()}]", f"[{letters.upper()}{letters.lower()}]"
        named = rf"[\s(\[*]*({upper}(?![\w'?])|{both}(?=[\s)\].*]*$))"
        said = r"(?i:(?:answer|\bans)(?:\s+(?:is|should\s+be)\s*[:=]?|\s*[:=]))"
        self._forms = [
            re.compile(rf"^[\s(\[*]*({both})[\s)\].:*]*$"),
            re.compile(said + named),
            re.compile(rf"{said}\s*[\"“]({upper})[.\"”]"),
            re.compile(rf"答案\s*[是为]?:?\s*(?:选项)?{named}"),
            re.compile(rf"(?i:(?:answer|choice|option)(?:\s+is)?\s*[:=]?){named}"),
            re.compile(rf"[(\[]({both})[)\]]"),
            re.compile(rf"(?:^|[\s,。;故应该我])选:?{named}"),
            re.compile(rf"^\s*({both})[.:)]\s"),
        ]

    def letter(self, text: str) -> str | None:
        """The chosen letter in upper case, or None."""
        text = LATEX_LETTER.sub(r"\1", LATEX_TEXT.sub(r"\1", unicodedata.normalize("NFKC", text)))
        for form in self._forms:
            found = form.findall(text)
            if found:
                return found[-1].upper()
        return None

    def __call__(self, completions: list[str], references: list[Any]) -> list[float | None]:
        chosen = [self.letter(final_answer(completion)) for completion in completions]
        return [_equal(given, reference, self.letter) for given, reference in zip(chosen, references)]
