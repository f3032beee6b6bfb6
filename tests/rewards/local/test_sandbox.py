import re
import signal
import time
from pathlib import Path

import pytest
from reward_rollouts import make_samples

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import RewardError
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.runtime.presence import handled
from lightrft_visual.runtime.usercode.calls import Interrupt, StopRequest

SOURCE = """
import os
import torch
from lightrft_visual.runtime.usercode.calls import Failed

async def score(completions, level, images):
    print("noise on stdout")
    if completions[0] == "hang":
        while True:
            pass
    if completions[0] == "raise":
        raise ValueError("what went wrong")
    if completions[0].startswith("exit"):
        raise SystemExit(int(completions[0][-1]))
    if completions[0].startswith("die"):
        os._exit(int(completions[0][-1]))
    if completions[0] == "interrupt":
        raise KeyboardInterrupt
    entries = [float(len(c) + (l or 0) + len(i)) for c, l, i in zip(completions, level, images)]
    if completions[0] == "odd":
        return [Failed("odd one"), None]
    return torch.tensor(entries), {"half": torch.tensor(entries) / 2}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def engine(path):
    config = RewardConfig(reward_fn=f"{path}:score", reward_fn_timeout=4.0, reward_max_invalid=1.0)
    engine = RewardComputationEngine.from_config(config)
    yield engine
    engine.close()


def rewards(engine, first):
    return engine.compute_rewards([make_samples([first, "bb"], metadata=[{"level": 3}, {}])])


def test_arguments_and_results_cross(engine):
    result = rewards(engine, "a")
    assert result.score.tolist() == [4, 2] and result.components["half"].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("hang", r"no result within 4 s, at .*mine.py, line (9|10)"),
        ("die 3", r"its process died \(exit code 3\)"),
    ],
)
@pytest.mark.slow
def test_a_lost_call_is_invalid_and_the_next_one_works(engine, first, words, caplog):
    started = time.monotonic()
    result = rewards(engine, first)
    assert time.monotonic() - started < 60
    assert not result.valid.any() and re.search(words, caplog.text)
    assert rewards(engine, "a").valid.all()


@pytest.mark.parametrize(
    ("first", "told", "line"),
    [
        ("raise", "raised ValueError: what went wrong", 12),
        ("exit 0", "called sys.exit(0)", 14),
        ("interrupt", "raised KeyboardInterrupt", 18),
    ],
)
def test_an_exception_or_leaving_the_process_is_an_error_with_the_users_own_line(engine, path, first, told, line):
    where = f'reward function score {told}\n  File "{path}", line {line}, in score\n    raise '
    with pytest.raises(RewardError, match=re.escape(where)):
        rewards(engine, first)


def test_failed_and_none_cross(engine):
    result = rewards(engine, "odd")
    assert not result.valid.any() and result.metrics["reward/score/failures"] == 1


def test_what_a_function_has_started_ends_with_it_at_its_time_limit(tmp_path):
    source = """
import os, subprocess, sys, time

def score(completions):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(completions[0], "w").write(str(child.pid))
    time.sleep(600)
"""
    (tmp_path / "mine.py").write_text(source)
    told = tmp_path / "pid"
    config = RewardConfig(reward_fn=f"{tmp_path}/mine.py:score", reward_fn_timeout=2.0, reward_max_invalid=1.0)
    engine = RewardComputationEngine.from_config(config)
    try:
        assert not engine.compute_rewards([make_samples([str(told)])]).valid.any()
        stat = Path(f"/proc/{told.read_text()}/stat")
        end = time.monotonic() + 20
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
            time.sleep(0.05)
        assert time.monotonic() < end
    finally:
        engine.close()


ASKS_CHILDREN_TO_END = """
import multiprocessing, os, signal, subprocess, sys, time

forks = multiprocessing.get_context("fork")

def waits(event):
    event.wait(20)
    sys.exit(7)

def score(completions):
    pressed = forks.Process(target=waits, args=(event := forks.Event(),))
    pressed.start()
    os.kill(pressed.pid, signal.SIGINT)  # as a terminal does with all
    event.set()
    pressed.join(20)
    forked = forks.Process(target=time.sleep, args=(600,))
    forked.start()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked.terminate(), started.terminate()
    forked.join(20)
    try:
        ended = forked.exitcode == -15 and started.wait(20) == -15
        return [float(ended and pressed.exitcode == 7)] * len(completions)
    finally:
        forked.kill(), started.kill()
"""


@pytest.mark.parametrize("seconds", [None, 120.0])
def test_children_of_a_function_end_when_it_asks_them_to_and_not_by_ctrl_c(tmp_path, seconds):
    (tmp_path / "mine.py").write_text(ASKS_CHILDREN_TO_END)
    config = RewardConfig(reward_fn=f"{tmp_path}/mine.py:score", reward_fn_timeout=seconds)
    engine = RewardComputationEngine.from_config(config)
    try:
        with handled(signal.SIGTERM, StopRequest()), handled(signal.SIGINT, Interrupt()):  # as in a run
            assert rewards(engine, "x").score.tolist() == [1.0, 1.0]
    finally:
        engine.close()
