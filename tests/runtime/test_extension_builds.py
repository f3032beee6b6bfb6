"""Extensions are built by one process at a time, and a lock of torch's builder counts as long as its owner lives."""

import os
import subprocess
import sys
import threading
import time

import pytest
from forked import server
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton
from waiting import polls

from lightrft_visual.errors import ConfigError
from lightrft_visual.runtime import extension_builds
from lightrft_visual.runtime.extension_builds import building, environment_name, is_held, own_folder, remove_stale_locks

HOLDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(60)"


def build_for_ever(folder: str) -> None:
    """Compiles as torch's builder does: its lock file is there for as long as the compiler runs."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    with building() as own:
        (own / "nothing").mkdir()
        assert FileBaton(own / "nothing" / "lock").try_acquire()
        time.sleep(600)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "part").mkdir()
    return tmp_path


@pytest.fixture
def lock(folder):
    return folder / "part" / "lock"


@pytest.fixture
def holder(lock):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_building_in_a_folder_that_cannot_be_written_names_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file/builds"))
    with pytest.raises(ConfigError, match="file/builds: set TORCH_EXTENSIONS_DIR to a folder"), building():
        pass


def test_a_lock_whose_owner_was_killed_is_removed_with_a_line(folder, lock, holder, caplog):
    assert is_held(lock)
    remove_stale_locks(folder)
    assert lock.exists() and not caplog.text
    holder.kill()
    holder.wait()
    remove_stale_locks(folder)
    assert not lock.exists() and f"removing {lock}" in caplog.text


def test_a_young_lock_may_be_another_hosts(lock, monkeypatch):
    lock.touch()
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert is_held(lock)
    long_ago = time.time() - extension_builds.OTHER_HOSTS - 1
    os.utime(lock, (long_ago, long_ago))
    assert not is_held(lock)


@pytest.mark.slow
def test_a_build_after_a_killed_one_does_not_wait(folder, monkeypatch):
    """The killed process held our lock and torch's."""
    builder = server().Process(target=build_for_ever, args=(str(folder),))
    builder.start()
    try:
        assert any((folder / "nothing" / "lock").exists() for _ in polls(120))
    finally:
        builder.kill()
        builder.join()

    def built(**arguments):
        raise RuntimeError("the compiler runs")

    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", built)
    source = folder / "nothing.cpp"
    source.write_text("int nothing() { return 0; }")
    with building(), pytest.raises(RuntimeError, match="the compiler runs"):
        cpp_extension.load("nothing", [str(source)])
    assert not (folder / "nothing" / "lock").exists()


def test_one_process_builds_while_others_wait_with_a_line(folder, monkeypatch, caplog):
    monkeypatch.setattr(extension_builds, "PATIENCE", 0.0)
    order, inside = [], threading.Event()

    def second():
        inside.wait(20)
        with building():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with building():
        inside.set()
        while "waiting for another process" not in caplog.text and thread.is_alive():
            time.sleep(0.01)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_a_build_that_takes_long_is_told(folder, monkeypatch, caplog):
    monkeypatch.setattr(extension_builds, "PATIENCE", 0.0)

    class Slow:
        NAME = "slow_part"

        def is_compatible(self, verbose):
            return True

        def load(self, verbose):
            assert any("compiling DeepSpeed's slow_part" in caplog.text for _ in polls(20))

    monkeypatch.setattr(type(extension_builds.get_accelerator()), "create_op_builder", lambda self, name: Slow())
    extension_builds.build_first("anything")


def test_environments_build_in_folders_of_their_own(monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    own = environment_name()
    assert own_folder().name == own and os.environ.pop("TORCH_EXTENSIONS_DIR").endswith(own)
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert environment_name() != own
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    assert str(own_folder()) == os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen"
