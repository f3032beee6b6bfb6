"""SIGTERM to a launcher, or to a rank that hangs, saves on all ranks; what was saved continues where it was.

Ranks that are killed or stopped: tests/runtime/test_presence.py and test_kill_points.py.
"""

import time
from pathlib import Path

import forked
import pytest
from waiting import output_of, polls
from whole_runs import EXAMPLE, SMALL, environment, kill_tree, rollouts, rows, start, weights

from lightrft_visual.config.vl import RunConfig
from lightrft_visual.runtime.usercode.calls import TERM_SECONDS
from lightrft_visual.trainer.vl.build import _resolve_names

LIMIT = 30.0  # collective_timeout; a busy machine makes ranks wait for each other
PATIENCE = LIMIT + 30
REWARD = Path(__file__).with_name("hanging_reward.py")


@pytest.fixture(scope="module", autouse=True)
def built(cache_root) -> None:
    """The embedded model: one rank would build it, and the other one wait for that longer than LIMIT."""
    _resolve_names(RunConfig())


def flags(folder: Path, more: str) -> list[str]:
    common = f"--output_dir {folder} --collective_timeout {LIMIT} --zero_stage 3 --save_steps 1 --engine_type hf"
    return [*SMALL, *f"{common} --max_samples 64 --reward_fn {REWARD}:score {more}".split()]


def steps_of(folder: Path) -> int:
    return len(rows(folder)) if (folder / "metrics.csv").exists() else 0


def without_launcher(folder: Path, cache: Path) -> tuple[list[int], str, float]:
    """Exit codes, output, and seconds until the end of a run whose rank 1 gets SIGTERM when it hangs."""
    mark, logs = folder.parent / "hangs", [folder.parent / f"rank_{rank}.txt" for rank in range(2)]
    words = flags(folder, "--max_steps 60 --load_checkpoint true --sigterm_exit_code 75")
    given = forked.ranks_environment(environment(cache) | {"HANG_MARK": str(mark)}, 2)
    ranks = [
        forked.server().Process(target=forked.run_script, args=(str(EXAMPLE), words, own, str(log)))
        for own, log in zip(given, logs)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _ in polls(400):
            if mark.exists() or any(rank.exitcode is not None for rank in ranks):
                break
        began = time.monotonic()
        ranks[1].terminate()
        for rank in ranks:
            rank.join(300)
        return [rank.exitcode for rank in ranks], "".join(map(Path.read_text, logs)), time.monotonic() - began
    finally:
        forked.end(ranks)


def test_runs_that_get_sigterm_save_and_are_resumed_without_losing_or_repeating_a_prompt(tmp_path, cache_root):
    folder = tmp_path / "run"
    first = start(EXAMPLE, flags(folder, "--max_steps 60"), cache_root, ranks=2)
    try:
        for _ in polls(400):
            if steps_of(folder) >= 1 or first.poll() is not None:
                break
        first.terminate()  # the launcher dies of it; its ranks see that it is gone
        told, _ = output_of(first, 300)
    finally:
        kill_tree(first)
    done = steps_of(folder)
    assert f"stopped by signal at step {done}" in told and done < 60
    # Resumed, one rank hangs in a reward function and gets SIGTERM: the step that hung is given up, on both ranks, and
    # the asked-for code comes out. One more step was done before.
    codes, told, seconds = without_launcher(folder, cache_root)
    assert codes == [75, 75], told[-3000:]
    assert f"stopped by signal at step {done + 1}" in told and steps_of(folder) == done + 1
    assert seconds < 2 * TERM_SECONDS + PATIENCE
    last = flags(folder, f"--max_steps {done + 2} --load_checkpoint true")
    assert f"at step {done + 1}" in forked.run_on_ranks(EXAMPLE, last, environment(cache_root), 2, 300)
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 3))
    for number, records in enumerate(rollouts(folder)):
        assert sorted({record["group_id"] for record in records}) == list(range(number * 8, number * 8 + 8))
    assert weights(folder)
