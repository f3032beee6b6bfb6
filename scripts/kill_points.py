#!/usr/bin/env python
"""Kill runs of two ranks (kill -9) at every place of a step and of a save, resume them, and compare with a whole run.

    python scripts/kill_points.py                  21 places of GRPO, 24 with episodes, 21 of Flow-GRPO; a table each
    python scripts/kill_points.py --only flow_grpo --out /tmp/kills
    python scripts/kill_points.py --signal TERM    the run is asked to end there, and saves; also INT and HUP

At each place one rank dies, or the other, or both in turns; what only rank 0 does kills rank 0. The ranks that are left
must end by themselves. The run is resumed, makes a step, and is killed at the next place. In the end its metrics,
evaluations, rollouts and weights must be those of a run that nobody touched, to the bit. Exit code 1 when one is not.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / name) for name in (".", "faults", "distributed", "rollout"))]

import forked  # noqa: E402
from kill_points import (  # noqa: E402
    EPISODES_TWO_FLAGS,
    FLOW_GRPO_TWO_FLAGS,
    READING_TWO_FLAGS,
    KilledRuns,
    differences,
    gain,
    last_checkpoint,
)
from killed_run import DRAWING_TWO, EPISODES_TWO, READING_TWO, Place  # noqa: E402
from small_pipeline import given_flags  # noqa: E402
from whole_runs import rollouts  # noqa: E402

VICTIMS = ((0,), (1,), (0, 1))


def exported(folder: Path) -> dict[str, bytes]:
    """The weights of the trained model, by file and name."""
    from safetensors.torch import load_file

    files = sorted((folder / "checkpoint-final").rglob("*.safetensors"))
    tensors = {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor.contiguous().view(-1).numpy().tobytes() for name, tensor in tensors.items()}


def go_through(kind: str, runs: KilledRuns, places: dict[str, Place], folder: Path) -> bool:
    """Print the table of one kind of run; whether all was as it should be."""
    whole, cut, resumable = folder / "whole", folder / "cut", 0
    folder.mkdir(parents=True)
    runs.run(whole)
    print(f"\n| {kind}, killed at | ranks that die | resumed at step | ended after, s |\n|---|---|---|---|", flush=True)
    done = 0
    for index, (name, place) in enumerate(places.items()):
        dying = (0,) if place.rank_0 else VICTIMS[index % len(VICTIMS)]
        began = time.monotonic()
        try:
            runs.run(cut, place, dying)
            # A run that is asked to end gives its step up, or finishes it.
            expected = (done + gain(place),) if runs.number == signal.SIGKILL else (done + 1, done + 2)
            done = last_checkpoint(cut)
            told = str(done) if done in expected else f"{done} instead of {' or '.join(map(str, expected))}"
            resumable += done in expected
        except AssertionError as error:
            told = f"failed: {' '.join(str(error).split())[-600:]}"
            done = last_checkpoint(cut)
        seconds = time.monotonic() - began
        print(f"| {name} | {' and '.join(map(str, dying))} | {told} | {seconds:.0f} |", flush=True)
    runs.run(cut)
    unequal = differences(whole, cut, runs.steps)
    unequal += ["rollouts"] * (rollouts(cut) != rollouts(whole)) + ["weights"] * (exported(cut) != exported(whole))
    print(
        f"\n{kind}: {resumable} of {len(places)} resumable; not equal to the whole run: {', '.join(unequal) or 'none'}"
    )
    return resumable == len(places) and not unequal


def main() -> None:
    """Read the command line and go through both kinds of run, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("grpo", "episodes", "flow_grpo"))
    parser.add_argument("--signal", choices=("KILL", "TERM", "INT", "HUP"), default="KILL")
    parser.add_argument("--out", type=Path, default=None, help="where runs and logs are kept")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="kill_points_"))
    cache, processes, good = Path(os.environ.get("LIGHTRFT_CACHE", out / "cache")), forked.server(), True
    kinds = {
        "grpo": (False, READING_TWO_FLAGS, READING_TWO),
        "episodes": (False, EPISODES_TWO_FLAGS, EPISODES_TWO),
        "flow_grpo": (True, FLOW_GRPO_TWO_FLAGS, DRAWING_TWO),
    }
    for kind, (draws, flags, places) in kinds.items():
        if arguments.only in (None, kind):
            folder = out / kind
            given = given_flags(out / "given") if draws else []
            number = signal.Signals[f"SIG{arguments.signal}"]
            steps = (sum(map(gain, places.values())) if number == signal.SIGKILL else 2 * len(places)) + 2
            runs = KilledRuns(processes, draws, [*flags, *given], steps, cache, ranks=2, number=number)
            good &= go_through(kind, runs, places, folder)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
