"""What a run says while it starts and what it does not import; what others print goes to its log, an error last."""

import gc
import io
import os
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from lightrft_visual.config.load import _print_once
from lightrft_visual.errors import OutputClosed
from lightrft_visual.runtime.presence import handled
from lightrft_visual.runtime.start_up import cleaned, importing, log_stage, seldom_collecting

BEGUN = """
import sys
from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError
early = {"torch", "transformers", "deepspeed"} & set(sys.modules)

def build():
    import lightrft_visual.observe.report.page, lightrft_visual.rollout.vllm.engine, lightrft_visual.trainer.vl.trainer
    late = {"diffusers", "vllm", "ray", "wandb", "bokeh", "peft"} & set(sys.modules)
    print("found", sorted(early | late), file=launch.screen(), flush=True)
    raise ConfigError("that is all")

config = RunConfig()
config.output.output_dir = sys.argv[1]
launch._run(config, build)
"""


@pytest.mark.slow
def test_a_vision_language_run_imports_no_diffusers_its_start_no_torch_and_idle_threads_spin_boundedly(tmp_path):
    others = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD")  # the last one: vLLM in this process sets it
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    environment = inherited | {"PYTHONWARNINGS": "ignore", "OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-c", BEGUN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "found []" in done.stdout, done.stdout + done.stderr[-2000:]
    told = done.stderr + (tmp_path / "log.txt").read_text()  # of every OpenMP library that is loaded
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told)) == {"50000"}


