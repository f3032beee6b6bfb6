"""Started by the deepspeed launcher: several runs in one process, on the simulated accelerator or on the CPU.

    deepspeed tests/simulated/run_plan.py sim|cpu plan.json

plan.json: as `whole_runs.run_plan` writes it; a run whose arguments begin with the word `diffusion` draws. A run that
fails ends the launch, with its traceback.
"""

from __future__ import annotations

import gc
import json
import os
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


def read_every_loss() -> None:
    """As if the loop over micro-batches read each loss."""
    from lightrft_visual.trainer.vl import updates

    record = updates._record

    def reading(metrics, losses, *rest) -> None:
        losses.loss.item()
        record(metrics, losses, *rest)

    updates._record = reading


def fit(trainer, folder: Path) -> None:
    """The whole run. One whose name begins with `counted` writes what the ranks wait for, `waits_<rank>.json`."""
    from lightrft_visual.runtime import collectives

    if not folder.name.startswith("counted"):
        return trainer.fit()
    from simulated.sync_counter import SyncCounter

    if folder.name == "counted_waiting":
        read_every_loss()
    counter = SyncCounter()
    counter.run(trainer)
    counter.write(folder / f"waits_{collectives.rank()}.json")


def main(device: str, plan: str) -> None:
    if device == "sim":
        from simulated.accelerator import install

        install()
    from distributed.copies import begin_as_copy

    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime import collectives

    quiet_libraries()
    for entry in json.loads(Path(plan).read_text()):
        print(f"run {Path(entry['folder']).name}: {' '.join(entry['argv'])}", flush=True)
        if collectives.is_rank_0():
            begin_as_copy(entry)
        collectives.barrier()
        trainer = trainer_of(entry["argv"], entry["folder"])
        fit(trainer, Path(entry["folder"]))
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
