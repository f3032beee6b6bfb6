"""OpenMP reads its settings when torch is loaded: scripts must have made them by then, whatever they check first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft_visual.strategy.host import bound_spinning

EXAMPLES = Path(__file__).parents[2] / "examples"


def spin_counts(script: str, **environment: str) -> set[str]:
    """What every OpenMP library that the script loads says of itself, up to its search for a model."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--pretrain", "/no/such/model"],
        env=inherited | {"OMP_DISPLAY_ENV": "verbose"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "/no/such/model" in run.stderr, run.stderr
    return set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr))


@pytest.mark.parametrize("script", ["train_grpo_vl.py", "train_flow_grpo.py"])
def test_idle_threads_spin_for_a_bounded_time(script):
    assert spin_counts(script) == {"50000"}


def test_what_the_user_set_stays(monkeypatch):
    assert spin_counts("train_flow_grpo.py", GOMP_SPINCOUNT="7") == {"7"}
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bound_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
