"""How long a run stands still for a checkpoint that is written behind it, beside the seconds of writing it.

    python scripts/bench/checkpoint_pause.py --gib 1 --folder /tmp/pause    one JSON line

A module under ZeRO-1 with Adam, float32: 12 bytes of states a weight. The first save also lays out its host memory.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.runtime.checkpoint.manager import CheckpointManager
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings

LAYERS = 8


def main() -> None:
    """Save at once, then behind the run several times, each time after a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/checkpoint_pause"))
    arguments = parser.parse_args()
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=1))
    strategy.setup_distributed()
    width = int((arguments.gib * 2**30 / 16 / LAYERS) ** 0.5)  # weights, and what Adam keeps of them
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    engine = strategy.prepare(module, OptimizerSettings(1e-6, total_steps=99))
    manager = CheckpointManager(arguments.folder, max_num=1)
    results = []
    for number, behind in enumerate([False, True, True, True]):
        engine.accumulate(engine(torch.randn(4, width)).square().mean(), last=True)
        assert engine.step().applied
        began = time.monotonic()
        manager.save(number, lambda folder: engine.save(str(folder), "policy"), behind=behind)
        paused = time.monotonic() - began
        manager.finish()
        saved = manager.saved.pop()
        results.append({"behind": behind, "gib": saved.size / 2**30, "paused": paused, "written": saved.seconds})
    shutil.rmtree(arguments.folder)
    print(json.dumps([{name: round(value, 3) for name, value in each.items()} for each in results]))


if __name__ == "__main__":
    main()
