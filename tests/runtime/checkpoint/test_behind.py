"""Checkpoints that a thread writes while the run goes on."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks

from lightrft_visual.config.shared import OutputConfig
from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.checkpoint.behind import Copies, SaveBehind, write_file
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager, resolve_resume, together, verify
from lightrft_visual.runtime.checkpoint.state import load_state, save_state
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.train_engine import TrainEngine
from lightrft_visual.trainer.loop import PolicyTrainer
from lightrft_visual.trainer.run_state import RunState


class Gate:
    """Writes a file when it is let to."""

    def __init__(self):
        self.open, self.error = threading.Event(), None

    def __call__(self, folder: Path) -> None:
        write_file(folder / "x", {}, lambda _: self._write(folder / "x"))

    def _write(self, path: Path) -> None:
        self.open.wait(20)
        if self.error is not None:
            raise self.error
        path.write_bytes(b"12345")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_save_behind_the_run_of_a_relative_folder_is_complete_while_the_working_folder_is_another(
    tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    manager, gate = CheckpointManager("run"), Gate()
    manager.save(1, gate, behind=True)
    monkeypatch.chdir(tmp_path / "elsewhere")  # as a reward function may, inside
    gate.open.set()
    assert manager.behind.written.wait(20)
    manager.behind.join()
    monkeypatch.chdir(tmp_path)
    manager.finish()
    assert verify(tmp_path / "run" / "checkpoint-000001")["step"] == 1


def test_a_save_behind_the_run_is_no_checkpoint_until_all_is_written(tmp_path):
    manager, gate = CheckpointManager(tmp_path), Gate()
    manager.save(1, gate, behind=True)
    assert names(tmp_path) == [".staging-checkpoint-000001"] and not [*manager.candidates()]
    gate.open.set()
    manager.finish()
    assert names(tmp_path) == ["checkpoint-000001", "latest"]
    assert list(verify(tmp_path / "checkpoint-000001")["files"]) == ["x"]
    assert manager.saved[0].size == 5 and manager.saved[0].paused < manager.saved[0].seconds


def test_the_next_save_waits_for_the_one_before_and_old_ones_go_when_it_is_complete(tmp_path):
    manager, gate = CheckpointManager(tmp_path, max_num=1), Gate()
    manager.save(1, gate, behind=True)
    threading.Timer(0.2, gate.open.set).start()
    manager.save(2, gate, behind=True)
    manager.finish()
    assert names(tmp_path) == ["checkpoint-000002", "latest"]


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    manager, gate, state = CheckpointManager(tmp_path), Gate(), {"w": torch.ones(3), "steps": [1]}

    def write(folder: Path) -> None:
        gate(folder)
        save_state(folder / "state", state)

    manager.save(1, write, behind=True)
    state["w"].zero_()
    state["steps"].append(2)
    gate.open.set()
    manager.finish()
    found = load_state(tmp_path / "checkpoint-000001" / "state")
    assert found["w"].tolist() == [1, 1, 1] and found["steps"] == [1]


def test_an_error_of_the_thread_is_raised_by_finish_and_leaves_the_last_checkpoint(tmp_path):
    manager, gate = CheckpointManager(tmp_path), Gate()
    manager.save(1, lambda folder: (folder / "x").write_text("1"))
    gate.error = OSError(28, "No space left on device")
    gate.open.set()
    manager.save(2, gate, behind=True)
    with pytest.raises(CheckpointError, match=f"saving checkpoint-000002 failed: the disk is full: {tmp_path}"):
        manager.finish()
    assert names(tmp_path) == ["checkpoint-000001", "latest"]
    manager.finish()


def test_a_save_that_fails_before_its_thread_begins_leaves_nothing_to_the_next_one(tmp_path):
    manager, gate = CheckpointManager(tmp_path), Gate()
    gate.open.set()

    def write(folder: Path) -> None:
        save_state(folder / "state", {"w": torch.ones(3)})
        raise OSError(5, "the disk is gone")

    with pytest.raises(CheckpointError, match="saving checkpoint-000001 failed"):
        manager.save(1, write, behind=True)
    manager.save(2, gate, behind=True)
    manager.finish()
    assert names(tmp_path) == ["checkpoint-000002", "latest"]
    assert list(verify(tmp_path / "checkpoint-000002")["files"]) == ["x"]


def test_a_rank_that_fails_stays_until_rank_0_has_made_a_checkpoint_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrft_visual.runtime.checkpoint.behind.is_rank_0", lambda: False)
    staging, stayed = tmp_path / "staging", tmp_path / "checkpoint-000001"
    staging.mkdir()
    of_rank_1 = SaveBehind(staging, Copies(), lambda files: None)
    of_rank_1.start()
    threading.Timer(0.3, staging.rename, [stayed]).start()
    of_rank_1.give_up(limit=20)
    assert stayed.exists()


def test_files_that_libraries_write_at_once_are_listed_too(tmp_path):
    manager = CheckpointManager(tmp_path)

    def write(folder: Path) -> None:
        (folder / "script.py").write_text("1")
        save_state(folder / "state", {"a": 1})

    manager.save(1, write, behind=True)
    manager.finish()
    assert list(verify(tmp_path / "checkpoint-000001")["files"]) == ["script.py", "state"]


def test_copies_share_what_the_originals_share_and_use_the_same_memory_again():
    flat, copies = torch.arange(6.0), Copies()
    state = {"views": [flat[:2], flat[2:]], "p": torch.nn.Parameter(torch.ones(2)), "n": 3}
    found = copies.of(state)
    first, second = found["views"]
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata != flat.untyped_storage()._cdata
    assert second.tolist() == [2, 3, 4, 5] and isinstance(found["p"], torch.nn.Parameter) and found["n"] == 3
    copies.release()
    assert copies.of(state)["views"][0].data_ptr() == first.data_ptr()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(saved_by_ranks, str(tmp_path_factory.mktemp("behind")))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_write_behind_the_run_the_files_that_they_write_at_once(two_ranks, stage):
    at_once, behind = two_ranks[0][stage]
    assert behind == at_once and {"state0", "state1"} < behind.keys()
    assert any(name.endswith("model_states.pt") for name in behind)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at_once", "behind", "engine"])
def test_a_rank_that_cannot_write_fails_all_ranks_and_leaves_the_last_checkpoint(two_ranks, how):
    assert two_ranks[0][how] == two_ranks[1][how]
    told, nothing, resumed, *folders = two_ranks[0][how]
    assert "saving checkpoint-000002 failed on rank 1: the disk is full" in told
    assert "no complete checkpoint" in nothing and resumed == "checkpoint-000001"
    assert folders == ["checkpoint-000001", "latest"]


@pytest.mark.slow
def test_ranks_wait_for_one_whose_disk_is_slower_than_the_limit_of_a_collective(two_ranks):
    assert [each["slow"] for each in two_ranks] == ["written", "written"]


def stepped(engine: TrainEngine, inputs: torch.Tensor) -> None:
    engine.accumulate(engine(inputs).square().sum(), last=True)
    assert engine.step().applied


@pytest.mark.slow
def test_a_folder_that_a_rank_does_not_see_is_refused_at_the_start_on_all_ranks(two_ranks):
    assert two_ranks[0]["unseen"] == two_ranks[1]["unseen"]
    told, left = two_ranks[0]["unseen"]
    assert "failed on rank 1: rank 1 does not see" in told and "shared file system" in told and left == []


def saved_as_in_a_run(engine: TrainEngine, folder: Path) -> None:
    PolicyTrainer.save_engines(SimpleNamespace(engines=lambda: {"policy": engine}), folder)


def hashes(strategy: DeepspeedStrategy, root: Path) -> list[dict]:
    """Of the files of one state saved at once, and behind a step that changes it."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    module[0].weight.requires_grad_(False)
    engine, inputs = strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9)), torch.randn(6, 4)
    stepped(engine, inputs)
    manager, moments = CheckpointManager(root), torch.ones(3)

    def write(folder: Path) -> None:
        saved_as_in_a_run(engine, folder)
        save_state(folder / f"state{collectives.rank()}", {"moments": moments})

    paths = [manager.save(1, write), manager.save(2, write, behind=True)]
    moments.zero_()
    stepped(engine, inputs)
    manager.finish()
    return [verify(path)["files"] for path in paths]


