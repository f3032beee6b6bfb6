"""Plug-ins that cannot be imported: as if their folders were deleted.

`BLOCKED_PLUGINS=1 pytest` runs the core's tests so (see `conftest.py`): what asks for a plug-in is skipped.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

ROOM = "lightrft_visual.plugins"
VARIABLE = "BLOCKED_PLUGINS"


class Blocker(MetaPathFinder):
    """Refuses modules below `lightrft_visual.plugins`, and the room itself, as Python does those that do not exist."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """None for other modules: the next finder is asked. Raises ModuleNotFoundError."""
        if name == ROOM or name.startswith(f"{ROOM}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block() -> None:
    """From here on, in this process."""
    sys.meta_path.insert(0, Blocker())
