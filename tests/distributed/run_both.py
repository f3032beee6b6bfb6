"""Started by the deepspeed launcher: runs of both kinds one after the other in one process.

    deepspeed tests/distributed/run_both.py plan.json

plan.json: as in run_many.py, without copies. A run that names a `--pipeline` instead of a `--pretrain` draws.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path


def trainer_of(argv: list[str]):
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    if "--pipeline" not in argv:
        return build_trainer(load_config(RunConfig, argv))
    named = ["--pretrain" if word == "--pipeline" else word for word in argv]
    return build_diffusion_trainer(load_config(DiffusionRunConfig, named, preset=None))


def run(entry: dict) -> None:
    trainer = trainer_of([*entry["argv"], "--output_dir", entry["folder"]])
    trainer.fit()
    trainer.close()


def main(plan: Path) -> None:
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    for entry in json.loads(plan.read_text()):
        print(f"run {Path(entry['folder']).name}: {' '.join(entry['argv'])}", flush=True)
        run(entry)
        gc.collect()


if __name__ == "__main__":
    try:
        main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    from lightrft_visual.runtime import watchdog

    watchdog.stop()
    os._exit(0)
