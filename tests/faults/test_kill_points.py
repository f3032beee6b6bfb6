"""kill -9 at every place between a rollout and its checkpoint: the run goes on as if nothing had happened.

Runs are killed at a few places here, and two ranks at all of them by scripts/kill_points.py.
"""

from pathlib import Path

import forked
import pytest
import torch
from kill_points import NFT, READING_FLAGS, READING_TWO_FLAGS, KilledRuns, differences, last_checkpoint
from killed_run import DRAWING, READING_TWO, Place
from safetensors.torch import load_file
from small_pipeline import given_flags
from whole_runs import rollouts, weights

WRITTEN_BEHIND = ("buffer partly filled", "first of two updates done", "about to save", "manifest written")
DRAWN = ("pictures drawn", "first of two updates done", "old policy moved")
TWO = {"rewards computed": (1,), "folder renamed": (0,)}  # and the ranks that die there


@pytest.fixture(scope="module")
def processes():
    return forked.server()


def same_rollouts(runs: KilledRuns, whole: Path, cut: Path) -> None:
    """As of a run that nobody touched: no prompt is lost or repeated."""
    assert not differences(whole, cut, runs.steps)
    assert rollouts(cut) == rollouts(whole) and len(rollouts(cut)) == runs.steps


def go_through(runs: KilledRuns, places: dict[str, Place], dying: dict, folder: Path) -> tuple[Path, Path]:
    """Folders of a run left alone and of one that was killed at each place in its turn."""
    whole, cut, done = folder / "whole", folder / "cut", 0
    runs.run(whole)
    for name, place in places.items():
        runs.run(cut, place, dying.get(name, (0,)))
        done += 2 if place.saved else 1
        assert last_checkpoint(cut) == done, name
    runs.run(cut)
    same_rollouts(runs, whole, cut)
    return whole, cut


def test_nothing_is_lost_or_repeated_where_checkpoints_are_written_behind_the_run(processes, tmp_path, cache_root):
    """The last checkpoint is complete or not when the kill comes; the run goes on from what is complete."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runs = KilledRuns(processes, False, [*READING_FLAGS, *"--async_save true".split()], 5, cache_root)
    runs.run(whole)
    for name in WRITTEN_BEHIND:
        before = last_checkpoint(cut)
        runs.run(cut, READING_TWO[name])
        assert last_checkpoint(cut) - before in (0, 1, 2)
    runs.run(cut)
    same_rollouts(runs, whole, cut)
    assert weights(cut) == weights(whole)


def test_no_caption_is_lost_or_repeated_wherever_the_kill_comes(processes, tmp_path, cache_root):
    places = {name: DRAWING[name] for name in DRAWN}
    runs = KilledRuns(processes, True, [*NFT, *given_flags(tmp_path)], len(places) + 2, cache_root)
    whole, cut = go_through(runs, places, {}, tmp_path)
    # Tensors, not files: safetensors writes the two entries of the header's metadata in any order.
    ours, theirs = (load_file(run / "checkpoint-final" / "pytorch_lora_weights.safetensors") for run in (whole, cut))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    saved = [sorted(image.name for image in (run / "rollouts").rglob("*.png")) for run in (whole, cut)]
    assert saved[0] == saved[1]


def test_two_ranks_go_on_after_one_of_them_was_killed(processes, tmp_path, cache_root):
    runs = KilledRuns(processes, False, READING_TWO_FLAGS, len(TWO) + 2, cache_root, ranks=2)
    whole, cut = go_through(runs, {name: READING_TWO[name] for name in TWO}, TWO, tmp_path)
    assert weights(cut) == weights(whole)
