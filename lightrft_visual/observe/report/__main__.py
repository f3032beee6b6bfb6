"""Write report.html of a run, or of several side by side.

python -m lightrft_visual.observe.report RUN_DIR [RUN_DIR2 …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...errors import DataError, refused_as
from .page import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 2 when a folder does not exist."""
    parser = argparse.ArgumentParser(prog="python -m lightrft_visual.observe.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("-o", "--output", default="report.html")
    parser.add_argument("--title")
    chosen = parser.parse_args(arguments)
    try:
        with refused_as(DataError, "the report cannot be written"):
            path = write_report(chosen.runs, chosen.output, chosen.title)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
