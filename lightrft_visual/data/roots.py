"""Where data is looked for that is named by a relative path."""

from __future__ import annotations

import os
from pathlib import Path

ROOT_VARIABLES = ("LIGHTRFT_DATA", "VRL_DATA_ROOT")  # folders for data outside the repository; ours, and VRL's
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE, PACKAGE.parent / "examples")  # which hold datasets/: as installed, and in the repository


def located(path: str | Path) -> Path:
    """The file or folder that a path means: in the working directory, else below a folder of ROOT_VARIABLES, else,
    where it begins with datasets/, a set that is shipped; the path itself where there is none."""
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given
    roots = [Path(os.environ[name]).expanduser() for name in ROOT_VARIABLES if os.environ.get(name)]
    roots += SHIPPED if given.parts[0] == "datasets" else ()
    return next((root / given for root in roots if (root / given).exists()), given)
