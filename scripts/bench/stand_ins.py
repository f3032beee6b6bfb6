"""Plugins by which engine and trainer sleep, to stand for accelerators (two cores cannot show both at work).

    python examples/train_grpo_vl.py --plugins scripts/bench/stand_ins.py --engine_type sleeping --policy_loss sleeping

GENERATE_SECONDS (1.0): how long a call of the engine takes at least, a batch with one worker. TOKEN_SECONDS (0): how
long each token of the longest response takes besides. TRAIN_SECONDS (1.0): how long an update takes at least.
"""

from __future__ import annotations

import os
import time

from lightrft_visual.algorithms.policy_losses import ppo_loss
from lightrft_visual.config import registry
from lightrft_visual.rollout.hf import OwnWeightsEngine, worker_engine


def _seconds(name: str, usual: str) -> float:
    return float(os.environ.get(f"LIGHTRFT_{name}", usual))


class SleepingEngine(OwnWeightsEngine):
    """The transformers engine, whose calls take a stated time."""

    def generate(self, prompts, settings, finished=None):
        began = time.perf_counter()
        made = super().generate(prompts, settings, finished)
        longest = max((len(each.token_ids) for part in made for each in part), default=0)
        wanted = _seconds("GENERATE_SECONDS", "1.0") + longest * _seconds("TOKEN_SECONDS", "0.0")
        rest = wanted - (time.perf_counter() - began)
        time.sleep(max(0.0, rest))
        return made


def sleeping_worker(config, checkpoint) -> SleepingEngine:
    """The engine of a rollout worker."""
    engine = worker_engine(config, checkpoint)
    return SleepingEngine(engine.source, engine.tokenizer, engine.micro_batch_size)


def _refused(*_):
    raise NotImplementedError("engine sleeping is for placement split")


registry.engines.register("sleeping", about="stands for an accelerator", worker=sleeping_worker, continues=True)(
    _refused
)


@registry.policy_losses.register("sleeping", about="PPO's loss, in a stated time")
def sleeping_loss(inputs, config):
    """The first micro-batch of an update sleeps; use one micro-batch an update."""
    time.sleep(_seconds("TRAIN_SECONDS", "1.0"))
    return ppo_loss(inputs, config)
