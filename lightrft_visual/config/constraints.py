"""What a setting's value must be, said at the field: ``top_p: Annotated[float, within("(0, 1]")] = 1.0``.

A section derives from `Section`, which checks all of its fields when it is made, and then calls its `check` for what
several settings must agree on.
"""

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Generic, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError, LightRFTVisualError, did_you_mean
from ..errors import nearest as nearest_name

logger = logging.getLogger(__name__)


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
        given: what the code of an entry is called with, by position, for checks; "" where that differs.
    """

    def __init__(self, kind: str, entry: type[E], given: str = "") -> None:
        self.kind, self.entry, self.given = kind, entry, given
        self._entries: dict[str, E] = {}

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return any(name == entry.name or name in entry.aliases for entry in self._entries.values())

    def __getitem__(self, name: str) -> E:
        """The entry of a name or alias. Raises ConfigError with the nearest name for one that is not there."""
        for entry in self._entries.values():
            if name == entry.name or name in entry.aliases:
                return entry
        raise ConfigError(f"there is no {self.kind} named {name!r}{did_you_mean(name, self.names())}")

    def names(self) -> tuple[str, ...]:
        """All names, aliases behind the entry that they belong to."""
        return tuple(name for entry in self for name in (entry.name, *entry.aliases))

    def load(self, name: str) -> Any:
        """The code behind a name. Raises ConfigError for an unknown one."""
        return self[name].load()

    def present(self, asked: Callable[[E], bool] | None = None) -> Iterator[tuple[E, Any]]:
        """Each entry with its code, in their order; without those of plug-ins that are not there. asked: which ones."""
        for entry in filter(asked, self):
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

    def below(self, package: str) -> Callable[..., Choice]:
        """A function that adds an entry: (name, 'module:attribute' below the package or None, about, **facts)."""

        def entry(name: str, code: str | None, about: str, **facts: Any) -> E:
            return self.add(self.entry(name=name, target=code and f"{package}.{code}", about=about, **facts))

        return entry

    def register(self, name: str, about: str = "", **facts: Any) -> Callable[[Any], Any]:
        """Decorator: make a function or class known under `name`.

        Args:
            name: as configurations will write it.
            about: one line for tables and `--help`; by default the first line of the docstring.
            **facts: what it needs, as the fields of the entry's class say.

        Raises:
            ConfigError: for a name that is taken, a fact that entries of this kind do not have, or code that cannot be
                called as they are.
        """
        known = {item.name for item in fields(self.entry)} - {"name", "target", "about"}
        for fact in facts:
            if fact not in known:
                raise ConfigError(f"{self.kind} {name!r}: no fact {fact!r}{did_you_mean(fact, known)}")
        if isinstance(alias := facts.get("aliases"), str):
            raise ConfigError(f"{self.kind} {name!r}: aliases is a tuple of names, such as ({alias!r},)")

        def keep(target: Any) -> Any:
            if self.given:
                check_call(target, self.given, f"{self.kind} {name!r}")
            line = about or (getattr(target, "__doc__", None) or "").strip().partition("\n")[0]
            self.add(self.entry(name=name, target=target, about=line, **facts))
            return target

        return keep

    def remove(self, name: str) -> None:
        """Forget an entry; for tests that register their own."""
        del self._entries[name]


def check_call(target: Any, given: str, name: str) -> None:
    """Raise ConfigError for code that cannot be called with some arguments.

    Args:
        target: the code: a class, a function or a method.
        given: the arguments, by position, as "model, name, task".
        name: of the code, for messages.
    """
    try:
        inspect.signature(target).bind(*given.split(", "))
    except TypeError as error:
        raise ConfigError(f"{name} is called with ({given}): {error}") from error
    except ValueError as error:  # code in C need not say what it takes
        logger.debug("%s is not checked: %s", name, error)


def same_code(one: Any, other: Any) -> bool:
    """Whether two targets are the same definition: a file that is imported twice defines equal ones."""
    names = [(getattr(each, "__module__", None), getattr(each, "__qualname__", None)) for each in (one, other)]
    return one is other or one == other or (names[0] == names[1] and None not in names[0])


PLUGINS = "lightrft_visual.plugins."


class SeveralWrong(ConfigError):
    """parts: what is wrong, one text each."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{len(parts)} things are wrong:", *parts]))
        self.parts = parts


