"""Freed memory stays with the process for the next tensors, unless the user has set malloc himself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy
if sys.argv[1] == "kept":
    from lightrft_visual.runtime.host_memory import keep_freed_memory
    keep_freed_memory()

def several():  # 48 MiB in blocks of 8, as the tensors of a forward and of its backward
    return [numpy.ones(2**20) for _ in range(6)]

several()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    several()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's settings are glibc's")


def pages_faulted(kind: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = [sys.executable, "-c", PROGRAM, kind]
    return int(subprocess.run(run, env=inherited | environment, capture_output=True, text=True, check=True).stdout)


def test_blocks_that_were_freed_are_used_again():
    given_back = pages_faulted("plain")
    assert given_back > 2_000  # 36,864 pages of 4 KiB, fewer where the system hands out larger ones
    assert pages_faulted("kept") < given_back / 20


def test_what_the_user_set_stays():
    assert pages_faulted("kept", MALLOC_TRIM_THRESHOLD_="131072") > 2_000


GIVEN_BACK = """
import numpy
from lightrft_visual.runtime.host_memory import give_back_freed_memory, keep_freed_memory

def filled():  # MiB
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024

keep_freed_memory()
blocks = [numpy.ones(2**17) for _ in range(128)]  # 1 MiB each
left = blocks[::2]
del blocks
before = filled()
print(give_back_freed_memory(31 * 2**20), before - filled(), give_back_freed_memory(64 * 2**20), before - filled())
"""


def test_memory_between_blocks_that_stay_goes_back_where_it_is_worth_it():
    told = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "False" and int(told[1]) < 4
    assert told[2] == "True" and int(told[3]) > 48
