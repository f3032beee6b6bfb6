"""How a choice is registered: an entry says its name and its needs, and where its code is, which loads on first use.

Free of torch, so that configurations are checked and documented before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Generic, TypeVar

from ..errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Choice:
    """One value of a setting.

    Args:
        name: as it is written in a configuration.
        target: the code: an object, or 'module:attribute' which is imported on first use; None where nothing runs.
        about: one line for tables and `--help`.
        aliases: other names of the same entry.
    """

    name: str
    target: Any = field(repr=False)
    about: str
    aliases: tuple[str, ...] = ()

    @property
    def shipped(self) -> bool:
        """Whether its code is of this package, and not of a plugin."""
        return isinstance(self.target, str) and self.target.startswith("lightrft_visual.")

    def load(self) -> Any:
        """The code behind the name. What its import raises is raised."""
        return load_target(self.target) if isinstance(self.target, str) else self.target

    def needs(self) -> dict[str, Any]:
        """The facts that are not at their defaults, by name; common fields and code (not in `repr`) left out."""
        common = {item.name for item in fields(Choice)} | {item.name for item in fields(self) if not item.repr}
        facts = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, usual) in facts.items() if name not in common and value != usual}


E = TypeVar("E", bound=Choice)


class Registry(Generic[E]):
    """The entries of one kind, in the order in which they were registered.

    Args:
        kind: what an entry is, for messages ("advantage estimator").
        entry: the class of the entries; its fields are what `register` takes.
    """

    def __init__(self, kind: str, entry: type[E]) -> None:
        self.kind, self.entry = kind, entry
        self._entries: dict[str, E] = {}

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> E:
        """The entry of a name or alias. Raises ConfigError with the nearest name for one that is not there."""
        for entry in self:
            if name == entry.name or name in entry.aliases:
                return entry
        raise ConfigError(f"there is no {self.kind} named {name!r}{did_you_mean(name, self.names())}")

    def names(self) -> tuple[str, ...]:
        """All names, aliases behind the entry that they belong to."""
        return tuple(name for entry in self for name in (entry.name, *entry.aliases))

    def load(self, name: str) -> Any:
        """The code behind a name. Raises ConfigError for an unknown one."""
        return self[name].load()

    def present(self) -> Iterator[tuple[E, Any]]:
        """Each entry with its code, in their order; without those of plug-ins that are not there."""
        for entry in self:
            try:
                yield entry, entry.load()
            except PluginMissing:
                continue

    def add(self, entry: E) -> E:
        """Register an entry. Raises ConfigError where one of its names is taken by something else."""
        for name in (entry.name, *entry.aliases):
            if name in self and not same_code(self[name].target, entry.target):
                raise ConfigError(f"{self.kind} {name!r} is registered already")
        self._entries[entry.name] = entry
        return entry

    def register(self, name: str, about: str = "", **facts: Any) -> Callable[[Any], Any]:
        """Decorator: make a function or class known under `name`.

        Args:
            name: as configurations will write it.
            about: one line for tables and `--help`; by default the first line of the docstring.
            **facts: what it needs, as the fields of the entry's class say.

        Raises:
            ConfigError: for a name that is taken, or a fact that entries of this kind do not have.
        """
        known = {item.name for item in fields(self.entry)} - {"name", "target", "about"}
        for fact in facts:
            if fact not in known:
                raise ConfigError(f"{self.kind} {name!r}: no fact {fact!r}{did_you_mean(fact, known)}")

        def keep(target: Any) -> Any:
            line = about or (getattr(target, "__doc__", None) or "").strip().partition("\n")[0]
            self.add(self.entry(name=name, target=target, about=line, **facts))
            return target

        return keep

    def remove(self, name: str) -> None:
        """Forget an entry; for tests that register their own."""
        del self._entries[name]


def same_code(one: Any, other: Any) -> bool:
    """Whether two targets are the same definition: a file that is imported twice defines equal ones."""
    names = [(getattr(each, "__module__", None), getattr(each, "__qualname__", None)) for each in (one, other)]
    return one is other or one == other or (names[0] == names[1] and None not in names[0])


PLUGINS = "lightrft_visual.plugins."


class PluginMissing(ConfigError):
    """What was asked for is a part of a plug-in that is not there."""


def load_target(reference: str) -> Any:
    """The object of 'module:attribute', of 'module:Class.method', or a module. Raises ConfigError where it is a part of
    a plug-in that is not there."""
    module, _, path = reference.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        missing = f"{error.name}."
        if not (module.startswith(PLUGINS) and missing.startswith(PLUGINS)):
            raise
        plugin = (missing if missing != PLUGINS else module).removeprefix(PLUGINS).split(".")[0]
        raise PluginMissing(
            f"this needs the plug-in {plugin}, which is not there: lightrft_visual/plugins/{plugin}"
        ) from error
    for attribute in path.split(".") if path else ():
        found = getattr(found, attribute)
    return found
