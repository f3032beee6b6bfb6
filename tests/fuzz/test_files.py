"""A share of `scripts/fuzz.py`, always the same: damaged files of every kind end in the package's own errors."""

import importlib.util
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow speaks of each damaged tag
SPEC = importlib.util.spec_from_file_location("fuzz", Path(__file__).parents[2] / "scripts" / "fuzz.py")
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


FEW = {"model": 7, "report": 16, "recipe": 16, "arguments": 16}  # that take a tenth of a second or more each


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    logging.disable(logging.CRITICAL)  # thousands of rows are left out
    yield fuzz.Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=1)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_files_end_in_errors_that_name_the_cause(fuzzer, kind):
    fuzz.checked(fuzzer, 0, kind)
    results = {number: fuzz.checked(fuzzer, number, kind) for number in range(1, FEW.get(kind, 31))}
    wrong = {number: text for number, (_, text) in results.items() if text is not None}
    assert not wrong, f"replay one with: python scripts/fuzz.py --seed 1 --only {kind} --replay NUMBER\n{wrong}"
    refused = [outcome for outcome, _ in results.values() if outcome.endswith("refused")]
    assert refused or kind == "report", "the changes do no damage"  # a report shows what there is


def test_whole_files_are_read(fuzzer, monkeypatch):
    monkeypatch.setattr(fuzz, "damaged", lambda content, *_: content)
    monkeypatch.setattr(fuzz, "png_of_other_size", lambda content, _: content)
    for kind in fuzz.FILES:
        # Random options of a video may be refused, whatever the file.
        outcomes = {fuzz.checked(fuzzer, number, kind)[0] for number in range(5)}
        assert f"{kind} read" in outcomes if kind == "mp4" else outcomes == {f"{kind} read"}


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), fuzz.Hang()])
def test_a_case_fails_on_any_other_error(fuzzer, monkeypatch, error):
    monkeypatch.setitem(fuzz.CASES, "png", Mock(side_effect=error))
    outcome, wrong = fuzz.checked(fuzzer, 1, "png")
    assert outcome == "failed" and type(error).__name__ in wrong


def test_a_case_fails_beyond_its_bounds(fuzzer, monkeypatch):
    monkeypatch.setattr(fuzz, "CPU_SECONDS", -1.0)
    assert "processor time" in fuzz.checked(fuzzer, 1, "txt")[1]
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 9.0)
    monkeypatch.setattr(fuzz, "GROWTH", -1)
    monkeypatch.setattr(fuzz, "_peak", iter([0, 2**32, 2**32]).__next__)
    assert fuzz.checked(fuzzer, 1, "txt")[1] == "4.0 GB"
