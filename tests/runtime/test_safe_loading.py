"""DeepSpeed checkpoints load bit for bit through the safe reader, and payloads in them do not run."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.runtime.zero.config import ZeroStageEnum
from forked import spawn

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.safe_loading import SafeCheckpointEngine, use_safe_loading


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


def make_engine(stage: int, bf16: bool):
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    use_safe_loading(engine)
    return engine


def train(engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        batch = torch.full((2, 8), 0.1 * (step + 1), dtype=next(engine.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run_stages(_rank: int, folder: str, results) -> None:
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(os.path.join(folder, "store"), 1))
    for stage, bf16 in ((1, False), (2, True), (3, False)):
        engine = make_engine(stage, bf16)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=f"stage_{stage}")
        expected = train(engine, 3)
        resumed = make_engine(stage, bf16)
        path, _ = resumed.load_checkpoint(folder, tag=f"stage_{stage}")
        results[stage] = (path is not None, expected, train(resumed, 3))


def test_resume_is_bit_equal_through_the_safe_reader(tmp_path):
    with mp.Manager() as shared:
        results = shared.dict()
        spawn(run_stages, 1, str(tmp_path), results)
        outcomes = dict(results)
    assert set(outcomes) == {1, 2, 3}
    for found, expected, resumed in outcomes.values():
        assert found and resumed == expected
