"""Run by a rank: the runs of a plan, whose programs are traced and run as they are; the compiler would take minutes."""

from functools import partial

import run_many

from lightrft_visual.trainer.features import compiled_blocks

if __name__ == "__main__":
    compiled_blocks.compile_blocks = partial(compiled_blocks.compile_blocks, backend="eager")
    run_many.as_program(run_many.main)
