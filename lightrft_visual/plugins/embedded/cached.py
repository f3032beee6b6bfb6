"""Files and folders that are built at their first use, and found by their names afterwards."""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...runtime.files import wait_for_lock

logger = logging.getLogger(__name__)


def key_of(made_of: Mapping[str, Any]) -> str:
    """Of all that decides what is built, for its name."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def built_once(target: Path, build: Callable[[Path], None], told: str = "") -> Path:
    """`target`, built elsewhere where it is missing; it appears by one rename, so an interrupted build leaves nothing
    behind.

    One process of a host builds, the others wait for it. A run draws the same random numbers, whether it builds or
    finds.

    Args:
        target: a file or a folder.
        build: makes it at the path that it is called with, whose folder is there.
        told: what is logged before; nothing where it is empty.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        wait_for_lock(lock)  # released with the process, however it ends
        if target.exists():
            return target
        if told:
            logger.info(told)
        aside = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            with torch.random.fork_rng(devices=[]):
                build(aside / target.name)
            (aside / target.name).rename(target)
        except OSError:  # a process of another host, where the lock does not reach, may have been first
            if not target.exists():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target
