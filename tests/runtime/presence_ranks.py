"""One of several ranks that does what it is told while the others wait: python presence_ranks.py WHAT SECONDS

WHAT: waits, in Python; in_a_collective; fails, by an error; os_exit, as a user's function may.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from lightrft_visual import launch
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.runtime import watchdog
from lightrft_visual.runtime.start_up import screen

what, seconds = sys.argv[1], float(sys.argv[2])


def build():
    dist.init_process_group("gloo")
    watchdog.start(float(os.environ.get("SILENCE", "600")))
    dist.barrier()
    print("ready", file=screen(), flush=True)
    if what == "in_a_collective":
        while True:
            dist.all_reduce(torch.zeros(1))
    if what == "forks" and os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    time.sleep(seconds)
    if what == "fails":
        raise KeyError("no such column")
    if what == "os_exit":
        os._exit(0)
    watchdog.stop()
    os._exit(0)


config = RunConfig()
config.output.output_dir = os.environ["RUN_FOLDER"]
launch._run(config, build)
