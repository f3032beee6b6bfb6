"""Steps with long-tailed response lengths: one after the other, ahead, and ahead in segments; engine and trainer sleep.

    python scripts/bench/long_tail.py [--workers 1] [--staleness 2] [--steps 12]

The pool, the scheduler of segments and the order of the batches are the run's own; a worker is a thread that sleeps
`--token` seconds for each token of the longest response of a call, as an engine that decodes all of them together, and
the trainer sleeps `--train` seconds. Lengths are log-normal, cut at `--most` tokens, the same for all three.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

from lightrft_visual.experience.rollouts import PromptFeatures
from lightrft_visual.experience.sampling import Completion, SamplingSettings
from lightrft_visual.plugins.ray.rollout.partial import PartialRollouts
from lightrft_visual.plugins.ray.rollout.pool import WorkerPool

END = 1


class Sleeper:
    """A worker whose responses have the lengths that their prompts' labels say."""

    def __init__(self, name: str, token_seconds: float) -> None:
        self.name, self.token_seconds = name, token_seconds

    def call(self, method, order, arguments):
        """See `pool.WorkerHandle`."""
        prompts, settings = arguments
        made = [[self._one(prompt, prompt.copy + c, settings) for c in range(settings.n)] for prompt in prompts]
        time.sleep(self.token_seconds * max(len(each.token_ids) for group in made for each in group))
        return made, order.version

    def _one(self, prompt: PromptFeatures, copy: int, settings: SamplingSettings) -> Completion:
        left = prompt.metadata["lengths"][copy] - len(prompt.continued)
        ids = [0] * min(left, settings.max_new_tokens)
        if left <= settings.max_new_tokens:
            ids[-1] = END
        return Completion(ids, None, "", ids[-1] != END, [])

    def wait_until_back(self) -> None:
        """It never dies."""


def batches(args: argparse.Namespace) -> list[list[PromptFeatures]]:
    """The prompts of each step."""
    draw = random.Random(7)

    def length() -> int:
        return min(args.most, 1 + int(draw.lognormvariate(args.mean, args.sigma)))

    return [
        [PromptFeatures("", [], group, metadata={"lengths": [length() for _ in range(4)]}) for group in range(16)]
        for _ in range(args.steps)
    ]


def seconds(args: argparse.Namespace, ahead: int, tokens: int | None) -> float:
    """Of a step. tokens: of a segment; None without any."""
    pool = WorkerPool([Sleeper(str(i), args.token) for i in range(args.workers)])
    settings = SamplingSettings(n=4, max_new_tokens=args.most)
    slots = 16 * 4 * (ahead + 1) // args.workers
    partial = PartialRollouts(pool, SimpleNamespace(decode=lambda *_, **__: ""), tokens or args.most, slots)

    def begin(prompts: list[PromptFeatures]) -> list[Future]:
        if tokens is not None:
            return partial.begin(prompts, settings)
        size = -(-len(prompts) // args.workers)
        return [pool.submit(prompts[at : at + size], settings) for at in range(0, len(prompts), size)]

    waiting, given, ends = deque(batches(args)), deque(), []
    while waiting or given:
        while waiting and len(given) <= ahead:
            given.append(begin(waiting.popleft()))
        for future in given.popleft():
            future.result()
        time.sleep(args.train)
        ends.append(time.perf_counter())
    pool.close()
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, usual in (("workers", 1), ("staleness", 2), ("steps", 12), ("most", 400), ("segment", 100)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, usual in (("token", 0.005), ("train", 0.5), ("mean", 3.7), ("sigma", 0.9)):
        parser.add_argument(f"--{name}", type=float, default=usual)
    args = parser.parse_args()
    lengths = sorted(length for batch in batches(args) for prompt in batch for length in prompt.metadata["lengths"])
    print(f"lengths: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; training {args.train:g} s a step")
    alone = seconds(args, 0, None)
    print(f"one after the other: {alone:.2f} s a step")
    for name, tokens in (("ahead", None), (f"ahead, segments of {args.segment}", args.segment)):
        found = seconds(args, args.staleness, tokens)
        print(f"k = {args.staleness}, {name}: {found:.2f} s a step, {alone / found:.2f} x as fast")


if __name__ == "__main__":
    main()
