"""How a run ends that was not done."""

import gc
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from forked import on_ranks, run_alone
from transformers.utils import logging as transformers_logging
from waiting import finished

from lightrft_visual import launch
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import RewardError, StoppedBySignal
from lightrft_visual.runtime import watchdog
from lightrft_visual.runtime.seeding import choose_deterministic, seed_everything
from lightrft_visual.runtime.start_up import importing
from lightrft_visual.runtime.usercode.surroundings import put_back


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

    def run(error, config=config):
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


def test_the_first_rank_that_fails_says_how_the_run_ended_and_none_before_a_run_began(ended, monkeypatch, tmp_path):
    with monkeypatch.context() as starting:
        starting.setattr(watchdog, "stage", lambda: watchdog.STARTING)
        ended(RewardError("no such server"))
    assert not (tmp_path / "run" / "ended.json").exists()
    ended(ValueError("token=hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"))
    ended(RuntimeError("connection closed by peer"))
    told = json.loads((tmp_path / "run" / "ended.json").read_text())
    assert told == {"how": "failed", "text": "ValueError: token=*** (stage reward)"}


def test_a_full_device_is_said_with_the_settings_that_take_less(ended, capsys):
    assert ended(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) == 1
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("error: OutOfMemoryError: CUDA out of memory") and first.endswith("(stage reward)")
    assert any(line.startswith("for less: --auto_micro_batches false") for line in more)


def test_a_full_device_of_a_supervised_run_names_no_setting_that_it_has_not(ended, capsys, tmp_path):
    supervised = SFTRunConfig()
    supervised.output.output_dir = str(tmp_path / "run")
    assert ended(torch.OutOfMemoryError("CUDA out of memory"), supervised) == 1
    told = capsys.readouterr().err
    assert "for less: a smaller --micro_train_batch_size" in told and "auto_micro_batches" not in told


class Silent(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SystemExit(0), 1, "sys.exit(0) was called before the run was done (stage reward)"),
        (KeyboardInterrupt(), 130, "interrupted before the run was done"),
        (StoppedBySignal("it did not return"), 1, "it did not return"),  # a reward that hangs in an evaluation
        (Silent(), 1, "Silent: (its message cannot be had: ZeroDivisionError) (stage reward)"),
    ],
)
def test_every_way_to_leave_a_run_has_its_code_and_line_and_adds_to_the_log(ended, error, code, told, capsys, tmp_path):
    assert ended(ValueError("before")) == 1 and ended(error) == code
    assert told in capsys.readouterr().err
    assert "ValueError: before" in log_of(tmp_path) and type(error).__name__ in log_of(tmp_path)


