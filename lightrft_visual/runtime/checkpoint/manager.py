"""Checkpoints that are either complete or not there.

A save goes to a staging folder; when every rank has written its part, the files are flushed and listed with their
hashes in manifest.json, and the folder is renamed. So a process killed at any moment leaves the checkpoints that were
complete before, and at most a staging folder that the next save removes. A checkpoint counts only by its manifest; the
file `latest` is a hint for people and other tools.
"""

import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import CheckpointError, ConfigError
from ..collectives import all_gather_object, broadcast_object, is_rank_0, meet, rank, world_size
from ..files import disk_problem, follow_umask, full_disk_named, remove_folder, write_atomic
from ..packages import installed_version
from .behind import LAST_WAIT, Copies, SaveBehind
from .manifest import (
    HASH_THREADS,
    MANIFEST,
    OtherFormat,
    check_hashes,
    check_sizes,
    describe_files,
    list_files,
    read_manifest,
    sync_file,
    write_manifest,
)

logger = logging.getLogger(__name__)

PREFIX = "checkpoint-"
NUMBERED = re.compile(rf"{PREFIX}(\d+)$")
REPLACED = ".replaced-"
STAGING = ".staging-"
REMOVED = "removed-"
LATEST = "latest"
SHARED_TRIES, SHARED_PAUSE = 20, 0.25  # seconds
VERSIONED = ("torch", "transformers", "deepspeed", "lightrft_visual")

