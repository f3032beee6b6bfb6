"""A NaN loss on one of two ranks: no rank steps, all weights stay, and three in a row end the run."""

import hashlib
from pathlib import Path

import pytest
from forked import on_ranks
from whole_runs import LIMIT, SMALL, rows

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


def run(stage: int, folder: Path, flags: list[str]) -> dict:
    argv = [*flags, "--zero_stage", str(stage), "--max_steps", "8", "--output_dir", str(folder / f"run_{stage}")]
    trainer = build_trainer(load_config(RunConfig, argv))
    hashes, sync, plain_loss, error = [], trainer.sync, updates.policy_loss, None

    def noted_sync() -> None:
        note()
        sync()

    def note() -> None:
        digest = hashlib.sha256()
        for name, tensor in named_weights(trainer.actor):
            digest.update(name.encode() + tensor.float().numpy().tobytes())
        hashes.append(digest.hexdigest())

    def poisoned(*arguments):
        losses = plain_loss(*arguments)
        if collectives.rank() == 1 and trainer.step in BAD_STEPS:
            losses.loss = losses.loss * float("nan")
        return losses

    note()
    trainer.sync, updates.policy_loss = noted_sync, poisoned
    try:
        trainer.fit()
    except NonFiniteError as failure:
        error = str(failure)
        note()
    updates.policy_loss = plain_loss
    return {"weights": hashes, "error": error}


def run_stages(folder: Path, flags: list[str]) -> list[dict]:
    """Rank 1 meets a NaN loss in some steps, under every ZeRO stage: a hash of all weights after each step, and how the
    run ended."""
    quiet_libraries()
    return [run(stage, folder, flags) for stage in STAGES]


@pytest.fixture(scope="module")
def both(tmp_path_factory, cache_root) -> tuple[Path, list[list[dict]]]:
    """(their folder, by rank and stage what a run left)."""
    folder = tmp_path_factory.mktemp("nan")
    return folder, on_ranks(run_stages, folder, [*SMALL, *FLAGS], limit=LIMIT)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_stay_bit_identical_on_both_ranks_and_the_metrics_say_so(both, stage):
    ranks = [each[STAGES.index(stage)] for each in both[1]]
    weights = ranks[0]["weights"]
    assert ranks[1]["weights"] == weights
    assert weights[0] != weights[1] == weights[2] != weights[3]  # steps 1 and 3 trained, step 2 did not
    assert weights[3] == weights[-1]  # steps 4, 5 and 6 did not
    for rank in ranks:
        assert "step 6" in rank["error"] and "3 in a row" in rank["error"]
    found = rows(both[0] / f"run_{stage}")
    assert [row["skipped_steps"] for row in found] == [0, 1, 0, 1, 1] and "grad_norm" not in found[1]
