"""What a run says while it starts, and what it does not import."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from lightrft_visual.runtime.start_up import importing, log_stage, seldom_collecting

OF_A_RUN = (
    "import sys; import lightrft_visual.launch; early = {'torch', 'transformers', 'deepspeed'} & set(sys.modules);"
    "import lightrft_visual.trainer.vl.trainer, lightrft_visual.rollout.vllm.engine;"
    "import lightrft_visual.observe.report.page;"
    "late = {'diffusers', 'vllm', 'ray', 'wandb', 'bokeh', 'peft'} & set(sys.modules);"
    "print('found', sorted(early | late))"
)


@pytest.mark.slow
def test_a_vision_language_run_imports_no_diffusers_and_its_start_no_torch():
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", OF_A_RUN], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "found []" in done.stdout, done.stdout + done.stderr[-2000:]


def test_the_first_rank_alone_says_what_begins(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    log_stage("loading the models")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    log_stage("loading the models")
    assert capsys.readouterr().out.endswith(" s] loading the models\n")


def test_the_garbage_collector_rests_while_libraries_are_imported():
    try:
        with importing():
            assert not gc.isenabled()
            with importing():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_garbage_collector_looks_seldom_while_a_run_is_built():
    before = gc.get_threshold()
    with seldom_collecting():
        assert gc.get_threshold() == (10_000, *before[1:])
    assert gc.get_threshold() == before
