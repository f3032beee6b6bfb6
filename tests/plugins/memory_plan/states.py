"""One rank trains a small module under a ZeRO stage and writes what its optimizer holds: STAGE OUTPUT.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings


def distinct_bytes(tensors) -> int:
    """Of different storages."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def main(output: str) -> None:
    found = {}
    for stage, bf16 in ((0, False), (1, False), (2, False), (2, True), (3, True)):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage), bf16=bf16)
        if not torch.distributed.is_initialized():
            strategy.setup_distributed()
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 64)).to(strategy.dtype)
        module[0].requires_grad_(False)
        engine = strategy.prepare(module, OptimizerSettings(1e-4, total_steps=4))
        states = []
        for _ in range(2):
            optimizer = getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer)
            masters = [p for group in optimizer.param_groups for p in group["params"]] if stage else []
            if stage == 3:
                masters = list(engine.engine.optimizer.fp32_partitioned_groups_flat)
            moments = [v for state in optimizer.state.values() for v in state.values() if v.numel() > 1]
            states.append(distinct_bytes([*masters, *moments]))
            engine.accumulate(engine(torch.randn(4, 256, dtype=strategy.dtype)).float().square().sum(), last=True)
            engine.step()
        found[f"{stage} {'bf16' if bf16 else 'fp32'}"] = states
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
