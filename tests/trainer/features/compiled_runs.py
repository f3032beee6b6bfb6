"""Run by a rank: the runs of a plan, whose programs are traced and run as they are; the compiler would take minutes."""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from pathlib import Path

import run_many

from lightrft_visual.trainer.features import compiled_blocks

if __name__ == "__main__":
    compiled_blocks.compile_blocks = partial(compiled_blocks.compile_blocks, backend="aot_eager")
    try:
        run_many.main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
