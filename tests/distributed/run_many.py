"""Started by the deepspeed launcher: several runs one after the other in one process, to pay for start-up once.

    deepspeed tests/distributed/run_many.py plan.json

plan.json: a list of command lines (lists of strings) as the example scripts take them. Runs with equal engine settings
share one engine: each loads its own weights into it at its start.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path


def share_engines() -> None:
    from lightrft_visual.rollout import vllm_engine

    built = {}
    build = vllm_engine.VLLMEngine

    def shared(settings):
        if repr(settings) not in built:
            built[repr(settings)] = build(settings)
        return built[repr(settings)]

    vllm_engine.VLLMEngine = shared


def run(argv: list[str]) -> None:
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.schema import RunConfig
    from lightrft_visual.trainer.build import build_trainer

    build_trainer(load_config(RunConfig, argv)).fit()
    gc.collect()  # the engines of the run go before the next one starts


def main(plan: Path) -> None:
    from lightrft_visual.launch import quiet_libraries

    quiet_libraries()
    share_engines()
    for number, argv in enumerate(json.loads(plan.read_text())):
        print(f"run {number}: {' '.join(argv)}", flush=True)
        run(argv)


if __name__ == "__main__":
    try:
        main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # vLLM's shutdown takes the process group with it; nothing else is left to end in order
