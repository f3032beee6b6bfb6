"""Run by each rank: several runs one after the other in one process, to pay for start-up once: run_many.py plan.json

plan.json: as `whole_runs.run_plan` writes it; a run whose arguments begin with the word `diffusion` draws. Runs with
equal settings of vLLM share one engine: each loads its own weights into it at its start. A run that fails leaves its
traceback in failed.txt; those of several ranks end the launch.
"""

import gc
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def as_program(main: Callable[..., None]) -> None:
    """main(word of the command line, ...), and then this rank's end."""
    try:
        main(*(word for word in sys.argv[1:] if not word.startswith("--local_rank")))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    from lightrft_visual.runtime import watchdog

    watchdog.stop()  # else the others would take this rank for one that died
    os._exit(0)  # vLLM's shutdown takes the process group with it; nothing else is left to end in order


def begin_as_copy(entry: dict[str, Any]) -> None:
    """Where the plan says so, the run's folder is a copy of another one's, or of what that was at a step."""
    from lightrft_visual.runtime import collectives

    if collectives.is_rank_0() and entry["copy_of"] is not None:
        last = None if entry["step"] is None else f"checkpoint-{entry['step']:06d}"

        def behind(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if last and name.startswith("checkpoint-") and name > last]

        shutil.copytree(entry["copy_of"], entry["folder"], ignore=behind)
    collectives.barrier()


def trainer_of(entry: dict[str, Any]):
    from lightrft_visual.config.load import load_config

    argv = [*entry["argv"], "--output_dir", entry["folder"]]
    if argv[0] == "diffusion":
        from lightrft_visual.config.diffusion import DiffusionRunConfig
        from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer

        return build_diffusion_trainer(load_config(DiffusionRunConfig, argv[1:], preset=None))
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.trainer.vl.trainer import build_trainer

    return build_trainer(load_config(RunConfig, argv))


def each_run(plan: str, run: Callable[[dict[str, Any]], None]) -> None:
    """run(entry), each in its folder."""
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    for entry in json.loads(Path(plan).read_text()):
        print(f"run {Path(entry['folder']).name}: {' '.join(entry['argv'])}", flush=True)
        begin_as_copy(entry)
        run(entry)
        gc.collect()  # what the run holds goes before the next one starts,
        gc.freeze()  # whose own collection need not look through all that was ever imported


def share_engines() -> None:
    from lightrft_visual.rollout.vllm import engine

    built = {}

    def shared(config, checkpoint, actor):
        settings = engine.VLLMSettings.from_config(config, checkpoint)
        if repr(settings) not in built:
            built[repr(settings)] = engine.VLLMEngine(settings)
        return built[repr(settings)]

    engine.VLLMEngine.from_config = shared


def fit(entry: dict[str, Any]) -> None:
    from lightrft_visual.runtime import collectives

    try:
        trainer_of(entry).fit()
    except Exception:
        if collectives.world_size() > 1:
            raise
        folder = Path(entry["folder"])
        folder.mkdir(exist_ok=True)
        (folder / "failed.txt").write_text(traceback.format_exc())


def main(plan: str) -> None:
    share_engines()
    each_run(plan, fit)


if __name__ == "__main__":
    as_program(main)
