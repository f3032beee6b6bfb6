"""Run by two ranks: engines of ZeRO 0 to 3 saved at once and behind the run, and a rank that cannot write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from launched import leave

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.checkpoint.behind import write_file
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager, resolve_resume, verify
from lightrft_visual.runtime.checkpoint.state import save_state
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.train_engine import TrainEngine


def stepped(engine: TrainEngine, inputs: torch.Tensor) -> None:
    engine.accumulate(engine(inputs).square().sum(), last=True)
    assert engine.step().applied


def hashes(strategy: DeepspeedStrategy, root: Path) -> list[dict]:
    """Of the files of one state saved at once, and behind a step that changes it."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    module[0].weight.requires_grad_(False)
    engine, inputs = strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9)), torch.randn(6, 4)
    stepped(engine, inputs)
    manager, moments = CheckpointManager(root), torch.ones(3)

    def write(folder: Path) -> None:
        engine.save(str(folder), "policy")
        save_state(folder / f"state{collectives.rank()}", {"moments": moments})

    paths = [manager.save(1, write), manager.save(2, write, behind=True)]
    moments.zero_()
    stepped(engine, inputs)
    manager.finish()
    return [verify(path)["files"] for path in paths]


def failing(root: Path, behind: bool) -> list[str]:
    """What ranks are told where rank 1 cannot write and where there is nothing, what they resume, and the folders."""
    manager = CheckpointManager(root)
    manager.save(1, lambda folder: (folder / f"{collectives.rank()}").write_text("1"))

    def full(path: Path, state: dict) -> None:
        path.write_text("2")
        if collectives.rank() == 1:
            raise OSError(28, "No space left on device")

    def write(folder: Path) -> None:
        path = folder / f"{collectives.rank()}"
        write_file(path, {}, partial(full, path))

    def saved() -> None:
        manager.save(2, write, behind=behind)
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


def main(out: str) -> None:
    results = {}
    for stage in range(4):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if stage == 0:
            strategy.setup_distributed()
        results[stage] = hashes(strategy, Path(out, f"zero{stage}"))
    results |= {name: failing(Path(out, name), name == "behind") for name in ("at_once", "behind")}
    Path(out, f"{collectives.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