def parts_of(error: Exception) -> Sequence[str]:
    """The texts of an error, several where it says several things."""
    return error.parts if isinstance(error, SeveralWrong) else [str(error)]


def together(errors: Sequence[LightRFTVisualError]) -> LightRFTVisualError:
    """One error that says all of them, each once."""
    texts = list(dict.fromkeys(text for error in errors for text in parts_of(error)))
    return errors[0] if len(texts) == 1 else SeveralWrong(texts)


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


@dataclass(frozen=True)
class Constraint:
    """One demand on a value.

    Args:
        holds: whether a value, never None, meets it.
        words: what is said of one that does not, behind 'NAME is VALUE; '.
        choices: the values allowed, for `--help`; empty where they cannot be listed.
        registry: what names more of them.
        meaning: what a section has in the place of a value as it was written.
    """

    holds: Callable[[Any], bool]
    words: str = ""
    choices: tuple = ()
    registry: Registry | None = None
    meaning: Callable[[Any], Any] | None = None

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


def one_of(*allowed: Any, meaning: Callable[[Any], Any] | None = None) -> Constraint:
    """One of the values, which `--help` lists, or what means one of them."""
    words = f"it must be one of: {', '.join(map(str, allowed))}"
    return Constraint(lambda value: value in allowed, words, allowed, meaning=meaning)


def registered(registry: Registry, *besides: str) -> Constraint:
    """A name of the registry, as it stands when the value is checked, or one of those besides."""
    return Constraint(lambda value: value in besides or value in registry, "", besides, registry)


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def said(section: Any, name: str, usual: Any = None) -> str:
    """A setting with its value, for messages, and that nobody chose it where it is at its default.

    Args:
        section: of the configuration.
        name: of the setting in it.
        usual: a value that counts as the default too, such as the algorithm's; None: no other.
    """
    value, default = getattr(section, name), next(item.default for item in fields(section) if item.name == name)
    return f"{name} {value}" + (" (the default)" if value in (default, usual) else "")


