"""Objects of a program that a configuration names by text: `python:NAME` is what `give` was given under NAME.

So a configuration stays text, whatever a run is given from Python: functions, modules, rows of data.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Any

from .errors import ConfigError, DataError, refused_as

PREFIX = "python:"
_objects: dict[str, Any] = {}
_held: Counter[str] = Counter()  # how often each name was given
_asking = Lock()  # of rows, whose code may be made for one thread
_recorded: ContextVar[list[str] | None] = ContextVar("recorded", default=None)  # of `names_given`


@contextmanager
def names_given() -> Iterator[list[str]]:
    """Inside, what this thread gives is named in the innermost list, for `forget`; an error there lets go of it."""
    names: list[str] = []
    before = _recorded.set(names)
    try:
        yield names
    except BaseException:
        forget(names)
        raise
    finally:
        _recorded.reset(before)


def forget(names: Sequence[str]) -> None:
    """Let go of objects, each once for each time that it was given."""
    for name in names:
        _held[name] -= 1
        if _held[name] <= 0:
            _objects.pop(name, None)
            del _held[name]


def give(name: str, value: Any) -> str:
    """The text that names an object from now on, in this process. One that was given before keeps its name."""
    plain = re.sub(r"\W+", "_", name).strip("_") or "object"
    unique = unique_name(plain, [known for known, held in _objects.items() if held is not value])
    _objects[unique] = value
    _held[unique] += 1
    if (names := _recorded.get()) is not None:
        names.append(unique)
    return PREFIX + unique


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name; where it is taken the first of name_2, name_3, ... that is not."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique


def is_given(text: Any) -> bool:
    """Whether a text names an object of a program."""
    return isinstance(text, str) and text.startswith(PREFIX)


def given(text: str, otherwise: str = "") -> Any:
    """The object. Raises ConfigError where this process was not given it: such as for a configuration of another.
    otherwise: what else its message advises."""
    name = text.removeprefix(PREFIX)
    if name not in _objects:
        told = f"{text} is an object of another program, or of a trainer that is closed: give it again"
        raise ConfigError(told + otherwise)
    return _objects[name]


class GivenRows:
    """Rows that a program holds: a list of mappings, or a `datasets.Dataset`, read as rows are asked for.

    folder: where relative paths of media start; None: in the working directory. Raises ConfigError where that was
    removed.
    """

    def __init__(self, data: Any, name: str, folder: Path | None = None) -> None:
        try:
            self.folder = (folder or Path()).absolute()
        except FileNotFoundError:  # MKL ends a process that multiplies there
            raise ConfigError("the working directory was removed: change to one that exists") from None
        self._name = name
        table = hasattr(data, "with_format") and hasattr(data, "features") and data.format["type"] != "custom"
        self._rows = data.with_format("arrow") if table else data
        self.stored = table
        self._json = json_in(self._rows.features.arrow_schema) if table else None

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        """A row for messages, counted from 0."""
        return f"{self._name}:row {index}"

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with refused_as(DataError, self.name(index)):  # it may be code of the program
            if self.stored:  # images stay in their stored form
                return with_json(self._rows[index : index + 1].to_pylist()[0], self._json)
            with _asking:  # such as that of an open file, which has one position
                return _with_lists(self._rows[index])


def json_in(kind: Any) -> Any:
    """Where an Arrow type or schema holds JSON text, as `datasets` stores values of mixed types: True for such text,
    [inner] for a list, {name: inner} for a struct, None where there is none."""
    import pyarrow  # slow to import, and needed for tables alone

    if getattr(kind, "extension_name", None) == "arrow.json":
        return True
    if isinstance(kind, pyarrow.Schema | pyarrow.StructType):
        return {field.name: inner for field in kind if (inner := json_in(field.type))} or None
    inner = json_in(kind.value_type) if hasattr(kind, "value_type") else None
    return [inner] if inner else None


def with_json(value: Any, inner: Any) -> Any:
    """A value of a table with the JSON text in it read; `inner`: what `json_in` says of its type."""
    if value is None or inner is None:
        return value
    if inner is True:
        return json.loads(value)
    if isinstance(inner, list):
        return [with_json(each, inner[0]) for each in value]
    return {**value, **{name: with_json(value[name], each) for name, each in inner.items()}}


def _with_lists(value: Any) -> Any:
    """The same, with lists in place of arrays of objects or texts, as pandas holds lists; others may be media."""
    if getattr(getattr(value, "dtype", None), "kind", None) in tuple("OUST"):
        value = value.tolist()
    if type(value) is dict:
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if type(value) is list else value


def _are_columns(cells: Sequence[Any]) -> bool:
    """Whether these are lists of one length, and not of rows."""
    equal = all(isinstance(each, list) and len(each) == len(cells[0]) for each in cells)
    return equal and not all(each and isinstance(each[0], Mapping) for each in cells)


def source_of(data: Any, name: str, split: str) -> GivenRows:
    """Rows of a data set that a program holds.

    Args:
        data: a `datasets.Dataset`, or a `DatasetDict`, or a sequence of mappings, or what has rows by number, or a
            dict of columns as `Dataset.from_dict` takes it.
        name: for messages, such as train_dataset.
        split: of a `DatasetDict`.

    Raises:
        DataError: for a split that is not there, and for what has no rows, or none by number.
    """
    if isinstance(data, Mapping):
        if split not in data and _are_columns([*data.values()]):
            data = {split: [dict(zip(data, cells)) for cells in zip(*data.values())]}
        if split not in data:
            told = f"{name}: no split {split!r}, and no lists of one length as columns"
            raise DataError(f"{told}; it has: {', '.join(map(str, data))}")
        data = data[split]
    if hasattr(data, "columns") and not isinstance(data, Sequence):  # pandas, polars, pyarrow: numbers are no rows
        raise DataError(f"{name} is a {type(data).__name__}: give a datasets.Dataset made of it, or a list of its rows")
    if not isinstance(data, Sequence) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"{name} is a {type(data).__name__}, without rows by number: give a datasets.Dataset or a list, "
            "such as list(stream.take(1000))"
        )
    if not len(data):
        raise DataError(f"{name} has no rows")
    return GivenRows(data, name)
