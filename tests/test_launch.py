"""What must happen before torch is loaded, in the order in which the example scripts import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

AS_THE_EXAMPLES = """
import sys
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.schema import RunConfig
from lightrft_visual.config.diffusion_schema import DiffusionRunConfig
from lightrft_visual.launch import bound_spinning
assert "torch" not in sys.modules
bound_spinning()
import torch
"""


def openmp_settings(**environment: str) -> str:
    """What GNU OpenMP says of itself when torch loads it."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", AS_THE_EXAMPLES],
        env=inherited | {"OMP_DISPLAY_ENV": "verbose"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    if "GOMP_SPINCOUNT" not in run.stderr:
        pytest.skip("torch is not built with GNU OpenMP here")
    return run.stderr


def test_idle_threads_spin_for_a_bounded_time():
    assert "GOMP_SPINCOUNT = '50000'" in openmp_settings()


def test_what_the_user_set_stays():
    assert "GOMP_SPINCOUNT = '7'" in openmp_settings(GOMP_SPINCOUNT="7")
    assert "GOMP_SPINCOUNT = '50000'" not in openmp_settings(OMP_WAIT_POLICY="active")
