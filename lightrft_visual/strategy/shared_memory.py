"""Shared memory that DeepSpeed leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

from . import collectives

SHARED_MEMORY = Path("/dev/shm")


def unlink_buffers() -> None:
    """Take away the name of this rank's all-reduce buffer once every rank has opened it; all ranks call this together.

    DeepSpeed's CPU communication keeps 66 MiB a rank in a named file and removes the name only at an orderly exit. Of
    a killed run it stays in memory until the host restarts, and a later run on the same port would open what it left.
    """
    collectives.barrier()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{collectives.rank()}"
    (SHARED_MEMORY / name).unlink(missing_ok=True)
