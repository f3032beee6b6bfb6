"""OpenMP reads its settings when torch is loaded: scripts must have made them by then, whatever they check first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.runtime import deepspeed as deepspeed_strategy
from lightrft_visual.runtime.host_memory import bound_spinning

EXAMPLES = Path(__file__).parents[2] / "examples"


def spin_counts(script: str, folder: Path, **environment: str) -> set[str]:
    """What every OpenMP library that the script loads says of itself, up to its search for a model."""
    others = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD")  # the last one: vLLM in this process sets it
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--pretrain", "no/such-model", "--output_dir", str(folder)],
        env=inherited | {"OMP_DISPLAY_ENV": "verbose", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "no/such-model" in run.stderr, run.stderr
    said = run.stderr + (folder / "log.txt").read_text()
    return set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", said))


@pytest.mark.parametrize("script", ["train_grpo_vl.py", "train_flow_grpo.py"])
@pytest.mark.slow
def test_idle_threads_spin_for_a_bounded_time(script, tmp_path):
    assert spin_counts(script, tmp_path) == {"50000"}


@pytest.mark.slow
def test_what_the_user_set_stays(monkeypatch, tmp_path):
    assert spin_counts("train_flow_grpo.py", tmp_path, GOMP_SPINCOUNT="7") == {"7"}
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bound_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_ranks_share_the_hosts_cores_whatever_the_accelerator_is(monkeypatch, kind):
    chosen = []
    accelerator = SimpleNamespace(
        device_name=lambda: kind, set_device=lambda index: None, communication_backend_name=lambda: "nccl"
    )
    monkeypatch.setattr(deepspeed_strategy, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(deepspeed_strategy.deepspeed, "init_distributed", lambda **arguments: None)
    for name in ("unlink_buffers", "seed_everything", "build_first"):
        monkeypatch.setattr(deepspeed_strategy, name, lambda *arguments: None)
    monkeypatch.setattr(deepspeed_strategy.watchdog, "start", lambda limit: None)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    deepspeed_strategy.DeepspeedStrategy(DistributedConfig()).setup_distributed()
    assert chosen == [2]
