"""Started by the deepspeed launcher: several runs in one process, on the simulated accelerator or on the CPU.

    deepspeed tests/simulated/run_plan.py sim|cpu plan.json

plan.json: as `whole_runs.run_plan` writes it; a run whose arguments begin with the word `diffusion` draws. A run that
fails ends the launch, with its traceback.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def trainer_of(argv: list[str], folder: str):
    from lightrft_visual.config.load import load_config

    if argv[0] == "diffusion":
        from lightrft_visual.config.diffusion import DiffusionRunConfig
        from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer

        config = load_config(DiffusionRunConfig, [*argv[1:], "--output_dir", folder], preset=None)
        return build_diffusion_trainer(config)
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.trainer.vl.trainer import build_trainer

    return build_trainer(load_config(RunConfig, [*argv, "--output_dir", folder]))


def main(device: str, plan: str) -> None:
    if device == "sim":
        from simulated.accelerator import install

        install()
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime import collectives

    quiet_libraries()
    for entry in json.loads(Path(plan).read_text()):
        print(f"run {Path(entry['folder']).name}: {' '.join(entry['argv'])}", flush=True)
        if entry["copy_of"] and collectives.is_rank_0():
            shutil.copytree(entry["copy_of"], entry["folder"])
        collectives.barrier()
        trainer = trainer_of(entry["argv"], entry["folder"])
        trainer.fit()
        trainer.close()
        del trainer
        gc.collect()


if __name__ == "__main__":
    try:
        main(*(word for word in sys.argv[1:] if not word.startswith("--local_rank")))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    from lightrft_visual.runtime import watchdog

    watchdog.stop()  # else the others would take this rank for one that died
    os._exit(0)
