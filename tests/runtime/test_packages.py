"""A package that only some runs need is asked for by name, with the line that installs it."""

import importlib
import sys

import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.runtime.packages import OPTIONAL, needed, wrong_torchvision


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
