"""Ranks that are gone before the run's end: the others name them and end with code 1, long before a time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import ranks_environment, run_script, server
from waiting import polls

SCRIPT = Path(__file__).with_name("presence_ranks.py")
LIMIT = 60.0  # seconds in which the other ranks must have ended
LONG = "600"


class Rank:
    """A process of the script, and what it has said."""

    def __init__(self, task: tuple[str, str], environment: dict[str, str], log: Path):
        self.log = log
        arguments = (str(SCRIPT), list(task), environment, str(log))
        self.process = server().Process(target=run_script, args=arguments)
        self.process.start()
        self.kill = self.process.kill

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, limit: float) -> int:
        self.process.join(limit)
        assert self.process.exitcode is not None, self.told()
        return self.process.exitcode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Rank]]]:
    """Starts ranks, each with its own task and seconds, and waits until all of them are there."""
    begun: list[Rank] = []

    def ranks(*tasks: tuple[str, str]) -> list[Rank]:
        for rank, (task, own) in enumerate(zip(tasks, ranks_environment(dict(os.environ), len(tasks)))):
            folder = {"RUN_FOLDER": str(tmp_path / f"rank{rank}")}
            begun.append(Rank(task, own | folder, tmp_path / f"rank{rank}.log"))
        for _ in polls(LIMIT, 0.05):
            if all("ready\n" in each.told() for each in begun):
                return begun
        raise AssertionError("".join(each.told() for each in begun))

    yield ranks
    for each in begun:
        each.kill()
        each.process.join(LIMIT)


def ends(rank: Rank) -> tuple[int, str]:
    """Exit code and what it says of errors; it must end in time."""
    return rank.wait(LIMIT), rank.told()


def test_of_three_ranks_both_others_name_the_one_that_is_killed(start):
    ranks = start(("in_a_collective", LONG), ("in_a_collective", LONG), ("in_a_collective", LONG))
    ranks[2].kill()
    for each in ranks[:2]:
        code, told = ends(each)
        assert code == 1 and "error: rank 2 is gone" in told and "rank 1 is gone" not in told, told


def test_a_stopped_rank_ends_the_other_which_names_it(start, monkeypatch):
    monkeypatch.setenv("SILENCE", "10")
    ranks = start(("in_a_collective", LONG), ("in_a_collective", LONG))
    os.kill(ranks[0].process.pid, signal.SIGSTOP)
    code, told = ends(ranks[1])
    assert code == 1 and "error: rank 0 has given no sign of life for" in told, told
    assert "rank 1 ends in stage: start-up" in told


def test_a_rank_that_leaves_by_os_exit_is_gone(start):
    ranks = start(("waits", LONG), ("os_exit", "1"))
    assert ranks[1].wait(LIMIT) == 0
    code, told = ends(ranks[0])
    assert code == 1 and "error: rank 1 is gone" in told, told


def test_a_killed_rank_with_a_forked_child_is_gone(start):
    """The child has its parent's open files, the connection too, unless it gives it up."""
    ranks = start(("waits", LONG), ("forks", "90"))
    time.sleep(1.0)  # until the child is there
    ranks[1].kill()
    code, told = ends(ranks[0])
    assert code == 1 and "error: rank 1 is gone" in told, told


def test_a_rank_that_fails_is_told_with_its_error_and_not_as_gone(start):
    ranks = start(("in_a_collective", LONG), ("fails", "1"))
    assert ends(ranks[1])[0] == 1
    code, told = ends(ranks[0])
    assert code == 1 and "error: rank 1 failed: KeyError: 'no such column'" in told and "is gone" not in told, told


@pytest.mark.slow
def test_a_host_that_falls_silent_while_words_are_under_way_is_gone():
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network of its own may be made here")
    script = Path(__file__).with_name("silent_host.py")
    ran = subprocess.run([*alone, sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "rank 1 is gone: its process has ended or its host is silent" in ran.stderr, ran.stderr
