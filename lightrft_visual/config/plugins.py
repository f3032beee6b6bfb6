"""Files and modules of a user's own that register choices, imported before a configuration is checked."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError

NAMED = re.compile(r"(?:^|\s)(?:--)?plugins[= ](\S+)")
_files: dict[Path, ModuleType] = {}  # those loaded in this process


def load_plugins(plugins: str | None) -> list[ModuleType]:
    """Import each of the comma-separated `path.py` or module names, once per process.

    Modules are looked for in the working directory as well, and beside a file those that it imports. Raises ConfigError
    for one that is not there, or with the user's own line for whatever it raises.
    """
    return [_load(name) for name in (part.strip() for part in (plugins or "").split(",")) if name]


def plugins_in(arguments: Sequence[str]) -> str:
    """What a command line names as plugins, for `--help`, which is given without reading the rest."""
    return ",".join(NAMED.findall(" ".join(arguments)))


def _load(name: str) -> ModuleType:
    from ..runtime.usercode.calls import describe_error  # loads torch, as nearly every plugin does
    from ..runtime.usercode.loading import load_module
    from ..runtime.usercode.surroundings import put_back

    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if path not in _files:
            _files[path] = load_module(name, "plugin")
        return _files[path]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        with put_back(f"plugin {name}", importing=True):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugin {name} fails on import: {describe_error(error).removeprefix('raised ')}") from error
