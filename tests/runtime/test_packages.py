"""A package that only some runs need is asked for by name, with the line that installs it."""

import importlib
import sys

import pytest

from lightrft_visual import launch
from lightrft_visual.errors import ConfigError
from lightrft_visual.runtime import packages
from lightrft_visual.runtime.packages import OPTIONAL, needed, unseen_devices, wrong_torchvision


@pytest.mark.parametrize("name", OPTIONAL)
def test_missing_package_is_named_with_what_it_is_for_and_how_to_get_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught, needed(name):
        importlib.import_module(name)
    purpose, how = OPTIONAL[name]
    assert purpose in str(caught.value) and str(caught.value).endswith(
        f"the package {name}, which is not installed: {how}"
    )


def test_server_without_fastapi_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "lightrft_visual.rewards.remote.server", raising=False)
    with pytest.raises(ConfigError, match="pip install fastapi uvicorn"):
        importlib.import_module("lightrft_visual.rewards.remote.server")


def test_torchvision_of_another_build_than_torch_is_said_with_what_to_install(monkeypatch, tmp_path):
    assert wrong_torchvision() is None
    (tmp_path / "torchvision").mkdir()
    code = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(code)
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    told = wrong_torchvision()
    assert "nms does not exist" in told and "from one index" in told and "pip install 'torch===2." in told


@pytest.mark.parametrize(
    ("built", "devices", "chosen", "told"),
    [
        ("13.0", 8, None, "is built for CUDA 13.0: nvidia-smi says"),
        (None, 8, "0,1", "is built for CPUs: install a build for CUDA"),
        ("13.0", 8, "", None),
        ("13.0", 0, "0,1", None),  # DeepSpeed's launcher names devices on hosts without any
    ],
)
def test_devices_that_torch_does_not_see_are_said_when_a_run_starts(built, devices, chosen, told, monkeypatch, caplog):
    monkeypatch.setattr(packages, "nvidia_devices", lambda: devices)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    launch._build(lambda: None)
    assert (told in caplog.text and "8 NVIDIA device(s)" in caplog.text) if told else not caplog.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert unseen_devices() is None
