"""Files of a run can be written whatever text a model, a reward or a row brings; one live run a folder."""

import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft_visual.errors import ConfigError, FolderInUse
from lightrft_visual.runtime.files import (
    FILE_NAME,
    FolderLock,
    append_line,
    read_jsonl,
    to_json,
    wait_for_lock,
    write_atomic,
)


def test_any_text_can_be_written_and_read_back(tmp_path):
    record = {"response": "half \ud800 pair", "name": "\u2028 ä \x00"}
    path = tmp_path / "records.jsonl"
    append_line(path, to_json(record) + "\n")
    write_atomic(tmp_path / "whole.jsonl", to_json(record) + "\n")
    assert read_jsonl(path) == read_jsonl(tmp_path / "whole.jsonl") == [record]


def test_of_a_line_that_a_full_disk_takes_in_part_nothing_stays_and_the_error_is_raised(tmp_path):
    path, limits = tmp_path / "metrics.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_line(path, "step,a\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_line(path, "1,123.456\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "step,a\n"


def test_of_a_file_that_a_full_disk_refuses_no_part_stays_and_the_old_one_does(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_atomic(path, "old")

    def refuse(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new" * 1000)
    assert os.listdir(tmp_path) == ["report.html"] and path.read_text() == "old"


HOLDER = """
import os, sys, time
from pathlib import Path
from lightrft_visual.runtime.files import FolderLock

lock = FolderLock.take(Path(sys.argv[1]))
if sys.argv[2] == "alone" or os.fork() == 0:
    print(os.getpid(), flush=True)  # by the child itself: it has given the lock up by then
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the folder; gives the process, and the id that it prints."""
    processes, ids = [], []

    def start(how="alone"):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path, how], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        ids.append(int(process.stdout.readline()))
        return process, ids[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    for each in set(ids) - {process.pid for process in processes}:
        os.kill(each, signal.SIGKILL)


def test_folder_of_a_live_process_is_refused_and_the_process_named(holder, tmp_path):
    process, pid = holder()
    with pytest.raises(FolderInUse) as refused:
        FolderLock.take(tmp_path)
    assert f"output_dir {tmp_path} belongs to" in str(refused.value)
    assert f"process {pid} on host {socket.gethostname()}, since 20" in str(refused.value)


@pytest.mark.parametrize("how", ["alone", "forks"])
def test_folder_of_a_killed_process_is_free_also_when_a_forked_child_lives_on(holder, tmp_path, how):
    process, pid = holder(how)
    process.kill()
    process.wait()
    assert how == "alone" or Path(f"/proc/{pid}").exists()
    FolderLock.take(tmp_path).release()


def test_second_lock_in_the_same_process_is_refused_until_the_first_is_released(tmp_path):
    folder = tmp_path / "new" / "run"
    first = FolderLock.take(folder)
    with pytest.raises(FolderInUse, match=f"process {os.getpid()} "):
        FolderLock.take(folder)
    first.release()
    assert list(folder.iterdir()) == []
    (folder / FILE_NAME).write_text(json.dumps({"pid": 1, "host": "x" * 500, "since": "then"}))  # of a killed run
    second = FolderLock.take(folder)
    assert json.loads((folder / FILE_NAME).read_text())["pid"] == os.getpid()
    first.release()  # again: nothing of the second's
    assert (folder / FILE_NAME).exists()
    with pytest.raises(FolderInUse):
        FolderLock.take(folder)
    del second  # what nothing refers to is released
    gc.collect()
    FolderLock.take(folder).release()


def test_forked_child_that_ends_by_itself_leaves_the_lock(tmp_path):
    lock = FolderLock.take(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            lock.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(FolderInUse):
        FolderLock.take(tmp_path)
    lock.release()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": 3}'])
def test_holder_that_has_not_written_its_name_yet_is_refused_all_the_same(tmp_path, text):
    lock = FolderLock.take(tmp_path)
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(FolderInUse, match="a process that has just started"):
        FolderLock.take(tmp_path)
    lock.release()


def test_a_lock_is_let_go_of_also_where_its_file_cannot_be_removed(tmp_path, monkeypatch):
    """On a file system that became read-only, which another error tells of."""

    def refuses(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    lock = FolderLock.take(tmp_path)
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", refuses)
        lock.release()
    FolderLock.take(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_file_that_its_owner_removes_while_we_open_it_is_opened_again(tmp_path, monkeypatch):
    """Else two runs would each hold a lock, on files of one name."""
    gone, flock = FolderLock.take(tmp_path), fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        gone.release()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FolderLock.take(tmp_path)
    with pytest.raises(FolderInUse):
        FolderLock.take(tmp_path)
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert FolderLock.take(tmp_path) is None
    assert f"output_dir {tmp_path}: its file system has no file locks" in caplog.text
    assert os.strerror(code) in caplog.text
    with open(tmp_path / "shared", "a") as file:
        wait_for_lock(file)  # nor does a file of ranks, which is opened with others


def test_folder_that_cannot_be_written_or_is_full_is_a_config_error_and_leaves_no_lock(tmp_path, monkeypatch):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        FolderLock.take(tmp_path / "run")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="No space left") as refused:
        patch.setattr(os, "write", full)
        FolderLock.take(tmp_path)
    FolderLock.take(tmp_path).release()
    assert not isinstance(refused.value, FolderInUse)
