"""Run by two ranks: three optimizer steps of ZeRO 1 to 3, states and weights at rest on the host in between or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from launched import leave

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.train_engine import TrainEngine


def trained(strategy: DeepspeedStrategy, offload: bool, folder: str) -> tuple[list[float], list[bool]]:
    """(weights after three steps, whether states were on the host when they had to be)."""
    engine, inputs = made(strategy)
    seen = []
    for step in range(3):
        if offload:
            rest(engine)
            seen.append(bytes_held(engine) == 0)
            # ZeRO-3's bucket of gradients, far larger than this model, leaves nothing behind.
            seen.append(sum(size * len(kept) for size, kept in engine._states.memory.free.items()) < 100_000)
            with torch.no_grad():
                engine(inputs)
            seen.append(bool(engine._states.away) and not engine._weights.away)
            engine.offload_weights()
        if step == 1:
            engine.save(folder, "middle")
            rest(engine) if offload else None
        engine.accumulate(engine(inputs).square().sum(), last=True)
        seen.append(not engine._states.away and bytes_held(engine) > 0)
        assert engine.step().applied
    rest(engine) if offload else None
    return resumed(engine, inputs, folder), seen


def made(strategy: DeepspeedStrategy) -> tuple[TrainEngine, torch.Tensor]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    module[0].weight.requires_grad_(False)
    return strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9)), torch.randn(6, 4)


def resumed(engine: TrainEngine, inputs: torch.Tensor, folder: str) -> list[float]:
    engine.load(folder, "middle")
    engine.accumulate(engine(inputs).square().sum(), last=True)
    engine.step()
    with engine.gathered(list(engine.module.parameters())):
        return [p.double().sum().item() for p in engine.module.parameters()]


def rest(engine: TrainEngine) -> None:
    engine.offload()
    engine.offload_weights()


def bytes_held(engine: TrainEngine) -> int:
    """Of weights and of what the optimizer keeps."""
    tensors = [*engine._state_tensors(), *engine._weight_tensors()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def main(out: str) -> None:
    results = {}
    for stage in (1, 2, 3):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if stage == 1:
            strategy.setup_distributed()
        plain, _ = trained(strategy, False, f"{out}/plain{stage}")
        moved, seen = trained(strategy, True, f"{out}/moved{stage}")
        on_host = DeepspeedStrategy(DistributedConfig(zero_stage=stage, adam_offload=True))
        there = resumed(*made(on_host), f"{out}/plain{stage}")  # a checkpoint of Adam on the device
        results[stage] = {"plain": plain, "moved": moved, "seen": all(seen), "adam_offload": there}
    Path(out, f"{collectives.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
