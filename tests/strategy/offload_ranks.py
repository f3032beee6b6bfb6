"""Run by one rank: three optimizer steps of ZeRO 1 and 2, states at rest on the host in between or not."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.strategy.deepspeed import DeepspeedStrategy, OptimizerSettings


def trained(strategy: DeepspeedStrategy, offload: bool) -> tuple[list[float], list[bool]]:
    """(weights after three steps, whether states were on the host when they had to be)."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    engine = strategy.prepare(module, OptimizerSettings(1e-2, total_steps=9))
    inputs, seen = torch.randn(6, 4), []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(3):
            if offload:
                engine.offload()
                seen.append(len(engine.engine.optimizer.offloaded_states) == 2)
                with torch.no_grad():
                    engine(inputs)
            if step == 1:
                engine.save(folder, "middle")
                engine.offload() if offload else None
            engine.accumulate(engine(inputs).square().sum(), last=True)
            seen.append(not engine.engine.optimizer.offloaded_states)
            assert engine.step().applied
        engine.offload() if offload else None
        engine.load(folder, "middle")
    engine.accumulate(engine(inputs).square().sum(), last=True)
    engine.step()
    with engine.gathered(list(engine.module.parameters())):
        return [p.double().sum().item() for p in engine.module.parameters()], seen


def main(out: str) -> None:
    results = {}
    for stage in (1, 2):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage))
        if stage == 1:
            strategy.setup_distributed()
        (plain, _), (moved, seen) = trained(strategy, False), trained(strategy, True)
        results[stage] = {"plain": plain, "moved": moved, "seen": all(seen)}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
