"""measured.py OUTPUT.json N SCRIPT [ARGUMENTS...]: runs a script and writes the card's peak memory, the time, what
the run's own plan said about memory, and how much its updates compute (null where there was no plan).

The N-th train phase of rank 0 is profiled: seconds in which its device worked, null without one."""

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightrft_visual.runtime.files import read_jsonl  # noqa: E402


def noted_plans() -> list:
    """The plans that runs of this process make from now on, before they load anything."""
    from lightrft_visual.plugins.memory_plan.check import Planner

    plans, make = [], Planner.plan

    def noted(planner: Planner, config: Any) -> Any:
        plans.append((make(planner, config), lambda: make(planner, config), config))
        return plans[-1][0]

    Planner.plan = noted
    return plans


def updates(again: Any, config: Any, steps: Path) -> dict[str, float]:
    """What forwards and backwards of a step's updates computed, by a plan (`again()`) of the lengths that there were.

    flops: of the model on one rank, attention included, each shared prompt once; again: more by checkpointing;
    computed_tokens: of text and images on all ranks, 0 where something is drawn. {} for answers of several lengths;
    with one there is no padding.
    """
    if hasattr(config, "rollout"):
        if config.rollout.min_new_tokens != config.rollout.generate_max_len:
            return {}
        rollout = config.rollout
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        rollout.prompt_max_len = round(read_jsonl(steps)[-1]["tokens"] / samples) - rollout.generate_max_len
    plan = again()
    own = plan.trained
    return {"flops": own.flops - own.again, "again": own.again, "computed_tokens": plan.tokens * plan.ranks}


def busy_seconds(events: Iterable[Any]) -> float:
    """In which at least one of a profile's kernels or copies ran; ranges that a program names are none."""
    from torch.autograd import DeviceType

    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def profile_update(number: int) -> dict[str, float | None]:
    """From now on the train phase of this number, from 1, is profiled; the result holds `busy_seconds` after it."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    from lightrft_visual.runtime.phase_timer import PhaseTimer

    plain, found, passed = PhaseTimer.phase, {"busy_seconds": None}, []
    kinds = supported_activities() - {ProfilerActivity.CPU} or {ProfilerActivity.CPU}

    @contextmanager
    def phase(self: PhaseTimer, name: str) -> Iterator[None]:
        passed.extend([name] * (name == "train"))
        if name != "train" or len(passed) != number:
            with plain(self, name):
                yield
            return
        with profile(activities=kinds) as seen, plain(self, name):
            yield
        found["busy_seconds"] = busy_seconds(seen.events()) or None

    PhaseTimer.phase = phase
    return found


class MostTaken(threading.Thread):
    """The most bytes of this rank's card that were taken, by whatever; without a card, by this process.

    PyTorch's own peak counts what a sleeping engine has given back.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.over = 0, threading.Event()

    def run(self) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator, rank = get_accelerator(), int(os.environ.get("LOCAL_RANK", "0"))
        if accelerator.device_name() == "cpu":
            return
        started = getattr(torch, accelerator.device_name()).is_initialized
        while not self.over.wait(0.02):
            if started():  # asking would start the device before the run has chosen it
                free, total = torch.accelerator.get_memory_info(rank)  # of all processes
                self.bytes = max(self.bytes, total - free)

    def peak(self) -> int:
        from deepspeed.accelerator import get_accelerator

        self.over.set()
        return self.bytes or get_accelerator().max_memory_allocated()


if __name__ == "__main__":
    output, number, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv = sys.argv[3:]
    first_rank = os.environ.get("RANK", "0") == "0"
    plans, began = noted_plans(), time.monotonic()
    profiled, taken = profile_update(number if first_rank else 0), MostTaken()
    taken.start()
    runpy.run_path(script, run_name="__main__")
    first, again, config = plans[-1] if plans else (None, None, None)
    plan = first and again()  # of the sizes that the run has chosen
    result = profiled | {
        "peak_bytes": taken.peak(),
        "seconds": time.monotonic() - began,
        "planned_bytes": None if plan is None else plan.peak(),
        "planned_phase": None if plan is None else plan.fullest().name,
    }
    if first_rank:
        known = {} if plan is None else updates(again, config, Path(config.output.output_dir) / "metrics.jsonl")
        output.write_text(json.dumps(result | known))
