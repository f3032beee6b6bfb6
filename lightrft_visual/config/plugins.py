"""Files and modules of a user's own that register choices, imported before a configuration is checked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError

PREFIX = "_lightrft_plugin_"  # of the modules made from files, so that two `mine.py` do not hide each other
NAMED = re.compile(r"(?:^|\s)(?:--)?plugins[= ](\S+)")


def load_plugins(plugins: str | None) -> list[ModuleType]:
    """Import each of the comma-separated `path.py` or module names, once per process. Raises ConfigError.

    Modules are looked for in the working directory as well, and beside a file those that it imports.
    """
    return [_load(name) for name in (part.strip() for part in (plugins or "").split(",")) if name]


def plugins_in(arguments: Sequence[str]) -> str:
    """What a command line names as plugins, for `--help`, which is given without reading the rest."""
    return ",".join(NAMED.findall(" ".join(arguments)))


def _load(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ConfigError(f"plugins: there is no file {name}")
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return _import_file(path) if is_file else importlib.import_module(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"plugins: {name} fails on import: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
