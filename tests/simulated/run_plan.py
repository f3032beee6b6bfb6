"""Run by each rank: several runs in one process, on the simulated accelerator or on the CPU.

    run_plan.py sim|cpu plan.json

plan.json: as `whole_runs.run_plan` writes it; a run whose arguments begin with the word `diffusion` draws. A run that
fails ends the launch, with its traceback.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from distributed import run_many


def reads_every_loss() -> AbstractContextManager:
    """Inside, it is as if the loop over micro-batches read each loss."""
    from lightrft_visual.trainer.vl import updates

    record = updates._record

    def reading(metrics, losses, *rest) -> None:
        losses.loss.item()
        record(metrics, losses, *rest)

    return patch.object(updates, "_record", reading)


def fit(trainer, folder: Path) -> None:
    """The whole run. One whose name begins with `counted` writes what the ranks wait for, `waits_<rank>.json`."""
    from deepspeed.accelerator import get_accelerator

    from lightrft_visual.runtime import collectives

    if not folder.name.startswith("counted"):
        trainer.fit()
        if getattr(getattr(trainer.config, "sampling", None), "cuda_graphs", False):
            assert max(graph.replays for graph in get_accelerator().graphs) > 2
        return
    from simulated.sync_counter import SyncCounter

    counter = SyncCounter()
    with reads_every_loss() if folder.name == "counted_waiting" else nullcontext():
        counter.run(trainer)
    counter.write(folder / f"waits_{collectives.rank()}.json")


def run(entry: dict) -> None:
    trainer = run_many.trainer_of(entry)
    fit(trainer, Path(entry["folder"]))
    trainer.close()


def main(device: str, plan: str) -> None:
    if device == "sim":
        from simulated.accelerator import install

        install()
    run_many.each_run(plan, run)


if __name__ == "__main__":
    run_many.as_program(main)
