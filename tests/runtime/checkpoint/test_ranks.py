"""Two gloo ranks: each writes its own files, and a failure on one is a failure on both."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import torch.distributed as dist
import torch.multiprocessing as mp

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager, resolve_resume, verify


def run_rank(rank: int, root: str, results) -> None:
    store = dist.FileStore(os.path.join(root, "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    manager = CheckpointManager(Path(root) / "run")

    def write(folder: Path) -> None:
        (folder / f"rank_{rank}.bin").write_text(f"rank {rank}")

    def fail_on_rank_1(folder: Path) -> None:
        write(folder)
        if rank == 1:
            raise OSError(28, "No space left on device")

    outcome = [manager.save(1, write).name]
    try:
        manager.save(2, fail_on_rank_1)
        outcome.append("saved")
    except CheckpointError as error:
        outcome.append(str(error))
    outcome.append(resolve_resume("auto", Path(root) / "run").name)
    try:
        resolve_resume("auto", Path(root) / "empty")
    except CheckpointError as error:
        outcome.append(str(error))
    results[rank] = outcome
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    with mp.Manager() as shared:
        results = shared.dict()
        forked.spawn(run_rank, 2, str(tmp_path), results)
        outcomes = dict(results)
    assert outcomes[0] == outcomes[1]
    first, second, resumed, nothing = outcomes[0]
    assert first == resumed == "checkpoint-000001"
    assert "on rank 1" in second and "the disk is full" in second
    assert "no complete checkpoint" in nothing
    manifest = verify(tmp_path / "run" / "checkpoint-000001")
    assert list(manifest["files"]) == ["rank_0.bin", "rank_1.bin"] and manifest["world_size"] == 2
