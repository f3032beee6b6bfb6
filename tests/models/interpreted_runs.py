"""Run by a rank that was started by the launcher: the runs of a plan, with Triton's kernels in its interpreter."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "distributed")]

if __name__ == "__main__":
    import interpreted  # noqa: F401  # what the interpreter lacks
    import run_many

    try:
        run_many.main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
