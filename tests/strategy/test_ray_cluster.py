"""How a process speaks to the Ray cluster of its run; a cluster itself is in the tests of those who use one."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.strategy.ray_cluster import adopt_authentication, authentication, connect


def test_a_rank_speaks_to_the_cluster_as_the_rank_that_started_it(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    adopt_authentication(authentication())
    assert authentication() is None  # of a cluster that asks for nothing
    adopt_authentication("token")
    assert os.environ == {"RAY_AUTH_MODE": "token"}
    adopt_authentication("disabled")
    assert authentication() == "token"  # what the user has set stays


def test_a_process_of_another_cluster_is_told_what_to_do(monkeypatch):
    context = SimpleNamespace(gcs_address="here:1")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert connect("placement split") is connect("placement split", address="here:1") is ray
    with pytest.raises(ConfigError, match="needs the Ray cluster at there:2, but this process is connected to here:1"):
        connect("placement split", address="there:2")
