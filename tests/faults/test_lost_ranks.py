"""SIGTERM to a launcher, or to a rank that hangs, saves on all ranks; what was saved continues where it was.

Ranks that are killed or stopped: tests/runtime/test_presence.py and test_kill_points.py.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked import run_on_ranks
from waiting import output_of, polls
from whole_runs import EXAMPLE, SMALL, environment, kill_tree, rollouts, rows, start, tree, weights

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
    return [*SMALL, *f"{common} --max_samples 64 {more}".split()]


def ranks_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """{rank: its process}"""
    found = {}
    for each in tree(process):
        words = each.cmdline()
        local = [word for word in words if word.startswith("--local_rank=")]
        if local and str(EXAMPLE) in words:
            found[int(local[0].removeprefix("--local_rank="))] = each
    return found


@pytest.fixture(scope="module")
def survived(tmp_path_factory, cache_root) -> dict:
    """A run whose launcher gets SIGTERM, which ends the launcher; resumed, it hangs in a reward function, and that rank
    gets SIGTERM; then it is finished."""
    folder = tmp_path_factory.mktemp("survived") / "run"
    more = f"--max_steps 60 --reward_fn {REWARD}:score"
    first = start(EXAMPLE, flags(folder, more), cache_root, ranks=2, merged=True)
    terminated = ended_by_sigterm(first, lambda: steps_of(folder) >= 2)
    terminated_at, again = steps_of(folder), f"{more} --load_checkpoint true --sigterm_exit_code 75"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARK", str(folder.parent / "hangs"))
        process = start(EXAMPLE, flags(folder, again), cache_root, ranks=2, merged=True)
        hung = ended_by_sigterm(process, (folder.parent / "hangs").exists, rank=1)
    stopped_at = steps_of(folder)
    last = f"--max_steps {stopped_at + 1} --reward_fn {REWARD}:score --load_checkpoint true"
    finished = run_on_ranks(EXAMPLE, flags(folder, last), environment(cache_root), 2, 300)
    return {
        "folder": folder, "terminated": terminated, "terminated_at": terminated_at, "hung": hung,
        "stopped_at": stopped_at, "finished": finished,
    }  # fmt: skip


def steps_of(folder: Path) -> int:
    return len(rows(folder)) if (folder / "metrics.csv").exists() else 0


def ended_by_sigterm(
    process: subprocess.Popen, ready: Callable[[], bool], rank: int | None = None
) -> tuple[int, str, float]:
    """Exit code, output and seconds until the end of a run that gets SIGTERM once it is ready: the launcher, or one
    rank."""
    try:
        for _ in polls(400):
            if ready() or process.poll() is not None:
                break
        began = time.monotonic()
        (process if rank is None else ranks_of(process)[rank]).send_signal(signal.SIGTERM)
        output, _ = output_of(process, 300)
    finally:
        kill_tree(process)
    return process.returncode, output, time.monotonic() - began


def test_sigterm_to_the_launcher_makes_its_ranks_save(survived):
    """It dies of the signal; they see that it is gone."""
    _, output, _ = survived["terminated"]
    assert f"stopped by signal at step {survived['terminated_at']}" in output
    assert survived["terminated_at"] < 60


def test_sigterm_while_a_reward_function_of_one_rank_hangs(survived):
    """One more step was done. The one that hung is given up, on both ranks, and the asked-for code comes out."""
    code, output, seconds = survived["hung"]
    assert code == 75, output[-3000:]
    assert f"stopped by signal at step {survived['terminated_at'] + 1}" in output
    assert survived["stopped_at"] == survived["terminated_at"] + 1
    assert seconds < 2 * TERM_SECONDS + PATIENCE


def test_no_prompt_is_lost_or_repeated(survived):
    assert f"at step {survived['stopped_at']}" in survived["finished"]
    found = rows(survived["folder"])
    assert [row["step"] for row in found] == list(range(1, survived["stopped_at"] + 2))
    for number, records in enumerate(rollouts(survived["folder"])):
        assert sorted({record["group_id"] for record in records}) == list(range(number * 8, number * 8 + 8))
    assert weights(survived["folder"])