def test_the_first_rank_alone_says_what_begins(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    log_stage("loading the models")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    log_stage("loading the models")
    assert capsys.readouterr().out.endswith(" s] loading the models\n")


def test_the_garbage_collector_rests_while_libraries_are_imported():
    try:
        with importing():
            assert not gc.isenabled()
            with importing():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


INTERRUPTED = """
import signal, sys
from lightrft_visual.runtime.start_up import importing
try:
    with importing():
        for pressed in range(int(sys.argv[1])):
            signal.raise_signal(signal.SIGINT)
        with importing():
            pass
        import plistlib
except KeyboardInterrupt:
    print("interrupted", "plistlib" in sys.modules, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
else:
    print("done", "plistlib" in sys.modules)
"""


@pytest.mark.parametrize(
    ("pressed", "told"), [(0, "done True"), (1, "interrupted True True"), (2, "interrupted False True")]
)
def test_ctrl_c_waits_for_imports_to_be_whole_and_a_second_one_does_not(pressed, told):
    command = [sys.executable, "-c", INTERRUPTED, str(pressed)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == told


def test_a_handler_of_the_programs_own_is_asked_at_once_during_imports():
    asked = []
    with handled(signal.SIGINT, lambda *_: asked.append("end")), importing():
        signal.raise_signal(signal.SIGINT)
        assert asked == ["end"]
    gc.unfreeze()


def test_the_garbage_collector_looks_seldom_while_a_run_is_built():
    before = gc.get_threshold()
    with seldom_collecting():
        assert gc.get_threshold() == (10_000, *before[1:])
    assert gc.get_threshold() == before


RUN = """
import logging, os, sys
from pathlib import Path
from lightrft_visual.runtime import start_up
logging.basicConfig(level=logging.INFO, format="%(message)s")
start_up.foreign_lines_aside(Path(sys.argv[1]))
print("by a library")
os.write(2, b"by native code\\n")
logging.getLogger("distutils").info("by its logger")
sys.stderr.write("\\r  0%\\r100%|##|\\x1b[0m\\n")
start_up.log_stage("a stage")
logging.getLogger("lightrft_visual.x").warning("a warning of ours")
if sys.argv[2] == "fails":
    print("more of it")
    start_up.say_last("error: it failed")
    os._exit(1)
start_up.start_is_over()
start_up.start_is_over()
assert start_up.screen().stream is sys.stdout
print("a user's own line", file=start_up.screen())
print("another")
logging.info("and another")
assert "torch" not in sys.modules
"""


LOST = """
import os, sys
from pathlib import Path
from lightrft_visual.runtime import start_up
start_up.foreign_lines_aside(Path(sys.argv[1]))
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.stdout = open(1, "w", closefd=False)
print("by a library")
start_up.say_last("error: it failed")
"""


def test_an_error_is_said_also_where_lines_of_libraries_cannot_be_written(tmp_path):
    command = [sys.executable, "-c", LOST, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "error: it failed\n")


def started(folder, ends: str) -> tuple[list[str], str]:
    command = [sys.executable, "-c", RUN, str(folder), ends]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.stdout.splitlines(), (folder / "log.txt").read_text()


def test_foreign_lines_of_a_start_are_in_the_log_and_ours_on_the_screen(tmp_path):
    shown, log = started(tmp_path / "run", "well")
    assert shown[0].endswith("a stage") and shown[1] == "a warning of ours"
    assert sorted(shown[2:]) == ["a user's own line", "and another", "another"]
    assert sorted(log.splitlines()) == ["100%|##|", "by a library", "by its logger", "by native code"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.txt"]


def test_an_error_of_a_start_is_the_last_line_on_the_screen(tmp_path):
    shown, log = started(tmp_path / "run", "fails")
    assert shown[-1] == "error: it failed" and not any("library" in line for line in shown)
    assert "more of it" in log


def test_where_no_log_can_be_written_everything_is_shown(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", RUN, str(tmp_path / "file" / "run"), "well"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "by a library" in done.stdout


CLOSED = """
import sys
from lightrft_visual import launch
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError

def build():
    with open(__file__) as file:
        raise ConfigError(f"that is all, {file.fileno() > 2}")

if sys.argv[2] == "config":
    config_or_exit(RunConfig, ["--no_such_setting", "1"])
config = RunConfig()
config.output.output_dir = sys.argv[1]
launch._run(config, build)
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("part", "told"), [("run", "ConfigError: that is all, True"), ("config", "no_such_setting")])
def test_with_closed_streams_a_program_ends_as_with_open_ones(tmp_path, closed, part, told):
    script = tmp_path / "closed.py"
    script.write_text(CLOSED)
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, str(script), str(tmp_path / "run"), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert ("2>&-" in closed and not done.stderr) or told in done.stderr


UNWRITABLE = """
import os, sys
from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig

reader, number = os.pipe()
os.close(reader)
config = RunConfig()
config.output.output_dir = sys.argv[1]
os.dup2(os.open("/dev/full", os.O_WRONLY) if sys.argv[2] == "full" else number, 1)
launch._run(config, None)
"""


@pytest.mark.parametrize(("kind", "told"), [("full", "No space left on device"), ("pipe", "Broken pipe")])
def test_an_output_that_takes_nothing_ends_the_run_with_a_line_and_no_log(tmp_path, kind, told):
    command = [sys.executable, "-c", UNWRITABLE, str(tmp_path / "run"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"error: OutputClosed: the output of this program cannot be written: {told}\n"
    assert not (tmp_path / "run" / "crash.log").exists()


class Tee:
    """What some programs put in the place of the standard output."""

    def __init__(self, **attributes):
        self.text = ""
        vars(self).update(attributes)

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("attributes", [{}, {"encoding": None}, {"encoding": "no-such-encoding"}])
def test_a_stage_is_shown_on_a_stream_without_a_known_encoding(monkeypatch, attributes):
    monkeypatch.setattr(sys, "stdout", shown := Tee(**attributes))
    log_stage("größe")
    assert shown.text.endswith(" s] größe\n")


def test_without_a_standard_output_a_stage_is_said_to_nobody(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    log_stage("loading the models")


def test_an_output_that_is_closed_or_tells_no_number_is_named_with_its_reason(monkeypatch):
    def fails(text):
        raise OSError("the pane is gone")

    closed = io.StringIO()
    closed.close()
    for stream, told in ((closed, "I/O operation on closed file"), (Tee(write=fails), "the pane is gone")):
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(OutputClosed, match=f"this program cannot be written: {told}"):
            log_stage("loading the models")


def test_a_stage_beside_a_bar_is_followed_by_no_blank_line(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True)
    monkeypatch.setattr(sys, "stdout", FileProxy(console, shown))
    log_stage("one")
    log_stage("two")
    _print_once("three")
    assert [line[-3:] for line in shown.getvalue().split("\n")] == ["one", "two", "ree", ""]


def test_a_log_has_no_control_characters():
    assert cleaned("a\x1b[31mred\x1b[0m\x07\n\n 10%\r 50%\r100%\r\nb") == "ared\n100%\nb\n"
