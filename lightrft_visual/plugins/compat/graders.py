"""Geometry3K as EasyR1 and verl grade it, whose published numbers a number is compared with. Both ask mathruler."""

import re
from typing import Any

from ...errors import ConfigError
from ...rewards.batch import Failed
from ...runtime.packages import needed
from ...runtime.usercode.sandbox import Worker

_WORKER = f"{__name__}:answers"
_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
# EasyR1 joins what stands around <, > and / before it grades; verl grades the response as it is.
PREPARED = {"easyr1": lambda text: re.sub(r"\s*(<|>|/)\s*", r"\1", text), "verl": lambda text: text}


class Geometry3K:
    r"""`format_weight` for the form <think>...</think>...\boxed{...}, the rest for the answer in the box.

    grader: `easyr1` or `verl`; the grades of both are metrics. seconds: for one answer; sympy may never end. None
    without a reference.
    """

    needs_reference = True

    def __init__(self, grader: str = "easyr1", format_weight: float = 0.1, seconds: float = 5.0) -> None:
        if grader not in PREPARED:
            raise ConfigError(f"scorer geometry3k: grader is {grader!r}; it must be one of: {', '.join(PREPARED)}")
        with needed("mathruler"):
            import mathruler.grader  # noqa: F401 - the process of its own imports it at the first answer
        self.grader, self.format_weight, self.seconds = grader, format_weight, seconds
        self._worker = Worker(_WORKER)

    def __call__(self, completions: list[str], references: list[Any]) -> dict[str, list[Any]]:
        known: dict[tuple[str, str | None], float | Failed | None] = {}  # of texts that both grade alike
        grades: dict[str, list[Any]] = {}
        truths = [None if each is None else str(each) for each in references]
        for grader in sorted(PREPARED, key=lambda name: name == self.grader):  # its own last
            asked = [(PREPARED[grader](text), truth) for text, truth in zip(completions, truths)]
            for each in asked:
                if each not in known:
                    known[each] = self._accuracy(*each)
            accuracy = [known[each] for each in asked]
            form = [1.0 if _FORM.fullmatch(text) else 0.0 for text, _ in asked]
            share = self.format_weight
            grades[grader] = [
                (1 - share) * right + share * fits if isinstance(right, float) else right
                for right, fits in zip(accuracy, form)
            ]
        found = {**grades, "accuracy": accuracy}
        metrics = {name: [each if isinstance(each, float) else None for each in own] for name, own in found.items()}
        return {"rewards": grades[self.grader], "format": form, **metrics}

    def _accuracy(self, response: str, reference: str | None) -> float | Failed | None:
        if reference is None:
            return None
        return self._worker.scored({"response": response, "reference": reference}, self.seconds, "mathruler")

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def answers(response: str, reference: str) -> float:
    """1 where mathruler finds what stands in the box equal to the reference, else 0."""
    from mathruler.grader import extract_boxed_content, grade_answer

    return float(grade_answer(extract_boxed_content(response), reference))
