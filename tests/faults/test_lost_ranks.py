"""A rank that is killed or stopped ends the others in time; what was saved continues where it was; SIGTERM saves."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import output_of, polls
from whole_runs import EXAMPLE, SMALL, kill_tree, launch, rollouts, rows, start, tree, weights

from lightrft_visual.config.vl import RunConfig
from lightrft_visual.runtime.usercode.calls import TERM_SECONDS
from lightrft_visual.trainer.vl.build import _resolve_names

LIMIT = 30.0  # collective_timeout; a busy machine makes ranks wait for each other
PATIENCE = LIMIT + 30
REWARD = Path(__file__).with_name("crashing_reward.py")


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


def wait_for_steps(process: subprocess.Popen, folder: Path, count: int, limit: float = 400) -> None:
    for _ in polls(limit):
        file = folder / "metrics.csv"
        if file.exists() and len(file.read_text().splitlines()) > count:
            return
        if process.poll() is not None:
            break
    raise AssertionError(f"{folder.name} did not reach step {count}")


def wait_until_gone(process: psutil.Process) -> None:
    """A zombie is gone: its launcher may be busy with the other rank."""
    for _ in polls(PATIENCE):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
    raise AssertionError(f"still there after {PATIENCE} s")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, cache_root) -> dict[int, str]:
    """By the rank that is stopped: output of a run whose other rank ended by that. Both runs wait at once."""
    runs = {}
    try:
        for rank in (0, 1):
            folder = tmp_path_factory.mktemp("stopped") / "run"
            own = flags(folder, "--max_steps 500")
            runs[rank] = start(EXAMPLE, own, cache_root, ranks=2, merged=True), folder
        for rank, (process, folder) in runs.items():
            wait_for_steps(process, folder, 2)
            ranks = ranks_of(process)
            ranks[rank].send_signal(signal.SIGSTOP)
            runs[rank] = process, ranks[1 - rank]
        for _, other in runs.values():
            wait_until_gone(other)
    finally:
        for process, _ in runs.values():
            kill_tree(process)
    return {rank: process.communicate()[0] for rank, (process, _) in runs.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_other(stopped, rank):
    assert "stage" in stopped[rank].split("error:")[-1], stopped[rank][-3000:]


@pytest.fixture(scope="module")
def survived(tmp_path_factory, cache_root) -> dict:
    """A run whose rank 1 is killed between rollout and update. It is resumed, and its launcher gets SIGTERM, which ends
    the launcher; resumed again, it hangs in a reward function, and that rank gets SIGTERM; then it is finished."""
    folder = tmp_path_factory.mktemp("survived") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRASH_MARK", str(folder.parent / "crashed"))
        more = f"--max_steps 60 --reward_fn {REWARD}:score"
        crashed = launch(EXAMPLE, flags(folder, more), cache_root, ranks=2)
        after_crash = len(rows(folder))
        again = flags(folder, f"{more} --load_checkpoint true")
        terminated = ended_by_sigterm(
            start(EXAMPLE, again, cache_root, ranks=2, merged=True), lambda: len(rows(folder)) >= after_crash + 2
        )
        terminated_at = len(rows(folder))
        patch.setenv("HANG_MARK", str(folder.parent / "hangs"))
        process = start(EXAMPLE, [*again, "--sigterm_exit_code", "75"], cache_root, ranks=2, merged=True)
        hung = ended_by_sigterm(process, (folder.parent / "hangs").exists, rank=1)
        patch.delenv("HANG_MARK")
        stopped_at = len(rows(folder))
        last = f"--max_steps {stopped_at + 1} --reward_fn {REWARD}:score --load_checkpoint true"
        finished = launch(EXAMPLE, flags(folder, last), cache_root, ranks=2)
    return {
        "folder": folder, "crashed": crashed, "after_crash": after_crash, "terminated": terminated,
        "terminated_at": terminated_at, "hung": hung, "stopped_at": stopped_at, "finished": finished,
    }  # fmt: skip


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


def test_a_killed_rank_ends_the_run(survived):
    assert survived["crashed"].returncode != 0
    assert survived["after_crash"] == 2
    errors = survived["crashed"].stderr
    assert "error: rank 1 is gone" in errors and "rank 0 ends in stage:" in errors, errors[-3000:]


def test_a_killed_rank_leaves_no_shared_memory(survived):
    arguments = survived["crashed"].args
    port = arguments[arguments.index("--master_port") + 1]
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))


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
    assert survived["finished"].returncode == 0, survived["finished"].stderr[-3000:]
    assert f"at step {survived['stopped_at']}" in survived["finished"].stdout
    found = rows(survived["folder"])
    assert [row["step"] for row in found] == list(range(1, survived["stopped_at"] + 2))
    for number, records in enumerate(rollouts(survived["folder"])):
        assert sorted({record["group_id"] for record in records}) == list(range(number * 8, number * 8 + 8))
    assert weights(survived["folder"])
