"""Payloads in DeepSpeed's files do not run; that steps go on bit for bit after a load is in test_precision.py."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.safe_loading import SafeCheckpointEngine


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_payload_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    torch.save({"optimizer": torch.zeros(1), "bad": Payload(mark)}, tmp_path / "optim_states.pt")
    with pytest.raises(CheckpointError, match="optim_states.pt is refused"):
        SafeCheckpointEngine().load(str(tmp_path / "optim_states.pt"))
    assert not mark.exists()
    (tmp_path / "cut.pt").write_bytes((tmp_path / "optim_states.pt").read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"cut\.pt"):
        SafeCheckpointEngine().load(str(tmp_path / "cut.pt"))


def test_enums_load_whatever_pythons_way_of_pickling_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))
    state = {"zero_stage": ZeroStageEnum.gradients, "weights": torch.arange(3.0)}
    for zipped in (False, True):
        engine = SafeCheckpointEngine()
        engine.zipfile_serialization = zipped
        engine.save(state, str(tmp_path / "optim_states.pt"))
        found = engine.load(str(tmp_path / "optim_states.pt"))
        assert found["zero_stage"] is ZeroStageEnum.gradients
        assert torch.equal(found["weights"], state["weights"])
