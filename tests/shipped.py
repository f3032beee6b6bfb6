"""The recipes and layers below examples/configs."""

from pathlib import Path

from lightrft_visual.config.load import CONFIG_DIRS, ParsedRun, parse_run
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.errors import ConfigError

NAMES = [
    file.relative_to(root).with_suffix("").as_posix() for root in CONFIG_DIRS for file in sorted(root.rglob("*.yaml"))
]
EXPERIMENTS = [name for name in NAMES if name.startswith("experiment/")]


def parsed(name: str, settings: list[str] = ()) -> ParsedRun:
    """A recipe, or a layer alone, under the first schema that it fits. Raises ConfigError of the likeliest one."""
    errors = []
    for root in sorted(ROOTS, key=lambda root: root.kind not in Path(name).parts):
        try:
            return parse_run(root.schema, ["--config", name, *settings], preset=root.preset)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
