"""What the run needs as it was is put back after a call of users' code, and said."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightrft_visual.errors import RewardError
from lightrft_visual.rollout.environment_threads import ThreadHost
from lightrft_visual.runtime.usercode import calls, surroundings
from lightrft_visual.runtime.usercode.calls import call
from lightrft_visual.runtime.usercode.loading import load_module, on_trial


@pytest.fixture(autouse=True)
def nothing_left_by_others(monkeypatch):
    monkeypatch.setattr(surroundings, "_said", set())
    monkeypatch.setattr(surroundings, "_users_states", {})
    monkeypatch.setattr(surroundings, "_one_at_a_time", threading.Lock())  # a call of theirs may still be under way


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
    "handler of SIGTERM": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "working directory": (lambda: os.chdir("/"), os.getcwd),
    "recursion limit": (lambda: sys.setrecursionlimit(sys.getrecursionlimit() - 100), sys.getrecursionlimit),
}


def test_a_handler_of_the_runs_own_is_put_back_and_said(caplog):
    before = signal.signal(signal.SIGTERM, own := lambda *_: None)
    try:
        call(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "score", {})
        assert signal.getsignal(signal.SIGTERM) == own and "changes the handler of SIGTERM" in caplog.text
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("told", "raises"), [*((told, False) for told in CHANGES), ("gradient mode", True)])
def test_what_a_function_changed_is_put_back_and_said_once(told, raises, caplog):
    change, read = CHANGES[told]
    before = read()

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
    assert read() == before
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(("reward function score changes", "reward function score lowers"))
    assert told in caplog.records[0].message


def test_a_recursion_limit_that_a_file_raises_stays_for_its_calls(tmp_path, caplog):
    before = sys.getrecursionlimit()
    (tmp_path / "deep.py").write_text(f"import sys\nsys.setrecursionlimit({before + 500})\n")
    try:
        load_module(str(tmp_path / "deep.py"))
        assert call(sys.getrecursionlimit, "score", {}) == before + 500 and not caplog.records
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("before", [0, 1000])
def test_alarm_that_a_function_leaves_is_put_out_and_one_of_the_run_stays(before, caplog):
    of_pytest = signal.setitimer(signal.ITIMER_REAL, before)
    try:
        call(lambda: before or signal.alarm(2000), "score", {})
        assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before > 0) == (not caplog.records)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *of_pytest)


def seeds_everything():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def numbers():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_what_was_lent_comes_back_and_the_next_call_is_watched_where_a_watch_fails(monkeypatch):
    def broken():
        raise MemoryError

    out = sys.stdout
    with monkeypatch.context() as patched, pytest.raises(RewardError, match="MemoryError"):
        patched.setattr(torch, "get_default_dtype", broken)
        call(numbers, "score", {})
    assert sys.stdout is out
    call(CHANGES["default dtype"][0], "score", {})
    assert torch.get_default_dtype() == torch.float32


def test_a_call_that_outlasts_a_change_of_the_lock_lets_its_own_go(monkeypatch):
    first, second = threading.Lock(), threading.Lock()
    monkeypatch.setattr(surroundings, "_one_at_a_time", first)
    call(lambda: monkeypatch.setattr(surroundings, "_one_at_a_time", second), "score", {})
    assert not first.locked() and not second.locked()


@pytest.fixture
def fourth_of_eight(monkeypatch):
    """This rank computes on accelerator 3; as with CUDA each thread has its own, and begins on 0."""
    here = threading.local()
    states = [torch.tensor([index]) for index in range(8)]

    def index():
        return getattr(here, "index", 0)

    def set_state(state):
        states[index()] = state

    module = SimpleNamespace(
        is_initialized=lambda: True, get_rng_state=lambda: states[index()], set_rng_state=set_state
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda number: setattr(here, "index", number))
    here.index = 3
    return states


def test_an_accelerator_that_a_function_sets_is_put_back_with_its_random_state(fourth_of_eight, caplog):
    call(lambda: torch.accelerator.set_device_index(0), "score", {})
    assert torch.accelerator.current_device_index() == 3 and "changes torch's accelerator" in caplog.text
    assert [int(state) for state in fourth_of_eight] == list(range(8))


def test_async_functions_and_environments_begin_on_the_accelerator_of_their_rank(fourth_of_eight):
    async def score():
        return torch.accelerator.current_device_index()

    with contextlib.closing(calls.BackgroundLoop()) as loop, contextlib.closing(ThreadHost(object, 60.0)) as host:
        assert loop.run(score()) == 3
        assert host._call("reset", torch.accelerator.current_device_index).result(60) == 3
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert found == [0]


FORKS = """
import os, signal, sys, time
from lightrft_visual.runtime.usercode import calls

