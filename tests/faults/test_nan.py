"""A NaN loss on one of two ranks: no rank steps, all weights stay, and three in a row end the run."""

import csv
import hashlib
from pathlib import Path

import pytest
from forked import on_ranks
from whole_runs import LIMIT, SMALL

from lightrft_visual.config.load import load_config
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import NonFiniteError
from lightrft_visual.launch import quiet_libraries
from lightrft_visual.rollout.weight_sync import named_weights
from lightrft_visual.runtime import collectives
from lightrft_visual.trainer.vl import updates
from lightrft_visual.trainer.vl.trainer import build_trainer

BAD_STEPS = (1, 3, 4, 5)  # one alone, then three in a row
STAGES = (0, 2, 3)  # of ZeRO; that of 1 is the optimizer of 2
FLAGS = (
    "--engine_type hf --max_samples 64 --rollout_batch_size 4 --train_batch_size 16 --parity_every 0 "
    "--image_dependence_every 0"
).split()


def hash_of(actor) -> str:
    digest = hashlib.sha256()
    for name, tensor in named_weights(actor):
        digest.update(name.encode())
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def run(stage: int, folder: Path, flags: list[str]) -> dict:
    argv = [*flags, "--zero_stage", str(stage), "--max_steps", "8", "--output_dir", str(folder / f"run_{stage}")]
    trainer = build_trainer(load_config(RunConfig, argv))
    hashes, sync, plain_loss = [hash_of(trainer.actor)], trainer.sync, updates.policy_loss

    def noted_sync() -> None:
        hashes.append(hash_of(trainer.actor))
        sync()

    def poisoned(*arguments):
        losses = plain_loss(*arguments)
        if collectives.rank() == 1 and trainer.step in BAD_STEPS:
            losses.loss = losses.loss * float("nan")
        return losses

    trainer.sync, updates.policy_loss = noted_sync, poisoned
    error = None
    try:
        trainer.fit()
    except NonFiniteError as failure:
        error = str(failure)
        hashes.append(hash_of(trainer.actor))
    updates.policy_loss = plain_loss
    return {"weights": hashes, "error": error}


def run_stages(folder: Path, flags: list[str]) -> list[dict]:
    """Rank 1 meets a NaN loss in some steps, under every ZeRO stage: a hash of all weights after each step, and how the
    run ended."""
    quiet_libraries()
    return [run(stage, folder, flags) for stage in STAGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("nan")


@pytest.fixture(scope="module")
def both(folder, cache_root) -> list[list[dict]]:
    """By rank and stage."""
    return on_ranks(run_stages, folder, [*SMALL, *FLAGS], limit=LIMIT)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_stay_bit_identical_on_both_ranks_and_the_metrics_say_so(folder, both, stage):
    ranks = [each[STAGES.index(stage)] for each in both]
    weights = ranks[0]["weights"]
    assert ranks[1]["weights"] == weights
    assert weights[0] != weights[1] == weights[2] != weights[3]  # steps 1 and 3 trained, step 2 did not
    assert weights[3] == weights[-1]  # steps 4, 5 and 6 did not
    for rank in ranks:
        assert "step 6" in rank["error"] and "3 in a row" in rank["error"]
    with open(folder / f"run_{stage}" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["skipped_steps"]) for row in rows] == [0, 1, 0, 1, 1]
    assert rows[1]["grad_norm"] == ""
