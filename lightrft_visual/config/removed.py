"""Settings that earlier versions had: what to use instead, and which values of them change nothing.

A file that a run of an earlier version has written, such as its config.resolved.yaml, names them all. There a value
that asked for nothing is passed over; any other one, and the name on the command line, is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """instead: one line that stands behind 'is gone: '. harmless: values whose run is the same without the setting."""

    instead: str
    harmless: tuple[Any, ...] = ()


# By the setting's own name, or by its path where another setting has the same name.
REMOVED: dict[str, Removed] = {
    "train_while_scoring": Removed(
        "leave it out; training waits for all rewards, and remote scorers work beside generation and forward passes",
        harmless=(True, False),
    ),
    "ask_key": Removed("leave it out; score drawings by scorers of images, or by a judge", harmless=("",)),
    "redraw_key": Removed("leave it out; score answers by rules or by a judge", harmless=("",)),
}


def removed(name: str) -> Removed | None:
    """The entry of a setting that is gone, under any of its spellings; None for other names."""
    plain = name.replace("-", "_")
    own = plain.rpartition(".")[2]
    return next((REMOVED[each] for each in (plain, own, own.removeprefix("no_")) if each in REMOVED), None)