def default_of(item: Field) -> Any:
    """The value of a dataclass's field where none is given."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def not_usual(section: Any, names: Iterable[str] | None = None) -> list[str]:
    """The settings of a section, of `names` where those are given, that are not at their defaults."""
    usual = {item.name: default_of(item) for item in fields(section)}
    return [name for name in (usual if names is None else names) if getattr(section, name) != usual[name]]


def nearest(value: int, allowed: Iterable[int]) -> str:
    """The numbers of `allowed` that are nearest to a value, from below and from above, as words."""
    below = max((number for number in allowed if number <= value), default=None)
    above = min((number for number in allowed if number >= value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)


def divisors(total: int, multiple: int = 1) -> list[int]:
    """The multiples of `multiple` that divide `total`."""
    return [number for number in range(multiple, total + 1, multiple) if total % number == 0]


def settle_update(train: Any, rollout: Any, usual: Any = None) -> None:
    """Set train_batch_size to the samples of an optimizer step: all of a rollout where it is 0 or more than those.

    Args:
        train: the section with the sizes of an update, in samples or in prompts.
        rollout: the section with the sizes of a rollout.
        usual: has the algorithm's n_samples_per_prompt, and the train_batch_size that stands in the place of None where
            it divides the rollout; else, and without it, the whole rollout does.

    Raises:
        ConfigError: where the rollout does not divide into updates, with numbers that work.
    """
    prompts, groups = rollout.rollout_batch_size, train.groups_per_update
    if groups is not None:
        require(
            prompts % groups == 0 or groups > prompts,
            f"{said(rollout, 'rollout_batch_size')} does not divide into groups_per_update {groups}; use "
            f"{nearest(groups, divisors(prompts))}",
        )
        train.train_batch_size = groups * rollout.n_samples_per_prompt
    size, total = train.train_batch_size, prompts * rollout.n_samples_per_prompt
    if size is None:
        size = (usual and usual.train_batch_size) or 0
        size = size if size and total % size == 0 else 0
    if size > total and os.environ.get("RANK", "0") == "0":
        text = "%s is more than the %d samples of a rollout: an update takes all of them"
        logger.warning(text, said(train, "train_batch_size"), total)
    train.train_batch_size = size if 0 < size < total else total
    samples = said(rollout, "n_samples_per_prompt", usual and usual.n_samples_per_prompt)
    require(
        total % train.train_batch_size == 0,
        f"{said(rollout, 'rollout_batch_size')} * {samples} = {total} samples do not divide into updates of "
        f"{said(train, 'train_batch_size')}; use {nearest(size, divisors(total))}, or 0 for the whole rollout",
    )


def refit_update(train: Any, before: int, now: int, multiple: int) -> None:
    """Set train_batch_size for a rollout of another size: as it is where that divides it, else for as many updates,
    else for one.

    Args:
        train: the section with the sizes of an update.
        before: samples of the rollout that these were settled for.
        now: samples of the rollout.
        multiple: samples of an update are a multiple of it.
    """
    size, updates = train.train_batch_size, before // train.train_batch_size
    allowed = divisors(now, multiple)
    train.train_batch_size = int(next((each for each in (size, now / updates) if each in allowed), now))
    train.groups_per_update = train.gradient_accumulation_steps = None  # they said the former size


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
    """Raise ConfigError for the fields that break one of their constraints, or hold NaN or infinity.

    None is a value of optional fields and meets every constraint; what is typed Any is a user's own.
    """
    wrong = []
    for item in fields(section):
        try:
            _check_field(section, item)
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise together(wrong)


def _check_field(section: Any, item: Field) -> None:
    value = getattr(section, item.name)
    if value is None or is_dataclass(value):
        return
    if "Any" not in str(item.type):
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
        for number in numbers:
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, f"{item.name} is {number}; it must be a finite number")
    for constraint in constraints_of(type(section))[item.name]:
        if constraint.meaning is not None:
            setattr(section, item.name, value := constraint.meaning(value))
        if not constraint.holds(value):
            guessed = isinstance(value, str) and len(value) > 2  # a shorter one is near to anything
            near = nearest_name(value, map(str, constraint.names())) if guessed else None
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(f"{item.name} is {value!r}; {hint}{_words(constraint)}")


NUMBERS = {int: (Integral, "it must be a whole number"), float: (Real, "it must be a number")}


def check_value(section: type, setting: str, value: Any, name: str) -> None:
    """Raise ConfigError for a value from Python that a number of a configuration could not have.

    Args:
        section: that the setting is of.
        setting: whose type and constraints hold; one that is no number is not looked at.
        value: what was given for it.
        name: under which it was given.
    """
    hint = get_type_hints(section).get(setting)
    if hint not in NUMBERS:
        return
    kind, words = NUMBERS[hint]
    require(isinstance(value, kind) and not isinstance(value, bool), f"{name} is {value!r}; {words}")
    require(math.isfinite(value), f"{name} is {value}; it must be a finite number")
    for constraint in constraints_of(section)[setting]:
        require(constraint.holds(value), f"{name} is {value}; {_words(constraint)}")


def _words(constraint: Constraint) -> str:
    if constraint.registry is None:
        return constraint.words
    names = ", ".join(constraint.names())
    return f"it must be one of: {names}; --plugins names a file that adds one"


class Section:
    """Base of the sections of a configuration: their fields are checked when they are made."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError where settings contradict each other; nothing here."""

    def changed(self, **values: Any) -> Self:
        """A copy with other values, unchecked: once a run is open, settings hold what may not be given."""
        made = copy(self)
        vars(made).update(values)
        return made
