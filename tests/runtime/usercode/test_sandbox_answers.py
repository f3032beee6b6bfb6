"""Each call of a function in its own process gets its own answer, or an error; never another call's answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from lightrft_visual.errors import RewardError
from lightrft_visual.runtime.usercode.calls import Failed, Interrupted
from lightrft_visual.runtime.usercode.sandbox import HEAD, CallTimeout, Connection, Worker, from_json, to_json

SOURCE = '''
import os, stat, subprocess, sys, threading, time

def pipe():
    """The socket to the run, wherever it is."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return next(n for n in numbers if os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISSOCK(os.fstat(n).st_mode))

def later(seconds, fd, data):
    time.sleep(seconds)
    os.write(fd, data)

def child(action, *arguments):
    """In a forked process that keeps the pipe open and does not come back."""
    fd = os.dup(pipe())
    if os.fork() == 0:
        try:
            action(*(fd if each is pipe else each for each in arguments))
        finally:
            os._exit(0)

def score(number, how, data="", seconds=0.0):
    data = data.encode("latin-1")
    if how == "forks and both return":
        os.fork()
    if how == "forks and the child returns late":
        if os.fork() == 0:
            time.sleep(seconds)
    if how == "forks and the child raises":
        if os.fork() == 0:
            raise ValueError("of the child")
    if how == "writes":
        os.write(pipe(), data)
    if how == "writes and dies":
        os.write(pipe(), data)
        os.kill(os.getpid(), 9)
    if how == "writes late":
        threading.Thread(target=later, args=(seconds, pipe(), data), daemon=True).start()
    if how == "a child writes late":
        child(later, seconds, pipe, data)
    if how == "a child writes late, and this hangs":
        child(later, seconds, pipe, data)
        time.sleep(60)
    if how == "sleeps":
        time.sleep(seconds)
    if how == "closes low files":
        os.closerange(3, 64)
    if how == "returns odd things":
        import numpy as np
        return {"complex": np.array([1j]), "date": np.array([1], "datetime64[s]"), "digits": [10**6000]}[data.decode()]
    if how == "prints":
        print(data.decode())
        os.write(1, data)
        sys.__stdout__.write(data.decode())
        subprocess.run(["echo", data.decode()], check=True)
    if how == "writes to low files":
        for fd in range(1, 64):
            try:
                os.write(fd, data)
            except OSError:
                pass
    if how == "starts a program":
        return os.system("for n in /proc/self/fd/*; do readlink $n; done | grep -q ^socket")
    return number
