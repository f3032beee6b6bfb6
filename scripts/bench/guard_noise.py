"""How often gold and reward of runs without a hack part by chance: python scripts/bench/guard_noise.py [RUNS]

Simulated runs of 30 looks at answers that are right or wrong. Of each kind of run: evaluations of the same prompts and
steps with new ones, at a level, rising, and rising to a ceiling. The reward is gold's own answer with a chance of
`shared`, else another answer of the same prompt; what each prompt is worth wanders by `wander` logits a look, for the
reward and for gold apart. Prints the runs with any alarm.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable

from lightrft_visual.observe.guard.gains import Gains, Look

LOOKS, NOISE = 30, 0.1  # of a run; of the reward, beside the answers
CURVES: dict[str, Callable[[int], float]] = {  # logits of the mean
    "level": lambda look: -0.5,
    "rising": lambda look: -1 + 0.08 * look,
    "to a ceiling": lambda look: -1 + min(3, 0.3 * look),
}
KINDS = {
    "evaluations": (True, 96, 2),
    "few prompts": (True, 32, 1),
    "steps": (False, 16, 8),
}  # paired, prompts, samples
REWARDS = ((0.7, 0.0), (0.7, 0.15), (0.0, 0.15))  # shared, wander


def right(logit: float, samples: int, rng: random.Random) -> float:
    """Share of right answers."""
    return sum(rng.random() < 1 / (1 + math.exp(-logit)) for _ in range(samples)) / samples


def alarmed(kind: str, curve: Callable[[int], float], shared: float, wander: float, rng: random.Random) -> bool:
    """Whether one run has an alarm."""
    paired, prompts, samples = KINDS[kind]
    gains = Gains(paired, 1 if paired else 5)
    worth = [[rng.gauss(0, 1.2)] * 2 for _ in range(prompts)]
    for look in range(LOOKS):
        if not paired:
            worth = [[rng.gauss(0, 1.2)] * 2 for _ in range(prompts)]
        worth = [[logit + rng.gauss(0, wander) for logit in pair] for pair in worth]
        golds = [right(pair[0] + curve(look), samples, rng) for pair in worth]
        others = [right(pair[1] + curve(look), samples, rng) for pair in worth]
        rewards = [
            (gold if rng.random() < shared else other) + rng.gauss(0, NOISE) for gold, other in zip(golds, others)
        ]
        if gains.see(Look(look, list(range(prompts)), rewards, golds)) is not None:
            return True
    return False


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"runs with an alarm, of {runs}\n\n| looks | curve | shared | wander | alarms |\n|---|---|---|---|---|")
    for kind in KINDS:
        for name, curve in CURVES.items():
            for shared, wander in REWARDS:
                rng = random.Random(1)
                found = sum(alarmed(kind, curve, shared, wander, rng) for _ in range(runs))
                print(f"| {kind} | {name} | {shared} | {wander} | {found} |", flush=True)


if __name__ == "__main__":
    main()