R = TypeVar("R")
KeepBest = tuple[str, str] | Sequence[tuple[str, str]] | None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written. seconds: of writing it; paused: of them, or before them, those the run waited."""

    name: str
    size: int
    seconds: float
    paused: float

    def __str__(self) -> str:
        told = f"{self.name}: {self.size / 2**20:.1f} MiB written in {self.seconds:.1f} s"
        return told if self.paused == self.seconds else f"{told}, for which the run waited {self.paused:.1f} s"


def together(stage: str, action: Callable[[], R]) -> R:
    """Run `action` on this rank and fail on all ranks alike when it failed on any (a collective).

    Raises CheckpointError with the text of the first failing rank's error. Ranks wait for the slowest without a limit,
    as disks are slow. An `action` that itself waits for other ranks can still hang when one of them fails inside it,
    until the process group's time limit.
    """
    result: Any = None
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:  # handed to every rank below, then raised
        mine = error
    meet()
    failures = all_gather_object(None if mine is None else in_words(mine))
    for failed_rank, failure in enumerate(failures):
        if failure is not None:
            where = f" on rank {failed_rank}" if len(failures) > 1 else ""
            raise CheckpointError(f"{stage} failed{where}: {failure}") from mine
    return result


def in_words(error: Exception) -> str:
    """An error as one sentence: our own as it is, a full disk in words, others with the name of their class."""
    if isinstance(error, CheckpointError):
        return str(error)
    return disk_problem(error) or f"{type(error).__name__}: {error}"


def on_rank_0(stage: str, action: Callable[[], R]) -> R:
    """`action` on rank 0, its result on every rank; its failure too, as CheckpointError (a collective)."""
    result = together(stage, lambda: action() if is_rank_0() else None)
    return broadcast_object(result)


class CheckpointManager:
    """Saves, finds, checks and rotates checkpoints under `root`, which all ranks must see.

    max_num: how many numbered checkpoints stay. The newest and, with `keep_best`, the best one always do.
    keep_best: (metric, "max" | "min"), the metric being one of those handed to `save`; of several such pairs the
    first counts whose metric a checkpoint has.
    """

    def __init__(self, root: str | Path, max_num: int = 3, keep_best: KeepBest = None):
        if max_num < 1:
            raise ConfigError(f"max_ckpt_num is {max_num}; at least one checkpoint must stay")
        one = bool(keep_best) and isinstance(keep_best[0], str)
        pairs = cast("tuple[tuple[str, str], ...]", (keep_best,) if one else tuple(keep_best or ()))
        for _, mode in pairs:
            if mode not in ("max", "min"):
                raise ConfigError(f"the best checkpoint is chosen by max or min, not by {mode!r}")
        self.root = Path(root).absolute()  # a function of the user that runs meanwhile may change the working folder
        self.max_num = max_num
        self.keep_best = pairs
        self.behind: SaveBehind | None = None  # the last save, where it is not known to be complete
        self.saved: list[Saved] = []  # by rank 0, for whoever tells of it
        self._copies = Copies()

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        name: str | None = None,
        metrics: Mapping[str, float] | None = None,
        resumable: bool | None = None,
        model: Mapping[str, Any] | None = None,
        behind: bool = False,
    ) -> Path:
        """Write a checkpoint; every rank calls this. One of the same name is replaced; a folder that is none is not
        touched.

        Args:
            step: finished steps.
            write: runs on every rank with the staging folder, to write the rank's own files.
            name: of the folder, such as checkpoint-final, which is never rotated away; None: `checkpoint-<step>`.
            metrics: of the latest evaluation, for `keep_best`; None: there was none.
            resumable: whether a run can go on from it; None: if it is numbered.
            model: what the weights belong to, a `fingerprint`.
            behind: return once the files' content is copied. A thread writes them, and `finish` waits for it.

        Raises:
            CheckpointError: on every rank when any failed; what was complete stays.
        """
        self.finish()
        name, began = name or f"{PREFIX}{step:06d}", time.monotonic()
        numbered = NUMBERED.match(name) is not None
        resumable = numbered if resumable is None else resumable
        if resumable and not name.startswith(PREFIX):
            raise CheckpointError(f"a resumable checkpoint's name starts with {PREFIX!r}: {name!r}")
        staging = self.root / f"{STAGING}{name}"
        numbers = {key: float(value) for key, value in (metrics or {}).items()}
        measured = {key: value for key, value in numbers.items() if math.isfinite(value)}

        def publish(files: dict[str, dict[str, Any]], paused: float | None = None) -> None:
            content = {"step": step, "resumable": resumable, "model": model, "metrics": measured, "files": files}
            self._publish(staging, name, content)
            size, seconds = sum(each["size"] for each in files.values()), time.monotonic() - began
            self.saved.append(Saved(name, size, seconds, seconds if paused is None else paused))
            if numbered:
                self._rotate()

        try:
            on_rank_0(f"preparing to save {name}", lambda: self._prepare(staging, name, numbered))
            together(f"saving {name}: reaching the staging folder", lambda: check_seen(staging))
            with self._copies.collecting() if behind else nullcontext():
                together(f"saving {name}", lambda: full_disk_named(self.root, partial(write, staging)))
            if behind:
                self.behind = SaveBehind(staging, self._copies, partial(publish, paused=time.monotonic() - began))
                self.behind.start()
            else:
                files = self._describe(staging, name)
                on_rank_0(f"saving {name}", lambda: publish(files))
        except CheckpointError:
            self._copies.release()
            self._discard(staging)
            raise
        return self.root / name

    def finish(self) -> None:
        """Wait for the save that goes on behind the run, if one does; every rank calls this.

        Raises CheckpointError on every rank when it failed on any; what was complete stays.
        """
        behind, self.behind = self.behind, None
        if behind is None:
            return
        name = behind.staging.name.removeprefix(STAGING)
        try:
            together(f"saving {name}", behind.own_files_written)
            on_rank_0(f"saving {name}", behind.finished)
        except CheckpointError:
            behind.give_up()
            self._discard(behind.staging)
            raise
        finally:
            self._copies.release()

    def leave(self) -> None:
        """As the run fails: let the save behind it come to its end if it can. No collective; nothing is raised."""
        if self.behind is not None:
            self.behind.give_up(LAST_WAIT)
            if self.behind.error is not None:
                logger.warning("%s is not complete: %s", self.behind.staging, in_words(self.behind.error))

    def candidates(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Checkpoints to resume from with their manifests, the newest first; hashes are not read. One that misses files
        is skipped with a warning.

        Raises OtherFormat where another version of this package has saved here: a checkpoint beside it may not be where
        the run stands.
        """
        for path, content in sorted(self._present(), key=lambda each: each[1] is not None):  # unreadable ones first
            numbered = NUMBERED.match(path.name.removeprefix(REPLACED))
            if content["resumable"] if content else numbered:
                with _skipped_if_damaged(path):
                    whole = content or read_manifest(path)
                    check_sizes(path, whole)
                    yield path, whole

    def given_up(self, path: Path) -> list[str]:
        """Names of the checkpoints that a run gives up which goes on from one of them: those saved later, but for a
        best one of the steps until then."""
        own = [(each, content) for each, content in self._present() if content and content["resumable"]]
        at = next((number for number, (each, _) in enumerate(own) if each.resolve() == path.resolve()), None)
        if at is None:
            return []
        numbered, step = NUMBERED.match(own[at][0].name), own[at][1]["step"]
        later = own[:at] if numbered else own  # the guard's rollback saves the best one anew, as the newest
        return [each.name for each, found in later if numbered and NUMBERED.match(each.name) or found["step"] > step]

    def check_target(self, name: str) -> None:
        """CheckpointError when a save under `name` would have to overwrite something that is no checkpoint.

        Call it at the start of a run for a name that is only written at its end.
        """
        target = self.root / name
        if Path(name).name != name or name.startswith("."):
            raise CheckpointError(f"a checkpoint's name is no path and not hidden: {name!r}")
        if target.is_dir() and ((target / MANIFEST).exists() or not any(target.iterdir())):
            return
        if target.exists():
            raise CheckpointError(f"{target} exists and is no checkpoint: it will not be overwritten")

    def check_writable(self) -> None:
        """CheckpointError when nothing can be written into `root`, which is made. For the start of a run."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=STAGING):
                pass
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written into {self.root}: {error}") from error

    def _prepare(self, staging: Path, name: str, numbered: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / name
        if numbered and target.is_dir() and not (target / MANIFEST).exists():  # half a copy, over which a run resumed
            aside = target.with_name(f"{name}.incomplete-{time.time_ns()}")
            logger.warning("%s has no %s: it is now %s", target, MANIFEST, target.replace(aside).name)
        self.check_target(name)
        self._finish_replacements(PREFIX if numbered else name)
        # Only what a run of this folder left: a named save may go to a folder that other runs share.
        patterns = (f"{STAGING}{PREFIX}*", f"{STAGING}{REMOVED}*") if numbered else (staging.name,)
        for leftover in [path for pattern in patterns for path in self.root.glob(pattern)]:
            logger.warning("removing %s, left by a save that was cut off", leftover)
            remove_folder(leftover)
        for content in [*self._complete().values()][:1] if numbered else ():  # an export is smaller
            self._check_space(content)
        staging.mkdir()

    def _check_space(self, last: Mapping[str, Any]) -> None:
        """Refuse before writing when the disk cannot hold a checkpoint like the last one."""
        needed = sum(entry["size"] for entry in last["files"].values())
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"{self.root}: {free / 2**20:.0f} MiB free, the last checkpoint took {needed / 2**20:.0f} MiB. "
                f"It stays; make room or lower max_ckpt_num ({self.max_num})"
            )

    def _describe(self, staging: Path, name: str) -> dict[str, dict[str, Any]]:
        """Hash all files, each rank a share of them; the whole list on every rank."""
        on_rank_0(f"opening the files of {name} to whom the umask lets read", lambda: follow_umask(staging))
        listed = on_rank_0(f"listing {name}", lambda: list_files(staging))
        mine = together(f"hashing {name}", lambda: describe_files(staging, listed[rank() :: world_size()]))
        merged = {key: value for part in all_gather_object(mine) for key, value in part.items()}
        return dict(sorted(merged.items()))

    def _publish(self, staging: Path, name: str, content: dict[str, Any]) -> None:
        if not content["files"]:
            raise CheckpointError(f"nothing was written for {name}")
        last = max((present["sequence"] for _, present in self._present() if present), default=0)
        versions = {package: installed_version(package) for package in VERSIONED}
        write_manifest(staging, content | {"sequence": last + 1, "world_size": world_size(), "versions": versions})
        target, old = self.root / name, self.root / f"{REPLACED}{name}"
        if target.exists():
            os.rename(target, old)
        os.rename(staging, target)
        sync_file(self.root)
        if old.exists():
            remove_folder(old)
        if content["resumable"]:
            write_atomic(self.root / LATEST, f"{name}\n")  # a hint for people, not read here

    def _discard(self, staging: Path) -> None:
        """Remove what a failed save wrote, to give its space back; a folder that resists is left to the next save."""
        if is_rank_0() and staging.exists():
            try:
                shutil.rmtree(staging)
            except OSError as error:
                logger.warning("%s stays until the next save: %s", staging, error)

    def _finish_replacements(self, names: str) -> None:
        """Settle a save that was killed between its two renames: the old folder returns, or goes if the new stands.

        names: what those begin with, or the only one, that are this run's."""
        for old in self.root.glob(f"{REPLACED}{names}*" if names == PREFIX else f"{REPLACED}{names}"):
            target = self.root / old.name.removeprefix(REPLACED)
            if target.exists():
                remove_folder(old)
            else:
                os.rename(old, target)

    def _present(self) -> list[tuple[Path, dict[str, Any] | None]]:
        """Every checkpoint folder with its manifest (None where it cannot be read), the one saved last first.

        Order is by save, not by step: a run that was started anew in an old folder does not lose to old checkpoints.
        """
        if not self.root.is_dir():
            return []
        found = []
        for path in sorted(self.root.iterdir()):
            name = path.name.removeprefix(REPLACED)
            superseded = path.name != name and (self.root / name).exists()
            if name.startswith(PREFIX) and path.is_dir() and not superseded:
                found.append((path, readable_manifest(path)))
        return sorted(found, key=lambda item: item[1]["sequence"] if item[1] else -1, reverse=True)

    def _complete(self) -> dict[Path, dict[str, Any]]:
        """Numbered checkpoints whose files are there with the right sizes, newest first, with their manifests; hashes
        are not read."""
        found = {}
        for path, content in self._present():
            if content is None or not NUMBERED.match(path.name):
                continue
            try:
                check_sizes(path, content)
            except CheckpointError as error:
                logger.warning("%s is left alone: %s", path.name, error)
                continue
            found[path] = content
        return found

    def _best(self, complete: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
        """The best one, where one has a metric to choose by."""
        for metric, mode in self.keep_best:
            sign = 1 if mode == "max" else -1
            scored = {
                path: (sign * content["metrics"][metric], content["step"])
                for path, content in complete.items()
                if metric in content["metrics"]
            }
            if scored:
                return [max(scored, key=scored.__getitem__)]
        return []

    def _rotate(self) -> None:
        complete = self._complete()
        kept = {*[*complete][:1], *self._best(complete)}
        others = [path for path in complete if path not in kept]
        for path in others[max(0, self.max_num - len(kept)) :]:
            remove_checkpoint(path)


def check_seen(folder: Path) -> None:
    """Raise CheckpointError where this rank does not see what rank 0 has made."""
    for _ in range(SHARED_TRIES):  # network file systems may show a new folder late
        if folder.is_dir():
            return
        time.sleep(SHARED_PAUSE)
    shared = "what output_dir, ckpt_path and save_path name must be on a shared file system"
    raise CheckpointError(f"rank {rank()} does not see {folder}: {shared}")


def check_shared(root: Path) -> None:
    """Raise CheckpointError where a rank does not see what rank 0 makes in a folder. A collective."""
    probe = on_rank_0(f"writing into {root}", lambda: Path(tempfile.mkdtemp(prefix=STAGING, dir=root)))
    try:
        together("looking for the checkpoints' folder", lambda: check_seen(probe))
    finally:
        if is_rank_0():
            probe.rmdir()


def verify(path: str | Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint. CheckpointError names the file that is missing or damaged."""
    content = read_manifest(Path(path))
    check_sizes(Path(path), content)
    check_hashes(Path(path), content, content["files"])
    return content


def resolve_resume(resume_from: str, root: str | Path) -> Path:
    """The checkpoint folder that `resume_from` means, the same on every rank (a collective).

    "auto": the newest complete one under `root`; a damaged newer one is skipped with a warning. A folder: that
    checkpoint, or, for a run's folder, its newest complete one. CheckpointError, never a silent start from step 0, when
    there is none, and when a checkpoint that was named is damaged (the message names the file).
    """
    source = _named(resume_from, Path(root))  # rank 0 alone goes through it
    while True:
        path, content, alone = on_rank_0("resuming", lambda: next(source))
        with nullcontext() if alone else _skipped_if_damaged(path):
            _check_together(path, content)
            if is_rank_0():
                logger.info("resuming from %s", path)
            return path


def _check_together(path: Path, content: Mapping[str, Any]) -> None:
    """Compare a checkpoint's content with what was written. Every rank reads a share of the files, so many between two
    collectives that none waits for the whole at once (a collective)."""
    names = sorted(content["files"], key=lambda name: content["files"][name]["size"], reverse=True)
    at_once = HASH_THREADS * world_size()
    for start in range(0, len(names), at_once):
        mine = names[start : start + at_once][rank() :: world_size()]
        together("resuming", lambda mine=mine: check_hashes(path, content, mine))


@contextmanager
def _skipped_if_damaged(path: Path) -> Iterator[None]:
    """A checkpoint that turns out to be damaged inside is left with a warning. One of another format is an error."""
    try:
        yield
    except OtherFormat:
        raise
    except CheckpointError as error:
        if is_rank_0():
            logger.warning("checkpoint %s is skipped: %s", path.name, error)


def _named(resume_from: str, root: Path) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """The checkpoints that `resume_from` may mean, the best first, with their manifests, and whether it is the one that
    was named: a checkpoint, a run's folder, or auto for the newest below `root`. The step of a checkpoint may be
    written with or without leading zeros.

    Raises CheckpointError where there is none, or none more, that a run can be resumed from.
    """
    if not resume_from.strip():
        raise CheckpointError("resume_from is empty; name a checkpoint or a run's folder, or write auto")
    folder = root if resume_from == "auto" else _of_this_step(Path(resume_from))
    manager = CheckpointManager(folder)
    of_a_run = folder.is_dir() and not folder.name.startswith(PREFIX) and not (folder / MANIFEST).exists()
    if resume_from != "auto" and not of_a_run and not manager._present():  # no folder of checkpoints in any state
        content = read_manifest(folder)
        check_sizes(folder, content)
        if not content["resumable"]:
            raise CheckpointError(f"{folder} holds an exported model, not the state of a run to resume")
        yield folder, content, True
        return
    yield from ((path, content, False) for path, content in manager.candidates())
    raise CheckpointError(
        f"resume_from={resume_from}: no complete checkpoint in {folder} (a run saves some with save_steps)"
    )


def _of_this_step(path: Path) -> Path:
    """The folder itself, or where it does not exist the one beside it of the same step: checkpoint-60 is -000060."""
    match = NUMBERED.match(path.name)
    padded = path.with_name(f"{PREFIX}{int(match[1]):06d}") if match else path
    return padded if padded.is_dir() and not path.exists() else path


def remove_checkpoint(path: Path) -> None:
    """Rename first: a kill in the middle of the removal must not leave a folder that looks like a checkpoint."""
    doomed = path.with_name(f"{STAGING}{REMOVED}{path.name}")
    os.rename(path, doomed)
    remove_folder(doomed)


def readable_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, None where it is missing or damaged."""
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
