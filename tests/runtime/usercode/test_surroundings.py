"""What users' code changes around itself is the run's own again afterwards, and the code's own at its next call."""

from __future__ import annotations

import contextlib
import decimal
import gc
import locale
import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch

from lightrft_visual.errors import RewardError
from lightrft_visual.runtime.usercode import surroundings
from lightrft_visual.runtime.usercode.calls import call, load_module


@pytest.fixture(autouse=True)
def nothing_left_by_others(monkeypatch):
    monkeypatch.setattr(surroundings, "_said", set())
    monkeypatch.setattr(surroundings, "_users", {})


def umask() -> int:
    before = os.umask(0o022)
    os.umask(before)
    return before


CHANGES = {
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "number of threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "deterministic mode": (
        lambda: torch.set_deterministic_debug_mode(1),
        torch.are_deterministic_algorithms_enabled,
    ),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "matmul precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "autocast on cpu": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
    "handler of SIGTERM": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "garbage collector": (gc.disable, gc.isenabled),
    "the garbage collector": (lambda: gc.set_threshold(0), gc.get_threshold),
    "context of decimal": (lambda: setattr(decimal.getcontext(), "prec", 3), lambda: decimal.getcontext().prec),
    "the context of decimal": (
        lambda: decimal.setcontext(decimal.ExtendedContext),
        lambda: decimal.getcontext().traps.copy(),
    ),
    "numpy.seterr": (lambda: np.seterr(all="raise"), np.geterr),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"), lambda: locale.setlocale(locale.LC_ALL)),
    "filters of warnings": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "the filters of warnings": (warnings.resetwarnings, lambda: list(warnings.filters)),
    "umask": (lambda: os.umask(0o077), umask),
    "recursion limit": (lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 77), sys.getrecursionlimit),
    r"environment \(MINE_ALONE\)": (lambda: os.environ.update(MINE_ALONE="1"), lambda: dict(os.environ)),
    r"environment \(.*PATH.*\)": (lambda: os.environ.clear(), lambda: dict(os.environ)),
    "sys.path": (lambda: sys.path.insert(0, "/mine"), lambda: list(sys.path)),
    "changes sys.path": (lambda: setattr(sys, "path", []), lambda: list(sys.path)),
    "working directory": (lambda: os.chdir("/"), os.getcwd),
}


@pytest.mark.parametrize("told", CHANGES)
@pytest.mark.parametrize("raises", [False, True])
def test_what_a_function_changed_is_put_back_and_said_once(told, raises, caplog, monkeypatch):
    change, read = CHANGES[told]
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)  # vLLM's workers replace it for good
    before, path = read(), sys.path

    def score():
        change()
        assert read() != before
        if raises:
            raise GeneratorExit("after it")

    for _ in range(2):
        try:
            call(score, "score", {})
        except RuntimeError as error:
            assert raises and "GeneratorExit: after it" in str(error)
    assert read() == before and sys.path is path
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("reward function score changes")
    caplog.records[0].message.index(told.replace("\\", "").split("(")[0])


@pytest.mark.parametrize("before", [0, 1000])
def test_alarm_that_a_function_leaves_is_put_out_and_one_of_the_run_stays(before, caplog):
    of_pytest = signal.setitimer(signal.ITIMER_REAL, before)
    try:
        call(lambda: before or signal.alarm(2000), "score", {})
        assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before > 0) == (not caplog.records)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *of_pytest)


def test_recursion_limit_below_what_putting_back_needs_is_put_back():
    before = sys.getrecursionlimit()

    def score():
        for limit in range(10, before):
            with contextlib.suppress(RecursionError):
                return sys.setrecursionlimit(limit)

    with contextlib.suppress(RewardError):  # no frame more may fit in to read the result
        call(score, "score", {})
    assert sys.getrecursionlimit() == before


