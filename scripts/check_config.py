#!/usr/bin/env python
"""Check recipes without starting anything.

    python scripts/check_config.py                                   every recipe and layer below examples/configs
    python scripts/check_config.py experiment/vl/geometry3k_grpo     one, printed as it resolves
    python scripts/check_config.py my.yaml --lr 1e-6 top_p=0.9       one, with settings as on the command line of a run

The exit code is 1 when anything is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightrft_visual.config.load import CONFIG_DIRS, ParsedRun, parse_run, resolved_yaml
from lightrft_visual.config.spellings import ROOTS
from lightrft_visual.errors import ConfigError


def check(name: str, settings: list[str]) -> ParsedRun:
    """Load a recipe, or a layer alone, under the first schema that it fits. Raises ConfigError of the likeliest one."""
    errors = []
    for root in sorted(ROOTS, key=lambda root: root.kind not in Path(name).parts):
        try:
            return parse_run(root.schema, ["--config", name, *settings], preset=root.preset)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def shipped() -> list[str]:
    """Names of all shipped recipes and layers."""
    files = [(folder, file) for folder in CONFIG_DIRS for file in sorted(folder.rglob("*.yaml"))]
    return [file.relative_to(folder).with_suffix("").as_posix() for folder, file in files]


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    chosen, settings = argv[:1], argv[1:]
    failed = 0
    for name in chosen or shipped():
        try:
            run = check(name, settings)
            print(resolved_yaml(run.config) if chosen else f"ok      {name}")
        except ConfigError as error:
            failed += 1
            print(f"error   {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
