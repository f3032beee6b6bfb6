"""`use_liger_kernel`: values by Triton's interpreter in a process of its own, what is refused, whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import run_ranks
from stock_families import stock_checkpoint

from lightrft_visual.config.load import load_config
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.plugins.liger import kernels as liger

HERE = Path(__file__).parent
KERNELS = ModelConfig(use_liger_kernel=True)


@pytest.mark.slow
def test_models_and_modules_compute_with_kernels_what_they_compute_without():
    """In Triton's interpreter; whatever fails there is said here."""
    pytest.importorskip("liger_kernel")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, str(HERE / "interpreted_liger.py")], env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=800,
        cwd=HERE.parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-1000:]


def test_a_missing_package_is_named_before_the_model_is_looked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"needs the package liger_kernel.*pip install 'lightrft_visual\[liger\]'"):
        open_checkpoint("/no/such/model", KERNELS, DataConfig())


def test_a_run_on_the_cpu_is_refused_before_the_model_is_looked_for(monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="use_liger_kernel: Liger's Triton kernels run on a card, .* leave it out"):
        open_checkpoint("/no/such/model", KERNELS, DataConfig())


def test_supervised_runs_have_the_kernels():
    assert load_config(SFTRunConfig, ["--use_liger_kernel"], preset=None).model.use_liger_kernel


@pytest.mark.slow
def test_divided_weights_give_the_log_probs_and_gradients_that_they_give_without_kernels(tmp_path, monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    stock_checkpoint(tmp_path / "model", "qwen2_5_vl")
    run_ranks(HERE / "liger_ranks.py", str(tmp_path), timeout=600)
    for rank in range(2):
        log_probs, norm, size = json.loads((tmp_path / f"{rank}.json").read_text())
        assert log_probs <= 1e-5 and norm <= 1e-5 * size and size > 0
