"""What a setting's value must be, said at the field: ``top_p: Annotated[float, within("(0, 1]")] = 1.0``.

A section derives from `Section`, which checks all of its fields when it is made, and then calls its `check` for what
several settings must agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from .choice import Registry


@dataclass(frozen=True)
class Constraint:
    """One demand on a value.

    Args:
        holds: whether a value, never None, meets it.
        words: what is said of one that does not, behind 'NAME is VALUE; '.
        choices: the values allowed, for `--help`; empty where they cannot be listed.
        registry: what names more of them.
    """

    holds: Callable[[Any], bool]
    words: str = ""
    choices: tuple = ()
    registry: Registry | None = None

    def names(self) -> tuple:
        """The values allowed now; a registry may have grown since the field was written."""
        return self.choices + (self.registry.names() if self.registry is not None else ())


Positive = Constraint(lambda value: value > 0, "it must be positive")
NotNegative = Constraint(lambda value: value >= 0, "it must not be negative")
Share = Constraint(lambda value: 0 <= value <= 1, "it is a share and must lie in [0, 1]")
PositiveInt, PositiveFloat = Annotated[int, Positive], Annotated[float, Positive]
NonNegativeInt, NonNegativeFloat = Annotated[int, NotNegative], Annotated[float, NotNegative]


def within(interval: str) -> Constraint:
    """In an interval as written in mathematics, such as '(0, 1]'."""
    low, high = map(float, interval[1:-1].split(","))

    def holds(value: float) -> bool:
        above = low < value if interval[0] == "(" else low <= value
        return above and (value < high if interval[-1] == ")" else value <= high)

    return Constraint(holds, f"it must lie in {interval}")


def positive_or(special: int, meaning: str) -> Constraint:
    """Positive, or one value that means something else, such as -1 for no limit."""
    return Constraint(lambda value: value > 0 or value == special, f"it must be positive, or {special} for {meaning}")


def one_of(*allowed: Any) -> Constraint:
    """One of the values, which `--help` lists."""
    return Constraint(lambda value: value in allowed, f"it must be one of: {', '.join(map(str, allowed))}", allowed)


def registered(registry: Registry, *besides: str) -> Constraint:
    """A name of the registry, as it stands when the value is checked, or one of those besides."""
    return Constraint(lambda value: value in besides or value in registry, "", besides, registry)


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@cache
def constraints_of(section: type) -> dict[str, tuple[Constraint, ...]]:
    """The constraints of each field of a section, by its name; those of `Annotated[...] | None` included."""
    hints = get_type_hints(section, include_extras=True)
    return {item.name: tuple(_marks(hints[item.name])) for item in fields(section)}


def _marks(hint: Any) -> Iterator[Constraint]:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in members:
        yield from (mark for mark in getattr(member, "__metadata__", ()) if isinstance(mark, Constraint))


def check_fields(section: Any) -> None:
    """Raise ConfigError for a field that breaks one of its constraints, or holds NaN or infinity.

    None is a value of optional fields and meets every constraint; what is typed Any is a user's own.
    """
    for item in fields(section):
        value = getattr(section, item.name)
        if value is None or is_dataclass(value):
            continue
        if "Any" not in str(item.type):
            numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            for number in numbers:
                finite = not isinstance(number, float) or math.isfinite(number)
                require(finite, f"{item.name} is {number}; it must be a finite number")
        for constraint in constraints_of(type(section))[item.name]:
            if not constraint.holds(value):
                raise ConfigError(f"{item.name} is {_shown(value)}; {_words(constraint)}")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _words(constraint: Constraint) -> str:
    if constraint.registry is None:
        return constraint.words
    names = ", ".join(constraint.names())
    return f"it must be one of: {names}; --plugins names a file that adds a {constraint.registry.kind}"


class Section:
    """Base of the sections of a configuration: their fields are checked when they are made."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError where settings contradict each other; nothing here."""