calls.ONE_SIGNAL = 0.0
signal.signal(signal.SIGTERM, calls.StopRequest())
signal.signal(signal.SIGINT, calls.Interrupt())
signal.raise_signal(signal.SIGINT)
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(3)
os.kill(child, signal.SIGINT)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


PRESSED = """
import os, signal, sys
from pathlib import Path
from lightrft_visual.runtime import start_up
from lightrft_visual.runtime.usercode import calls

calls.ONE_SIGNAL = 0.0
handler = lambda *_: None
handler.ends_process = True  # as that of a script of ours
signal.signal(signal.SIGINT, handler)
if sys.argv[2] == "start":
    start_up.foreign_lines_aside(Path(sys.argv[1]))
else:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
signal.signal(signal.SIGTERM, calls.StopRequest())
signal.signal(signal.SIGINT, calls.Interrupt())
signal.raise_signal(signal.SIGINT)
print("a user's function prints", flush=True)
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("when", ["start", "steps whose reader is gone"])
def test_both_ctrl_c_are_answered_on_the_screen_and_the_end_of_a_pipes_reader_is_no_error(tmp_path, when):
    command = [sys.executable, "-c", PRESSED, str(tmp_path), when]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == calls.INTERRUPTED and not ended.stdout
    first, second = ended.stderr.splitlines()
    assert first.startswith("Ctrl-C: this step is finished") and "by a second Ctrl-C" in second


def test_a_process_that_users_code_forks_in_an_interrupted_run_ends_by_the_next_ctrl_c():
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == calls.INTERRUPTED and "Ctrl-C: this step is finished" in ended.stderr


def test_a_process_that_outlives_a_run_does_not_end_by_the_first_ctrl_c_of_the_next(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    handler = calls.InterruptOfChild(time.monotonic() - 2 * calls.FORGOTTEN)
    handler()
    assert not ended
    handler.first -= 2 * calls.ONE_SIGNAL
    handler()
    assert ended == [calls.INTERRUPTED]


@pytest.mark.parametrize("function", [seeds_everything, numbers])
def test_numbers_of_the_run_do_not_hang_on_what_a_function_seeds_or_draws(function):
    state = surroundings.rng_state()
    expected = [numbers(), numbers()]
    surroundings.set_rng_state(state)
    found = [numbers()]
    call(function, "score", {})
    assert [*found, numbers()] == expected


def test_numbers_that_a_function_draws_go_on_from_call_to_call_after_its_own_seed_and_after_a_resume():
    assert len({call(numbers, "score", {}) for _ in range(4)}) == 4
    state = surroundings.rng_state()
    expected = call(numbers, "score", {}), numbers()
    surroundings._users_states.clear()
    seeds_everything()
    surroundings.set_rng_state(state)
    assert (call(numbers, "score", {}), numbers()) == expected

    call(seeds_everything, "score", {})
    first = call(numbers, "score", {})
    call(seeds_everything, "score", {})
    assert call(numbers, "score", {}) == first


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


def test_states_of_a_run_on_a_card_are_put_back_on_the_cpu_as_far_as_it_has_them():
    before = surroundings.random_states()
    random.random()
    surroundings.put_random_states(before | {"accelerator": torch.zeros(16, dtype=torch.uint8)})
    assert random.getstate() == before["python"]


def test_a_module_that_was_there_before_a_trial_is_there_afterwards(tmp_path):
    """A plug-in of the same file, whose classes are looked up by its name."""
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\n")
    plugin = load_module(str(path))
    with on_trial():
        assert load_module(str(path)) is not plugin
    assert sys.modules.pop(plugin.__name__) is plugin
    with on_trial():
        load_module(str(path))
    assert plugin.__name__ not in sys.modules
