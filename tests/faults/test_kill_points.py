"""kill -9 at every place between a rollout and its checkpoint: the run goes on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import killed_run
import pytest
import torch
from killed_run import DRAWING, READING
from safetensors.torch import load_file
from small_pipeline import given_flags
from waiting import polls
from whole_runs import SMALL, environment, free_port, rollouts, rows, weights

LIMIT = 300.0
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"  # imported with every optimizer; brings torch's compiler along
READING_FLAGS = [*SMALL, *"--train_batch_size 16 --micro_rollout_batch_size 16 --engine_type hf".split()]
DRAWING_FLAGS = (
    "--diffusion_algorithm diffusion_nft --decay_type 1 --height 32 --width 32 --num_steps 3 --guidance_scale 1 "
    "--max_sequence_length 5 --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 4 "
    "--train_batch_size 4 --micro_train_batch_size 2 --lora_rank 4 --learning_rate 1e-2 --max_eval_samples 0 "
    "--enable_ema true --ema_interval 1 --num_trajectories_to_save 8 --report false"
).split()


@pytest.fixture(scope="module")
def processes():
    """Children of a server that has imported everything: most of a short run's time would be imports."""
    context = multiprocessing.get_context("forkserver")
    built = ["lightrft_visual.trainer.vl.trainer", "lightrft_visual.trainer.diffusion.build"]
    context.set_forkserver_preload(["killed_run", *built, MUON])
    return context


@pytest.fixture(scope="module")
def drawing(tmp_path_factory) -> list[str]:
    """Flags of a small pipeline, its prompts and its reward."""
    return [*DRAWING_FLAGS, *given_flags(tmp_path_factory.mktemp("drawing"))]


Run = Callable[[str, Path], None]


def runner(processes, places: dict, flags: list[str], cache: Path) -> Run:
    """Starts one run of one rank, without the launcher: run(place, folder). It goes on where the folder's run ended."""

    def run(place: str, folder: Path) -> None:
        own = (
            f"--output_dir {folder} --max_steps {len(places) + 2} --save_steps 1 --max_ckpt_num 2 "
            f"--load_checkpoint {str(folder.exists()).lower()}"
        )
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        known = environment(cache) | single | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        log = folder.with_suffix(".log")
        arguments = (places is DRAWING, place, [*flags, *own.split()], known, str(log))
        process = processes.Process(target=killed_run.main, args=arguments)
        process.start()
        for _ in polls(LIMIT):
            if process.exitcode is not None:
                break
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{place}: no end after {LIMIT} s: {log.read_text()[-3000:]}")
        assert process.exitcode == (-9 if place in places else 0), f"{place}: {log.read_text()[-3000:]}"

    return run


def go_through(places: dict, run: Run, folder: Path) -> tuple[Path, Path]:
    """Folders of a run left alone and of one that was killed at each place in its turn."""
    whole, cut = folder / "whole", folder / "cut"
    run("nowhere", whole)
    for done, place in enumerate(places, start=1):
        run(place, cut)
        assert (cut / f"checkpoint-{done:06d}").is_dir(), place
        assert not (cut / f"checkpoint-{done + 1:06d}").exists(), place
    run("nowhere", cut)
    assert rollouts(cut) == rollouts(whole) and len(rollouts(cut)) == len(places) + 2
    assert rows(cut) == rows(whole) and len(rows(cut)) == len(places) + 2
    return whole, cut


def test_no_question_is_lost_or_repeated_wherever_the_kill_comes(processes, tmp_path, cache_root):
    flags = [*READING_FLAGS, "--max_samples", str((len(READING) + 2) * 8)]
    whole, cut = go_through(READING, runner(processes, READING, flags, cache_root), tmp_path)
    assert weights(cut) == weights(whole)


def test_no_caption_is_lost_or_repeated_wherever_the_kill_comes(processes, drawing, tmp_path, cache_root):
    whole, cut = go_through(DRAWING, runner(processes, DRAWING, drawing, cache_root), tmp_path)
    # Tensors, not files: safetensors writes the two entries of the header's metadata in any order.
    ours, theirs = (load_file(run / "checkpoint-final" / "pytorch_lora_weights.safetensors") for run in (whole, cut))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sorted(picture.name for picture in pictures(cut)) == sorted(picture.name for picture in pictures(whole))


def pictures(folder: Path) -> list[Path]:
    return list((folder / "rollouts").rglob("*.png"))
