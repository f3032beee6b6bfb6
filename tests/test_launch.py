"""How a run ends that was not done."""

import gc
import os
import re
import signal
import subprocess
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import RewardError, StoppedBySignal
from lightrft_visual.runtime import watchdog
from lightrft_visual.runtime.start_up import importing


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ended(monkeypatch, tmp_path):
    def end(code):
        raise Ended(code)

    for name in ("bound_spinning", "quiet_libraries"):
        monkeypatch.setattr(launch, name, lambda: None)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "stage", lambda: "reward")
    config = RunConfig()
    config.output.output_dir = str(tmp_path / "run")
    config.reward.remote_rm_url = "http://host/score?token=urlsecret123"

    def run(error):
        def build():
            if callable(error):
                error()
            raise error

        with pytest.raises(Ended) as caught:
            launch._run(config, build)
        return caught.value.args[0]

    return run


def log_of(folder):
    return (folder / "run" / "crash.log").read_text()


def test_a_full_device_is_said_with_the_settings_that_take_less(ended, capsys):
    assert ended(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) == 1
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("error: OutOfMemoryError: CUDA out of memory") and first.endswith("(stage reward)")
    assert any(line.startswith("for less: --auto_micro_batches false") for line in more)


@pytest.mark.parametrize("code", [0, None, 3])
def test_leaving_from_inside_a_run_is_a_failure(ended, code, capsys):
    assert ended(SystemExit(code)) == 1
    assert f"error: sys.exit({code!r}) was called before the run was done (stage reward)" in capsys.readouterr().err


def test_ctrl_c_has_the_code_that_shells_give_it(ended, capsys):
    assert ended(KeyboardInterrupt()) == 130
    assert "error: interrupted before the run was done" in capsys.readouterr().err


def test_sigterm_before_the_first_step_ends_the_run_at_once(ended, capsys):
    handlers = []
    ended(lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    with pytest.raises(Ended, match="143"):
        handlers[0](signal.SIGTERM, None)
    assert "ended by SIGTERM before the first step" in capsys.readouterr().err


def test_a_run_that_failed_leaves_the_handler_of_sigterm_that_it_found(ended):
    before = signal.getsignal(signal.SIGTERM)
    during = []
    ended(lambda: during.append(signal.getsignal(signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) is before and during[0] is not before


def test_a_reward_that_hangs_in_the_first_evaluation_leaves_the_code_of_sigterm(ended):
    assert ended(StoppedBySignal("it did not return")) == 143


def test_a_run_that_was_stopped_ends_with_the_code_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(launch, "_leave", lambda code: None)
    state = SimpleNamespace(exit_code=75, listening=nullcontext)
    trainer = SimpleNamespace(fit=lambda: None, close=lambda: None, state=state)
    with pytest.raises(SystemExit) as left:
        launch._run(RunConfig(), lambda: trainer)
    assert left.value.code == 75


def test_the_stage_stands_in_the_first_line_and_the_file_with_the_rest_in_the_last(ended, capsys, tmp_path):
    assert ended(RewardError("score raised KeyError: 'x'\n  File \"mine.py\", line 3")) == 1
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "error: RewardError: score raised KeyError: 'x' (stage reward)",
        '  File "mine.py", line 3',
        f"the full traceback, versions and configuration: {tmp_path}/run/crash.log",
    ]


def test_an_error_of_ours_is_told_in_a_line_and_in_full_in_the_log(ended, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "environment-secret")

    def goes_wrong():
        try:
            raise KeyError("environment-secret")
        except KeyError as error:
            raise ValueError("no such thing: hf_abcdefghijklmnopqrstuvwxyz") from error

    assert ended(goes_wrong) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ValueError: no such thing: *** (stage reward)\n") and "Traceback" not in told
    log = log_of(tmp_path)
    assert log.count("Traceback (most recent call last)") == 2 and "launch.py" in log and "in goes_wrong" in log
    assert "rank 0 of 1" in log and "stage reward" in log and "torch 2." in log and "rollout_batch_size:" in log
    for secret in ("environment-secret", "hf_abc", "urlsecret123"):
        assert secret not in told + log


def test_every_failure_adds_its_part(ended, tmp_path):
    for _ in range(2):
        ended(ValueError("again"))
    assert log_of(tmp_path).count("ValueError: again") == 2


def test_without_a_place_for_the_log_the_console_gets_the_traceback(ended, tmp_path, capsys):
    (tmp_path / "run").touch()
    assert ended(ValueError("x")) == 1
    told = capsys.readouterr().err
    assert (
        "Traceback (most recent call last)" in told and "error: ValueError: x" in told and "full traceback" not in told
    )


class Silent(Exception):
    def __str__(self):
        raise ZeroDivisionError


def test_an_error_that_cannot_be_written_as_text(ended, capsys, tmp_path):
    assert ended(Silent()) == 1
    assert "error: Silent: (its message cannot be had: ZeroDivisionError) (stage reward)" in capsys.readouterr().err
    assert "Silent" in log_of(tmp_path)


LEAVES = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.runtime.start_up import start_is_over

launch.LEFT_SECONDS = 1.0
atexit.register(print, "atexit")

def stays():
    time.sleep(600)

def fit():
    start_is_over()
    if "thread" in sys.argv:
        threading.Thread(target=stays, name="telemetry").start()
    if "pool" in sys.argv:
        ThreadPoolExecutor(1, thread_name_prefix="pool").submit(stays)
    if "idle" in sys.argv:
        ThreadPoolExecutor(1).submit(int).result()
    if "ends soon" in sys.argv:
        threading.Timer(0.5, print, ["ended by itself"]).start()
    if "daemon" in sys.argv:
        threading.Thread(target=stays, daemon=True).start()
    print("written last", end="")

state = SimpleNamespace(exit_code=int(sys.argv[1]), listening=nullcontext)
trainer = SimpleNamespace(fit=fit, close=lambda: None, state=state)
launch._run(RunConfig(), lambda: trainer)
if "goes on" in sys.argv:
    time.sleep(3)
    print(" and on")
"""


@pytest.fixture
def left(tmp_path):
    """Exit code and output of a program whose run leaves something."""
    (tmp_path / "leaves.py").write_text(LEAVES)

    def run(code, *what):
        command = [sys.executable, str(tmp_path / "leaves.py"), str(code), *what]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        return subprocess.run(command, env=environment, capture_output=True, timeout=120, text=True)

    return run


@pytest.mark.slow
def test_threads_that_a_run_left_and_that_never_end_are_named_and_left(left, tmp_path):
    ended = left(75, "thread", "pool")
    assert ended.returncode == 75 and ended.stdout.endswith("written last")
    for name in ("telemetry", "pool_0"):
        assert re.search(rf"threads that it started go on: .*{name}, at {tmp_path}/leaves.py, line", ended.stderr)


def test_threads_that_end_in_time_are_waited_for_without_a_word(left):
    ended = left(0, "idle", "ends soon", "daemon")
    assert ended.returncode == 0 and "go on" not in ended.stderr
    assert "atexit" in ended.stdout and "ended by itself" in ended.stdout


def test_what_an_earlier_run_left_goes_before_the_next_one_sets_its_imports_aside():
    class Left:
        pass

    left = Left()
    left.itself, gone = left, weakref.ref(left)
    with importing():  # as a start that fails behind its imports leaves it
        del left
    try:
        with launch._released_on_error(RunConfig()), importing():
            pass
        assert gone() is None
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_program_that_goes_on_after_its_run_is_not_ended(left):
    ended = left(0, "thread", "goes on")
    assert ended.returncode == 0 and "and on" in ended.stdout and "telemetry" in ended.stderr