def failing(root: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks are told where rank 1 cannot write and where there is nothing, what they resume, and the folders.

    how: files are written at once, behind the run, or by DeepSpeed, whose saving has collectives.
    """
    manager = CheckpointManager(root)
    manager.save(1, lambda folder: (folder / f"{collectives.rank()}").write_text("1"))

    def full(path: Path, state: dict) -> None:
        path.write_text("2")
        if collectives.rank() == 1:
            raise OSError(28, "No space left on device")

    def write(folder: Path) -> None:
        path = folder / f"{collectives.rank()}"
        write_file(path, {}, partial(full, path))

    if how == "engine":
        engine = DeepspeedStrategy(DistributedConfig()).prepare(torch.nn.Linear(4, 4), OptimizerSettings(1e-2, 9))
        stepped(engine, torch.ones(2, 4))
        monkeypatch.setattr(torch, "save", lambda state, f, **_: full(Path(f), state))
        write = partial(saved_as_in_a_run, engine)

    def saved() -> None:
        manager.save(2, write, behind=how == "behind")
        manager.finish()

    told = [refused(saved), refused(partial(resolve_resume, "auto", root / "empty")), resolve_resume("auto", root).name]
    collectives.barrier()
    return told + sorted(path.name for path in root.iterdir())


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def saved_by_ranks(out: str) -> dict:
    """Engines of ZeRO 0, 2 and 3 saved at once and behind the run, and a rank that cannot write."""
    results = {}
    for stage in (0, 2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if stage == 0:
            strategy.setup_distributed()
        results[stage] = hashes(strategy, Path(out, f"zero{stage}"))
    with pytest.MonkeyPatch.context() as patch:
        results |= {name: failing(Path(out, name), name, patch) for name in ("at_once", "behind", "engine")}
        os.makedirs(f"{out}/unseen", exist_ok=True)
        state = SimpleNamespace(
            output=OutputConfig(output_dir=f"{out}/unseen"), manager=CheckpointManager(f"{out}/unseen")
        )
        patch.setattr(Path, "is_dir", lambda path: collectives.rank() == 0)
        told = refused(partial(RunState.check_space, state, 1))
    collectives.barrier()
    results["unseen"] = told, os.listdir(f"{out}/unseen")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    return results | {"slow": together("saving", lambda: time.sleep(3 * collectives.rank()) or "written")}