def seeds_everything():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def numbers():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("function", [seeds_everything, numbers])
def test_numbers_of_the_run_do_not_hang_on_what_a_function_seeds_or_draws(function):
    state = surroundings.rng_state()
    expected = [numbers(), numbers()]
    surroundings.set_rng_state(state)
    found = [numbers()]
    call(function, "score", {})
    assert [*found, numbers()] == expected


def test_numbers_that_a_function_draws_go_on_from_call_to_call():
    drawn = [call(numbers, "score", {}) for _ in range(4)]
    assert len(set(drawn)) == 4


def test_numbers_that_a_function_draws_go_on_after_a_resume():
    call(numbers, "score", {})
    state = surroundings.rng_state()
    expected = call(numbers, "score", {}), numbers()
    surroundings._users.pop("random states")
    seeds_everything()
    surroundings.set_rng_state(state)
    assert (call(numbers, "score", {}), numbers()) == expected


def test_seed_that_a_function_sets_holds_for_its_own_next_call():
    call(seeds_everything, "score", {})
    first = call(numbers, "score", {})
    call(seeds_everything, "score", {})
    assert call(numbers, "score", {}) == first


def test_numbers_are_counted_as_a_file_or_an_earlier_call_says_and_no_longer_afterwards(tmp_path):
    (tmp_path / "own.py").write_text(
        "import decimal, numpy\ndecimal.getcontext().prec = 3\nnumpy.seterr(all='raise')\n"
    )
    load_module(str(tmp_path / "own.py"), "reward file")
    before = decimal.getcontext().prec, np.geterr()
    assert call(lambda: (str(decimal.Decimal(1) / 3), np.geterr()["divide"]), "score", {}) == ("0.333", "raise")
    assert (decimal.getcontext().prec, np.geterr()) == before and before[0] == 28


def test_filter_of_a_library_that_a_function_imports_stays():
    own = ("ignore", None, UserWarning, None, 4711)
    call(lambda: warnings.filters.insert(0, own), "score", {})
    assert own in warnings.filters
    warnings.filters.remove(own)


@pytest.mark.parametrize("line", ["simplefilter('ignore')", "filterwarnings('ignore')", "resetwarnings()"])
def test_filter_of_every_warning_at_the_top_of_a_file_holds_for_its_calls_alone(tmp_path, line):
    (tmp_path / "own.py").write_text(f"import warnings\nwarnings.{line}\n")
    before = list(warnings.filters)
    load_module(str(tmp_path / "own.py"), "reward file")
    assert warnings.filters == before
    ignored = [("ignore", None, Warning, None, 0)] * ("ignore" in line)
    assert call(lambda: warnings.filters[: len(ignored)], "score", {}) == ignored
    assert warnings.filters == before
    call(lambda: warnings.simplefilter("default"), "score", {})
    assert warnings.filters == before


def test_what_a_function_changed_for_itself_it_finds_at_its_next_call(monkeypatch):
    def first():
        os.environ["MINE_ALONE"] = "here"
        os.environ.pop("OF_THE_RUN")
        sys.path.append("/mine")
        sys.setrecursionlimit(4321)

    def second():
        return os.environ.get("MINE_ALONE"), os.environ.get("OF_THE_RUN"), "/mine" in sys.path, sys.getrecursionlimit()

    monkeypatch.setenv("OF_THE_RUN", "1")
    call(first, "first", {})
    assert call(second, "second", {}) == ("here", None, True, 4321)
    assert os.environ["OF_THE_RUN"] == "1" and "/mine" not in sys.path


def test_file_that_is_imported_keeps_its_environment_and_path_and_not_its_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("MINE_ALONE", raising=False)
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, random, sys\nrandom.seed(0)\nos.environ['MINE_ALONE'] = '1'\nsys.path.append('/of/the/file')\n"
    )
    before = random.getstate()
    load_module(str(path))
    assert random.getstate() == before
    assert os.environ.pop("MINE_ALONE") == "1" and "/of/the/file" in sys.path
