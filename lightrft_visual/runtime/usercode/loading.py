"""Code that a user wrote, by `path.py:name`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError, did_you_mean
from .calls import describe_error, masked
from .surroundings import put_back

MODULE_PREFIX = "_lightrft_reward_"  # of the modules that are made from files: no other process can import them


class LoadedFunction:
    """A callable that remembers the `path.py:name` it came from, so that a process of its own can load it again."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.spec = function, spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def load_reward_fn(spec: str) -> LoadedFunction:
    """The callable of `path.py:name`. Raises ConfigError for a missing file, a failing import, or a missing name."""
    path_text, _, name = spec.rpartition(":")
    if not path_text or not name.isidentifier():
        raise ConfigError(f"reward function {spec!r}: write it as path.py:function")
    namespace = vars(load_module(path_text))
    if not callable(namespace.get(name)):
        functions = [k for k, v in namespace.items() if inspect.isroutine(v) and not k.startswith("_")]
        raise ConfigError(f"{path_text} has no function {name!r}{did_you_mean(name, functions)}")
    return LoadedFunction(namespace[name], spec)


def load_module(path_text: str, what: str = "reward file") -> Any:
    """Import a Python file by path, under a name of its own, so that two `rewards.py` do not hide each other.

    Modules beside the file can be imported, as when Python runs the file itself. Raises ConfigError that shows the
    user's own line for whatever the file raises; `what` names the file there.
    """
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what} {path_text} does not exist")
    if path.suffix != ".py":
        raise ConfigError(f"{what} {path_text} is not a Python file (.py)")
    module_name = f"{MODULE_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    specification = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module  # dataclasses and pickling look the module up by name
    try:
        with put_back(f"{what} {path_text}", importing=True), _beside(path.parent):
            specification.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what the file raises, SystemExit and panics of extensions included
        del sys.modules[module_name]
        told = masked(describe_error(error)).removeprefix("raised ")
        raise ConfigError(f"{what} {path_text} fails on import: {told}") from error
    return module


_homes: set[str] = set()  # folders of reward files loaded so far


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """The folder first on the module path, and last afterwards, for imports inside functions."""
    home = str(folder)
    for name, module in list(sys.modules.items()):  # another reward file's helpers.py is not this one's
        file = getattr(module, "__file__", None)
        own = folder / f"{name}.py"
        if file and str(Path(file).parent) in _homes - {home} and own.is_file() and Path(file) != own:
            del sys.modules[name]
    _homes.add(home)
    sys.path.insert(0, home)
    try:
        yield
    finally:
        sys.path.remove(home)
        if home not in sys.path:
            sys.path.append(home)


def callable_name(function: Callable[..., Any]) -> str:
    """A short name for messages and metrics: the function's own, or its class's."""
    while isinstance(function, (functools.partial, LoadedFunction)):
        function = function.func if isinstance(function, functools.partial) else function.function
    return function.__name__ if inspect.isroutine(function) or inspect.isclass(function) else type(function).__name__
