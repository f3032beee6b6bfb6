"""kill -9 at every place between a rollout and its checkpoint: the run goes on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import killed_run
import pytest
from killed_run import PLACES
from waiting import polls
from whole_runs import SMALL, environment, free_port, rollouts, rows, weights

STEPS = len(PLACES) + 2
LIMIT = 300.0
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"  # imported with every optimizer; brings torch's compiler along


@pytest.fixture(scope="module")
def processes():
    """Children of a server that has imported everything: most of a short run's time would be imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run", "lightrft_visual.trainer.build", MUON])
    return context


def run(processes, place: str, folder: Path, cache: Path) -> None:
    """One rank, without the launcher. Its process ends by the kill, or with status 0 where the place is nowhere."""
    flags = (
        f"--output_dir {folder} --max_steps {STEPS} --max_samples {STEPS * 8} --save_steps 1 "
        "--train_batch_size 16 --micro_rollout_batch_size 16 --engine_type hf "
        f"--max_ckpt_num 2 --load_checkpoint {str(folder.exists()).lower()}"
    )
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    known = environment(cache) | single | {"MASTER_PORT": str(free_port())}
    log = folder.with_suffix(".log")
    process = processes.Process(target=killed_run.main, args=(place, [*SMALL, *flags.split()], known, str(log)))
    process.start()
    for _ in polls(LIMIT):
        if process.exitcode is not None:
            break
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"{place}: no end after {LIMIT} s: {log.read_text()[-3000:]}")
    assert process.exitcode == (-9 if place in PLACES else 0), f"{place}: {log.read_text()[-3000:]}"


def test_no_prompt_is_lost_or_repeated_wherever_the_kill_comes(processes, tmp_path, cache_root):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(processes, "nowhere", whole, cache_root)
    for done, place in enumerate(PLACES, start=1):
        run(processes, place, cut, cache_root)
        assert (cut / f"checkpoint-{done:06d}").is_dir(), place
        assert not (cut / f"checkpoint-{done + 1:06d}").exists(), place
    run(processes, "nowhere", cut, cache_root)
    assert rollouts(cut) == rollouts(whole)
    assert rows(cut) == rows(whole) and len(rows(cut)) == STEPS
    assert weights(cut) == weights(whole)