def test_sigterm_before_the_first_step_ends_the_run_at_once_and_its_handler_goes_with_the_run(ended, capsys):
    handlers, before = [], signal.getsignal(signal.SIGTERM)
    ended(lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) is before and handlers[0] is not before
    for number, code, name in ((signal.SIGTERM, 1, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")):
        with pytest.raises(Ended, match=f"^{code}$"):
            handlers[0](number, None)
        assert f"ended by {name} before the first step" in capsys.readouterr().err


def test_a_run_that_was_stopped_ends_with_the_code_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(launch, "_leave", lambda code: None)
    state = SimpleNamespace(exit_code=75, stopped=True, listening=nullcontext)
    trainer = SimpleNamespace(fit=lambda: None, close=lambda: None, state=state)
    with pytest.raises(SystemExit) as left:
        launch._run(RunConfig(), lambda: trainer)
    assert left.value.code == 75


def leaves_behind_rank_0(mark: str) -> bool:
    """Rank 0 writes its report while others leave; an engine of vLLM ends the process group as it closes."""
    torch.distributed.init_process_group("gloo")
    done, rank = Path(mark), torch.distributed.get_rank()

    def fit():
        if rank == 0:
            time.sleep(1)
            done.touch()

    state = SimpleNamespace(exit_code=143, stopped=True, listening=nullcontext)
    launch._train(SimpleNamespace(fit=fit, close=torch.distributed.destroy_process_group, state=state))
    return done.exists()


@pytest.mark.slow
def test_a_rank_that_was_stopped_leaves_when_all_have_done_their_last_work(tmp_path):
    assert on_ranks(leaves_behind_rank_0, str(tmp_path / "done")) == [True, True]


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


def test_without_a_place_for_the_log_the_console_gets_the_traceback(ended, tmp_path, capsys):
    (tmp_path / "run").touch()
    assert ended(ValueError("x")) == 1
    told = capsys.readouterr().err
    assert (
        "Traceback (most recent call last)" in told and "error: ValueError: x" in told and "full traceback" not in told
    )


# Imports are made once: each case is a child of the same program.
LEAVES = """
import atexit, json, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.runtime.start_up import start_is_over
import torch.distributed
from transformers.utils import logging

cases, codes = json.loads(sys.argv[1]), {}
for name, words in cases.items():
    if child := os.fork():
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        continue
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv[1:] = words
    break
else:
    print(json.dumps(codes))
    sys.exit()

launch.LEFT_SECONDS = 1.0
atexit.register(print, "atexit")

def stays():
    time.sleep(600)

def fit():
    start_is_over()
    if "refused" in sys.argv:
        raise ConfigError("this model does not fit this algorithm")
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

state = SimpleNamespace(exit_code=int(sys.argv[1]), stopped=False, listening=nullcontext)
trainer = SimpleNamespace(fit=fit, close=lambda: None, state=state)
launch._run(RunConfig(), lambda: trainer)
if "goes on" in sys.argv:
    time.sleep(3)
    print(" and on")
"""


CASES = {
    "stays": ["75", "thread", "pool"],
    "ends": ["0", "idle", "ends soon", "daemon"],
    "goes_on": ["0", "thread", "goes on"],
    "refused": ["0", "refused"],
}


@pytest.mark.slow
def test_threads_that_a_run_left_are_waited_for_or_named_and_exit_codes_are_those_of_the_contract(tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, str(tmp_path / "leaves.py"), json.dumps(CASES)]
    done = finished(command, 300, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"stays": 75, "ends": 0, "goes_on": 0, "refused": 2}
    told, errors = ({name: (tmp_path / f"{name}.{kind}").read_text() for name in CASES} for kind in ("out", "err"))
    assert told["stays"].endswith("written last")
    for name in ("telemetry", "pool_0"):
        assert re.search(rf"threads that it started go on: .*{name}, at .*leaves.py, line", errors["stays"])
    assert "go on" not in errors["ends"] and "atexit" in told["ends"] and "ended by itself" in told["ends"]
    assert "and on" in told["goes_on"] and "telemetry" in errors["goes_on"]
    assert "error: ConfigError: this model does not fit" in errors["refused"]


def test_what_an_earlier_run_left_goes_before_the_next_one_sets_its_imports_aside():
    class Left:
        pass

    left = Left()
    left.itself, gone = left, weakref.ref(left)
    with importing():  # as a start that fails behind its imports leaves it
        del left
    try:
        with launch._released_on_error(planned=True), importing():
            pass
        assert gone() is None
    finally:
        gc.unfreeze()


def test_an_error_that_a_notebook_keeps_holds_no_model_but_the_variables_of_users_code():
    class Engine:
        def close(self):
            pass

    class Trainer(Engine):
        def __init__(self):
            self.engine, self.recorder = Engine(), Engine()

    models = []

    def users(calls):
        mine = 3
        calls.pop()(torch.ones(mine))  # of the wrong size; frames of torch hold the model

    def run():
        with launch._released_on_error(planned=True) as held:
            held.append(trainer := Trainer())
            calls = [torch.nn.Sequential(torch.nn.Linear(2, 2))]
            models.extend(map(weakref.ref, (trainer.engine, calls[0])))
            users(calls)

    with pytest.raises(RuntimeError) as kept:
        run()
    gc.collect()
    assert [model() for model in models] == [None, None]
    assert [entry.frame.f_locals["mine"] for entry in kept.traceback if entry.name == "users"] == [3]


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("fails", [False, True])
def test_random_states_of_a_program_go_on_after_a_run_as_if_there_had_been_none(fails):
    seed_everything(3)
    expected = [draws(), draws()]
    seed_everything(3)
    found = [draws()]
    with pytest.raises(ValueError) if fails else nullcontext():
        with launch._released_on_error(planned=True):
            seed_everything(7)
            draws()
            if fails:
                raise ValueError
    assert [*found, draws()] == expected


def test_users_functions_draw_the_same_numbers_in_a_second_run_of_a_seed():
    with put_back("a call before any run"):
        draws()

    def run(seed):
        with launch._released_on_error(planned=True):
            seed_everything(seed)
            with put_back("mine"):
                return draws()

    assert run(7) == run(7) != run(8)


def surroundings():
    """Of a program: what libraries are quiet by."""
    levels = {name: logging.getLogger(name).level for name in ("", *launch.TALKING)}
    bars = [each.is_progress_bar_enabled() for each in (transformers_logging, diffusers_logging)]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return list(logging.root.handlers), levels, list(warnings.filters), dict(os.environ), bars, deterministic


@pytest.mark.parametrize("fails", [False, True])
def test_logging_warnings_and_environment_of_a_program_are_its_own_after_a_run(monkeypatch, capsys, fails):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    for name in launch.QUIET.keys() - {"VLLM_LOGGING_LEVEL"}:
        monkeypatch.delenv(name, raising=False)
    before = surroundings()
    with pytest.raises(ValueError) if fails else nullcontext():
        with launch._released_on_error(planned=True):
            os.environ["VLLM_NO_USAGE_STATS"] = "1"  # as an engine does
            choose_deterministic()
            transformers_logging.disable_progress_bar()  # as a start does
            diffusers_logging.disable_progress_bar()
            logging.getLogger("lightrft_visual.trainer").info("a line of the run")
            with warnings.catch_warnings(record=True) as caught:
                warnings.warn("old", FutureWarning, stacklevel=1)
            assert not caught and os.environ["TOKENIZERS_PARALLELISM"] == "false"
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and logging.getLogger("vllm").level == logging.ERROR
            if fails:
                raise ValueError
    assert surroundings() == before and capsys.readouterr().err == "a line of the run\n"


def test_a_program_with_handlers_of_its_own_gets_none_in_a_run_and_keeps_what_libraries_filter(monkeypatch):
    own = logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [own])
    with warnings.catch_warnings():
        with launch._released_on_error(planned=True):
            assert logging.root.handlers == [own] and logging.root.level == logging.WARNING
            warnings.filterwarnings("ignore", "of a library")  # as one does when it is imported
        assert warnings.filters[0][1].pattern == "of a library"


GROUPS = """
import os, sys
import torch.distributed as dist
from lightrft_visual import launch
from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy

def run():
    with launch._released_on_error(planned=True):
        DeepspeedStrategy(DistributedConfig()).setup_distributed()
        assert dist.is_initialized() and [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == ["0", "1"]

def program():
    return {name: os.environ.get(name) for name in launch.PLACE}, sys.excepthook

os.environ["WORLD_SIZE"] = "8"  # left over in a shell
before = program()
for _ in range(2):
    run()
    assert not dist.is_initialized() and program() == before, program()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run()
assert dist.is_initialized() and program()[0] == before[0], program()
dist.destroy_process_group()
run()
assert not dist.is_initialized()
print("all well")
"""


def test_process_group_and_variables_of_a_run_go_with_it_and_a_programs_own_stay(tmp_path):
    (tmp_path / "groups.py").write_text(GROUPS)
    assert run_alone(tmp_path / "groups.py", limit=120).splitlines()[-1] == "all well"


PRESSED = """
import signal, sys
from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig

class Press:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press)
try:
    launch.run(RunConfig())
except KeyboardInterrupt:
    sys.meta_path.remove(Press)
    import torch, torchvision
    print("raised", sys.argv[1] in sys.modules, torch.ones(2).sum().item())
"""


@pytest.mark.parametrize("module", ["torch.nn", "transformers.utils"])
def test_ctrl_c_while_libraries_are_imported_leaves_them_whole_for_a_second_run(module):
    done = subprocess.run([sys.executable, "-c", PRESSED, module], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("raised True 2.0"), done.stdout + done.stderr[-2000:]
