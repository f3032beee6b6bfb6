"""A lock of torch's extension builder counts as long as its owner lives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension
from waiting import polls

from lightrft_visual.errors import ConfigError
from lightrft_visual.strategy import extension_builds
from lightrft_visual.strategy.extension_builds import OwnedBaton, owner, watch_locks

HOLDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(60)"


@pytest.fixture
def lock(tmp_path):
    return str(tmp_path / "lock")


@pytest.fixture
def holder(lock):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def told(caplog) -> bool:
    """Once there is a line."""
    return any(caplog.text for _ in polls(60, 0.02))


def baton_of(lock: str) -> OwnedBaton:
    return OwnedBaton(lock, wait_seconds=0.01)


def test_a_lock_whose_owner_was_killed_is_taken_away_and_said(lock, holder, caplog):
    assert owner(lock) == f"process {holder.pid}" and baton_of(lock).try_acquire() is False
    holder.kill()
    holder.wait()
    assert os.path.exists(lock)
    baton = baton_of(lock)
    assert baton.try_acquire() is True and f"removing {lock}" in caplog.text
    assert owner(lock) == f"process {os.getpid()}"
    baton.release()
    assert not os.path.exists(lock)


def test_of_several_that_find_a_stale_lock_one_gets_it(lock):
    open(lock, "w").close()
    batons, got = [baton_of(lock) for _ in range(8)], []
    threads = [threading.Thread(target=lambda each=baton: got.append(each.try_acquire())) for baton in batons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_a_live_owner_is_waited_for_with_a_line(lock, holder, caplog):
    threading.Thread(target=lambda: told(caplog) and os.remove(lock)).start()
    baton_of(lock).wait()
    assert f"waiting for process {holder.pid}" in caplog.text and not os.path.exists(lock)


def test_an_owner_that_dies_while_it_is_waited_for_ends_the_wait(lock, holder):
    threading.Timer(0.2, holder.kill).start()
    threading.Timer(0.2, holder.wait).start()
    with pytest.raises(ConfigError, match="ended before it was done"):
        baton_of(lock).wait()


def test_a_young_lock_may_be_another_hosts(lock, monkeypatch):
    open(lock, "w").close()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert owner(lock) == "a process of another host"
    long_ago = time.time() - extension_builds.OTHER_HOSTS - 1
    os.utime(lock, (long_ago, long_ago))
    assert owner(lock) is None


def test_torchs_builder_does_not_hang_on_a_stale_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)
    watch_locks()
    (tmp_path / "lock").touch()

    def built(**arguments):
        raise RuntimeError("the compiler runs")

    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", built)
    source = tmp_path / "nothing.cpp"
    source.write_text("int nothing() { return 0; }")
    with pytest.raises(RuntimeError, match="the compiler runs"):
        cpp_extension.load("nothing", [str(source)], build_directory=str(tmp_path))
    assert not (tmp_path / "lock").exists()


def test_an_owner_is_not_looked_for_all_the_time(lock, holder, monkeypatch):
    """It is looked for in the open files of all processes: a wait spends a small share of its time on that."""
    looked, clock = [], [0.0]

    def passes(seconds):
        clock[0] += seconds
        if clock[0] > 10 and os.path.exists(lock):
            os.remove(lock)

    def slow(path):
        looked.append(path)
        passes(0.02)
        return "somebody"

    monkeypatch.setattr(extension_builds, "owner", slow)
    monkeypatch.setattr(extension_builds, "time", SimpleNamespace(sleep=passes, monotonic=lambda: clock[0]))
    baton_of(lock).wait()
    assert 10 < len(looked) < 30 and 0.02 * len(looked) < 1.2 * extension_builds.LOOKING * 10


def test_environments_build_in_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    own = extension_builds.environment_name()
    watch_locks()
    assert os.path.basename(os.environ.pop("TORCH_EXTENSIONS_DIR")) == own
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert extension_builds.environment_name() != own
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    watch_locks()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen"