'''
METRICS = {"failed": [0.0, 1.0]}, {"tuple": [1.0]}, {"failed": 1.0, "tuple": 0.0}
SPOILED = "sent what is no answer to this call"


def line(request: int, **answer) -> str:
    """A whole message of ours."""
    return json.dumps({"request": request, **answer}) + "\n"


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    worker = Worker(f"{path}:score")
    yield worker
    worker.close()


def call(worker, number, how="", data="", seconds=0.0, limit=20.0):
    return worker.call({"number": number, "how": how, "data": data, "seconds": seconds}, limit)


def test_answers_of_a_function_that_forks_and_returns_twice_or_raises_in_the_child_are_its_calls_own(worker, capfd):
    ways, answers = ("forks and both return", "", "forks and the child returns late", "", ""), []
    for number, how in enumerate(ways, start=1):
        answers.append(call(worker, number, how, seconds=0.5))
        time.sleep(0.3)
    assert answers == [1, 2, 3, 4, 5]
    assert capfd.readouterr().err.count("forked a process that came back") == 2
    assert [call(worker, 6, "forks and the child raises"), call(worker, 7), call(worker, 8)] == [6, 7, 8]


STRAY = {
    "duplicate": line(1, result=9), "of another call": line(7, result=9), "torn": line(1, result=9)[:-5],
    "no object": "[1]\n", "no text": "\xff",
}  # fmt: skip


@pytest.mark.parametrize("kind", STRAY)
def test_stray_bytes_in_the_pipe_fail_the_call_and_the_next_one_works(worker, kind):
    with pytest.raises(RewardError, match=f"reward function score: its process {SPOILED}"):
        call(worker, 1, "writes", STRAY[kind])
        call(worker, 2)
    assert [call(worker, number) for number in (3, 4, 5)] == [3, 4, 5]


@pytest.mark.parametrize("how", ["writes late", "a child writes late"])
def test_bytes_that_come_after_the_answer_fail_the_next_call(worker, how):
    data = line(1, result=9) if how == "writes late" else line(1, place=", at x")
    assert call(worker, 1, how, data, seconds=0.3) == 1
    time.sleep(1.0)
    with pytest.raises(RewardError, match=SPOILED):
        call(worker, 2)
    assert call(worker, 3) == 3


def test_torn_reply_of_a_process_that_dies_is_no_answer(worker):
    with pytest.raises(CallTimeout, match="its process died"):
        call(worker, 1, "writes and dies", '{"request": 1, "result": 9}')
    assert call(worker, 2) == 2


def test_reply_to_a_call_that_timed_out_reaches_no_later_call(worker):
    late = line(1, result=9) + line(2, result=9)
    with pytest.raises(CallTimeout, match="no result within 1 s"):
        call(worker, 1, "a child writes late, and this hangs", late, seconds=1.5, limit=1.0)
    assert call(worker, 2) == 2
    time.sleep(1.5)
    assert [call(worker, 3), call(worker, 4)] == [3, 4]


def test_what_the_function_prints_is_no_answer(worker, capfd):
    assert call(worker, 1, "prints", line(1, result=9)) == 1 and call(worker, 2) == 2
    told = capfd.readouterr()
    assert told.err.count('"result": 9') == 4 and not told.out


def test_neither_programs_that_the_function_starts_nor_files_by_number_reach_the_pipe(worker):
    assert os.waitstatus_to_exitcode(call(worker, 1, "starts a program")) == 1
    for number, how in enumerate(("writes to low files", "closes low files", ""), start=2):
        assert call(worker, number, how, line(number, result=9)) == number


@pytest.fixture
def served(worker):
    """Calls of a process that answers each by one of these texts; ID is that of the request, OLD that of the first."""
    ours, theirs = socket.socketpair()
    ids: list[str] = []

    def serve(lines):
        reader = theirs.makefile("rb")
        for each in lines:
            number, length = HEAD.unpack(reader.read(HEAD.size))
            reader.read(length)
            ids.append(number.decode())
            theirs.sendall(each.replace("ID", ids[-1]).replace("OLD", ids[0]).encode())

    def calls(*lines):
        threading.Thread(target=serve, args=(lines,), daemon=True).start()
        return [worker.call({"number": number}, 20.0) for number in range(len(lines))]

    worker._connection = Connection(ours)
    worker._process = subprocess.Popen(["sleep", "600"])
    yield calls
    theirs.close()


def test_answers_with_the_id_of_their_request_are_taken(served):
    told = [json.dumps({"request": "ID", **answer}) + "\n" for answer in ({"place": ", at x"}, {"result": 1})]
    assert served("".join(told), told[1]) == [1, 1]


@pytest.mark.parametrize("old", ["ID", "OLD"])
def test_duplicated_answer_fails_its_call_or_the_next_one(served, old):
    answer = json.dumps({"request": "ID", "result": 1}) + "\n"
    with pytest.raises(RewardError, match=SPOILED):
        served(*([answer * 2] if old == "ID" else [answer, answer.replace("ID", old)]))


def test_call_that_a_signal_ends_leaves_no_answer_behind(worker):
    def ends(*_):
        raise Interrupted("ended by the test")

    assert call(worker, 1) == 1
    before, main = signal.signal(signal.SIGUSR1, ends), threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            call(worker, 2, "sleeps", seconds=1.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert call(worker, 3) == 3


def test_result_that_cannot_leave_the_process_is_an_error_and_the_process_lives(worker):
    assert call(worker, 1) == 1
    process = worker._process
    for data, told in (("complex", "a complex"), ("date", "a datetime"), ("digits", "digits")):
        with pytest.raises(RewardError, match=told):
            call(worker, 2, "returns odd things", data)
    assert call(worker, 3) == 3 and worker._process is process


@pytest.mark.parametrize("value", [*METRICS, ([1.0, Failed("no answer")], METRICS[0]), [METRICS[1], (1.0,)]])
def test_metrics_of_any_name_leave_the_process_as_they_are_beside_tuples_and_failed_samples(value):
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


LATE = """
import os, time

def wait():
    open({begun!r}, "w").close()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.02)
{rest}
"""
RUN = """
import json, os, socket, sys, threading, time
from lightrft_visual.runtime.usercode.sandbox import Worker, started

busy, spec, begun = sys.argv[1:]
ours, theirs = socket.socketpair()
environment = "lightrft_visual.rollout.environment_process", json.dumps({"environment": spec}), theirs
work, arguments = (started, environment) if busy == "environment" else (Worker(spec).call, ({"prompts": ["a"]}, 4))
threading.Thread(target=work, args=arguments, daemon=True).start()
while not os.path.exists(begun):
    time.sleep(0.02)
os._exit(9)
"""
ENDED = {
    "call": "def score(prompts):\n    wait()\n    return [1.0]",
    "long call": "def score(prompts):\n    wait()\n    time.sleep(2.5)",  # tells at half of its limit where it is
    "loading": "wait()",
    "environment": "wait()\nscore = int",
}


@pytest.mark.parametrize("busy", ENDED)
def test_a_process_of_users_code_whose_run_has_ended_ends_without_a_word(tmp_path, busy):
    begun, path = tmp_path / "begun", tmp_path / "mine.py"
    path.write_text(LATE.format(begun=str(begun), rest=ENDED[busy]))
    command = [sys.executable, "-c", RUN, busy, f"{path}:score", str(begun)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (9, "", "")  # read until its child has ended too
