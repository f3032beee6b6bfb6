"""Typed errors. Each names what failed and, where it is known, the file, row, sample or flag to look at.

Also the name that was probably meant, which their messages give.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rapidfuzz.distance import OSA

OPPOSITES = (("max", "min"), ("high", "low"), ("train", "eval"), ("save", "load"), ("actor", "critic"))
LISTED = 30  # names that a message lists at most


class LightRFTVisualError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(LightRFTVisualError, ValueError):
    """A configuration that cannot work; raised before any model loads."""


class FolderInUse(ConfigError):
    """Another run that is still going writes to the output folder; nothing of this run may be written there."""


class OutputClosed(LightRFTVisualError):
    """What a run prints cannot be written: whoever read it is gone, or the disk is full."""


class DataError(LightRFTVisualError, ValueError):
    """A data set, row, image or video that cannot be used. cause: a short name that bad rows are counted by."""

    def __init__(self, message: str = "", cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RolloutError(LightRFTVisualError, RuntimeError):
    """Generation failed, or the engine and the trainer disagree about what was sampled."""


class RewardError(LightRFTVisualError, RuntimeError):
    """A reward function, model or server gave no usable score."""


class StoppedBySignal(RewardError):
    """SIGTERM came, and what was running did not return in time: what the step has done so far is given up."""


class TooManyInvalid(RewardError):
    """Too few samples have a reward, as on every rank; nothing was trained on them."""


class CheckpointError(LightRFTVisualError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class NonFiniteError(LightRFTVisualError, FloatingPointError):
    """Loss or gradients were not finite too many steps in a row, or the policy itself is not."""


@contextmanager
def refused_as(kind: type[LightRFTVisualError], what: str) -> Iterator[None]:
    """Inside, whatever reading something from outside raises is one error of `kind`: '{what}: {why}'. Ours stay.

    For files, folders and arguments that others wrote: libraries raise every kind of exception at a damaged one.
    """
    try:
        yield
    except LightRFTVisualError:
        raise
    except Exception as error:
        raise kind(f"{what}: {reason_of(error)}") from error


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Inside, errors of ours begin with '{what}: ', but that of a run that a signal ends."""
    try:
        yield
    except StoppedBySignal:
        raise
    except LightRFTVisualError as error:
        error.args = (f"{what}: {error}",)
        raise


def reason_of(error: BaseException) -> str:
    """What an error says; its class before it where its text alone would not say much."""
    text = writable(str(error)).strip()
    speaks = isinstance(error, OSError | ValueError | ImportError | RuntimeError) and " " in text
    return text if speaks else f"{type(error).__name__}: {text}".rstrip(": ")


def writable(text: str) -> str:
    """The text in characters that UTF-8 has: a lone surrogate, which data may hold, becomes its escape, as \\ud800.

    Inside a JSON string that is the very escape that reads back as the surrogate.
    """
    return text.encode(errors="backslashreplace").decode()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by the fewest slips, if those are few for its length and none turns it around.

    A name is only a guess away where a typing mistake explains it: another system's name that shares some letters with
    one of ours would be answered by something unrelated, or by the opposite.
    """
    limit = 1 + len(name) // 8
    # A swap of two letters is one slip, capitals are none.
    near = [(OSA.distance(name.lower(), each.lower(), score_cutoff=limit), each) for each in known]
    allowed = [(count, each) for count, each in near if count <= limit and not opposite(name, each)]
    if not allowed:
        return None
    slips, nearest_one = min(allowed)
    begun = [each for _, each in near if slips and each.lower().startswith(f"{name.lower()}_")]
    return min(begun, default=nearest_one)  # of dppo it is dppo_kl, not ppo


def opposite(a: str, b: str) -> bool:
    """Whether the names differ in a word such as max and min."""
    words = [set(re.split(r"[_.]", name)) for name in (a, b)]
    return any(x in one - other and y in other - one for x, y in OPPOSITES for one, other in (words, words[::-1]))


def other_kind(saved: str, own: str) -> str:
    """Why a checkpoint of another kind of run is not resumed, and what to do where its export is such a model."""
    way = "" if "diffusion" in (saved, own) else ": to train its exported model anew, name that by --pretrain"
    return f"is of a {saved} run, and this is a {own} run{way}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' where a name is near, and the known names, for the end of a message."""
    names = sorted({str(each) for each in known})
    near = nearest(str(name), names)
    hint = f"; did you mean {near!r}?" if near else ""
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{hint} (known: {listed or 'none'})"
