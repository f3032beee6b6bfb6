"""What trainer and worker of a model that draws do apart from Ray; whole runs are in rollout/test_split_runs.py."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.models.diffusion.policy import DiffusionPolicy
from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline
from lightrft_visual.plugins.ray import drawing


def test_trained_weights_are_gathered_in_buckets(monkeypatch):
    """Each gathering of ZeRO-3 waits for the device."""
    divided = {name: nn.Parameter(torch.zeros(0)) for name in ("a", "b", "c", "frozen")}
    for parameter in divided.values():
        parameter.ds_numel = 10
    divided["frozen"].requires_grad_(False)
    whole: list[int] = []

    @contextmanager
    def gathered(parameters):
        whole.append(len(parameters))
        yield

    monkeypatch.setattr(drawing, "gathered", gathered)
    monkeypatch.setattr(drawing, "BUCKET_BYTES", 80)
    weights = drawing.TrainedWeights(SimpleNamespace(named_parameters=divided.items))
    assert [name for name, _ in weights] == ["a", "b", "c"] and whole == [2, 1]


def test_a_worker_compiles_its_blocks_where_the_run_does(tmp_path, monkeypatch):
    build_pipeline(TinyDiffusionSettings()).save_pretrained(tmp_path)
    config, compiled = DiffusionRunConfig(), []
    config.model.compile = True
    monkeypatch.setattr(DiffusionPolicy, "compile_blocks", lambda policy: compiled.append(policy))
    assert compiled == [drawing.WorkerDrawing(config, str(tmp_path)).policy]


def test_workers_are_told_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.py").touch()
    specs = []
    monkeypatch.setattr(drawing, "Workers", lambda config, spec: specs.append(spec))
    local = SimpleNamespace(sampling=None, n_samples_per_prompt=1, old=None, algorithm=None)
    config = DiffusionRunConfig(plugins="mine.py", distributed=DistributedConfig(deterministic=True))
    monkeypatch.setattr(DiffusionRunConfig, "check", lambda self: pytest.fail("of an open run"))
    drawing.remote_drawing(config, local, "model")
    (spec,) = specs
    assert (spec.arguments[1], spec.plugins) == (f"{tmp_path}/model", f"{tmp_path}/mine.py") and spec.deterministic
