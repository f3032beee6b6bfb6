"""Files and folders that settings name: where a relative path may lie, and which of them are not there."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from ..errors import nearest
from . import registry

ROOT_VARIABLES = ("LIGHTRFT_DATA", "VRL_DATA_ROOT")  # folders for data outside the repository; ours, and VRL's
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE, PACKAGE.parent / "examples")  # which hold datasets/: as installed, and in the repository
DATA = re.compile(r"\.(jsonl|json|csv|txt|parquet)$")
CODE = re.compile(r"[^,=:]+\.py(?=:)")
FUNCTION = re.compile(r"\s*(python:.*|.+\.py:\w+)\s*")  # one that a program gives, or one of a file
FOLDER = re.compile(r"^(/|\./|\.\./|~|[^=:/]+/[^=:/]+/)")  # by path; other words may be names, of a hub or the registry
MODELS = ("pretrain", "critic_pretrain", "teacher_pretrain", "reward_pretrain")
ROWS = ("prompt_data", "eval_data", "pair_data")
OUTPUTS = ("output_dir", "save_path", "ckpt_path")
NO_REWARD = (
    "no reward is given; name one by --reward_fn path.py:name, --remote_rm_url URL, reward.components.NAME=WEIGHT or "
    "--reward_recipe"
)
FUNCTIONS = ("reward_fn", "gold_fn", "environment", "tools")


def located(path: str | Path) -> Path:
    """The file or folder that a path means: in the working directory, else below a folder of ROOT_VARIABLES, else,
    where it begins with datasets/, a set that is shipped; the path itself where there is none."""
    given = Path(path).expanduser()
    if given.is_absolute() or os.path.exists(given):
        return given
    roots = [Path(os.environ[name]).expanduser() for name in ROOT_VARIABLES if os.environ.get(name)]
    roots += SHIPPED if given.parts[0] == "datasets" else ()
    return next((root / given for root in roots if (root / given).exists()), given)


def missing_files(config: Any, names: Container[str] | None = None) -> list[str]:
    """A line for each model folder, file of rows and file of functions that a run's settings name and that is not
    there, for a built-in name with a slip, for a file in place of an output folder, and for a reward that is lacking.
    Names that may be anything else, such as a hub's, are not looked for. names: of the settings that are looked at,
    default all."""
    outputs = {name: getattr(config.output, name) for name in OUTPUTS if names is None or name in names}
    found = [f"--{name}: {each} is a file, no folder" for name, each in outputs.items() if os.path.isfile(each or "")]
    found += [NO_REWARD] if getattr(config, "lacks_reward", False) else []
    models, rows = registry.checkpoint_resolvers.names(), registry.tasks.names() + registry.drawing_tasks.names()
    sections = config.model, config.data, config.reward, config.guard, getattr(config, "episodes", None)
    for section in filter(None, sections):
        for name in (*MODELS, *ROWS, *FUNCTIONS):
            value = getattr(section, name, None)
            if not isinstance(value, str) or not (names is None or name in names):
                continue
            if name in FUNCTIONS[:2]:
                bad = [part for part in value.split(",") if not FUNCTION.fullmatch(part)]
                found += [f"--{name}: {part!r} names no function of a file: write path.py:function" for part in bad]
            parts = CODE.findall(value) if name in FUNCTIONS else [part.strip() for part in value.split(",")]
            wanted = FOLDER if name in MODELS else DATA if name in ROWS else CODE
            known = rows if wanted is DATA else models if name in MODELS[:3] else ()
            for part in parts:
                near = None if part in known else nearest(part, known)
                if near and not located(part).exists():
                    found.append(f"--{name}: there is no {part}; did you mean {near!r}?")
                elif (wanted is CODE or wanted.search(part) or FOLDER.search(part)) and not located(part).exists():
                    seen_from = "" if part.startswith(("/", "~")) else f" in {Path.cwd()}"
                    found.append(f"--{name}: {part} does not exist{seen_from}")
    return list(dict.fromkeys(found))
