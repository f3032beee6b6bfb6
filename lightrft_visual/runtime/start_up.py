"""What a run says and does while it starts. Nothing here imports torch."""

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from .files import Escaped
from .presence import handled

_BEGAN = time.perf_counter()


def log_stage(stage: str) -> None:
    """One line on rank 0, with the seconds since this module was imported: what begins now."""
    if os.environ.get("RANK", "0") == "0":
        screen().write(f"[{time.perf_counter() - _BEGAN:5.1f} s] {stage}\n")


def open_closed_streams() -> None:
    """Of a program that was started with closed streams (`>&-`), let what it writes there be lost, and no error.

    Their numbers are taken too: else the next file that is opened gets one, and all that is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


class ForeignLines:
    """While a run starts, what libraries and their programs print goes to a file, and our own lines to the screen.

    All that this process writes to its two outputs counts, whoever writes it; `screen` is what they were before. At the
    end the file's lines are put behind those of `log.txt`, without control characters.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.target = folder / f".log_{os.environ.get('RANK', '0')}", folder / LOG_NAME
        self._flush()
        self.outputs = os.dup(1), os.dup(2)
        self.screen = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        self.handlers = [each for each in logging.root.handlers if getattr(each, "stream", None) is sys.stderr]
        for handler in self.handlers:
            handler.stream = self.screen
            handler.addFilter(_ours)
        self.others = logging.StreamHandler(sys.stderr)
        self.others.addFilter(lambda record: not _ours(record))
        logging.root.addHandler(self.others)

    def end(self) -> None:
        """Both outputs are what they were."""
        self._flush()
        logging.root.removeHandler(self.others)
        for handler in self.handlers:
            handler.stream = sys.stderr
            handler.removeFilter(_ours)
        for number, before in zip((1, 2), self.outputs):
            os.dup2(before, number)
            os.close(before)
        with contextlib.suppress(OSError):  # a full disk, say: these lines are no reason to end
            text = cleaned(self.path.read_bytes().decode(errors="replace"))
            with open(self.target, "a", encoding="utf-8") as file:
                file.write(text)
            self.path.unlink()

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            # A full disk, say, or closed; what it still holds goes where its lines go next.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == __name__.partition(".")[0]


LOG_NAME = "log.txt"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_foreign: ForeignLines | None = None


def cleaned(text: str) -> str:
    """Lines without control characters; of a progress bar that was drawn over itself, the last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "".join(f"{CONTROL.sub('', line)}\n" for line in lines if line.strip())


def foreign_lines_aside(folder: Path) -> None:
    """From here to `start_is_over` they are in the folder's log.txt; where it cannot be written, they are shown."""
    global _foreign
    if _foreign is None:
        with contextlib.suppress(OSError):  # the folder's own check says it better
            _foreign = ForeignLines(folder)


def start_is_over() -> None:
    """Everybody prints where they like. Again it does nothing."""
    global _foreign
    if _foreign is not None:
        ended, _foreign = _foreign, None
        ended.end()


def screen() -> TextIO:
    """Where people look: the standard output, and while foreign lines are put aside what it was before."""
    return cast(TextIO, Escaped(_foreign.screen if _foreign is not None else sys.stdout))


def error_output() -> int:
    """The number of the error output, where people look."""
    return _foreign.outputs[1] if _foreign is not None else 2


def say_last(text: str) -> None:
    """On the error output, as the last thing that this process says."""
    start_is_over()
    with contextlib.suppress(OSError, ValueError):  # what this error may be about
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # nobody is there to read it
        print(text, file=sys.stderr, flush=True)


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python's garbage collector rests, and it never looks at what was imported.

    Libraries make millions of objects that stay; walking through them again and again takes a sixth of the imports'
    time. KeyboardInterrupt is raised at the end: what is imported by half cannot be imported again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with _interrupts_wait():
            yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Inside, a Ctrl-C that Python would raise at once is kept until the end; a second one is not."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    kept: list[int] = []

    def keep(number: int, _: object) -> None:
        kept.append(number)
        signal.signal(number, signal.default_int_handler)

    with handled(signal.SIGINT, keep):
        yield
    if kept:
        raise KeyboardInterrupt


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Inside, Python's garbage collector looks after every 10,000 new objects, not after every 700.

    Most of what a start makes stays, so looking at it often finds next to nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
