"""Geometry3K's two graders: their scores are those of EasyR1's and verl's formulas, whichever mathruler answers."""

import importlib.util
import re

import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.compat.graders import Geometry3K

THINKS = "<think>x + 1 = 4</think> So \\boxed{3}"
BARE, BLANKS = "\\boxed{3}", "< think >a</ think > \\boxed{3}"
RESPONSES = [THINKS, BARE, BLANKS, THINKS.replace("3", "4"), "<think></think>3"]
# Stands in for the package where it is not installed: what it answers is not what is tested.
STAND_IN = """
def extract_boxed_content(text):
    return text.rpartition("\\\\boxed{")[2].rpartition("}")[0] if "\\\\boxed{" in text else "None"
def grade_answer(given, truth):
    if given == "raise":
        raise ValueError("no answer")
    while given == "hang":
        pass
    return given == truth
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "mathruler").mkdir()
    (tmp_path / "mathruler" / "__init__.py").write_text("")
    (tmp_path / "mathruler" / "grader.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def mathruler(request):
    """The module of the package, or of what stands in for it."""
    if importlib.util.find_spec("mathruler") is None:
        request.getfixturevalue("stand_in")
    return importlib.import_module("mathruler.grader")


def published(mathruler, response: str, easyr1: bool) -> float:
    text = re.sub(r"\s*(<|>|/)\s*", r"\1", response) if easyr1 else response
    form = re.fullmatch(re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL), text)
    right = mathruler.grade_answer(mathruler.extract_boxed_content(text), "3")
    return 0.9 * (1.0 if right else 0.0) + 0.1 * (1.0 if form else 0.0)


@pytest.mark.slow
def test_grades_are_those_of_both_published_graders(mathruler):
    scorer = Geometry3K("easyr1")
    grades = scorer(RESPONSES, ["3"] * len(RESPONSES))
    scorer.close()
    for name in ("easyr1", "verl"):
        assert grades[name] == [published(mathruler, text, name == "easyr1") for text in RESPONSES]
    assert grades["rewards"] == grades["easyr1"]
    assert grades["easyr1"][2] == 1.0 and grades["verl"][2] == 0.9  # blanks within the tags
    assert grades["accuracy"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert grades["format"] == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.slow
def test_what_cannot_be_graded_is_failed_does_not_apply_without_reference_and_needs_a_known_grader(stand_in):
    scorer = Geometry3K("verl", seconds=1.0)
    found = scorer(["\\boxed{raise}", "\\boxed{hang}", "\\boxed{3}", "\\boxed{3}"], ["3", "3", None, "3"])["rewards"]
    scorer.close()
    assert "ValueError" in found[0].reason and "mathruler" in found[1].reason and found[2:] == [None, 0.9]
    with pytest.raises(ConfigError, match="easyr1, verl"):
        Geometry3K("ver")
