"""Started by the deepspeed launcher: several runs one after the other in one process, to pay for start-up once.

    deepspeed tests/distributed/run_many.py plan.json

plan.json: a list of {"argv": as the example scripts take it, "folder": where it writes}, and what `copies` reads. Runs
with equal engine settings share one engine: each loads its own weights into it at its start. A run that fails leaves
its traceback in failed.txt; those of several ranks end the launch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path

from copies import begin_as_copy


def share_engines() -> None:
    from lightrft_visual.rollout.vllm import engine

    built = {}

    def shared(config, checkpoint, actor):
        settings = engine.VLLMSettings.from_config(config, checkpoint)
        if repr(settings) not in built:
            built[repr(settings)] = engine.VLLMEngine(settings)
        return built[repr(settings)]

    engine.VLLMEngine.from_config = shared


def run(entry: dict) -> None:
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.runtime import collectives
    from lightrft_visual.trainer.vl.trainer import build_trainer

    if collectives.is_rank_0():
        begin_as_copy(entry)
    collectives.barrier()
    build_trainer(load_config(RunConfig, [*entry["argv"], "--output_dir", entry["folder"]])).fit()


def main(plan: Path) -> None:
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime import collectives

    quiet_libraries()
    share_engines()
    for entry in json.loads(plan.read_text()):
        print(f"run {Path(entry['folder']).name}: {' '.join(entry['argv'])}", flush=True)
        try:
            run(entry)
        except Exception:
            if collectives.world_size() > 1:
                raise
            folder = Path(entry["folder"])
            folder.mkdir(exist_ok=True)
            (folder / "failed.txt").write_text(traceback.format_exc())
        gc.collect()  # the engines of the run go before the next one starts


if __name__ == "__main__":
    try:
        main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    from lightrft_visual.runtime import watchdog

    watchdog.stop()  # else the others would take this rank for one that died
    os._exit(0)  # vLLM's shutdown takes the process group with it; nothing else is left to end in order
