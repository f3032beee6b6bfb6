"""Three steps on one rank are one of them on one rank, one on two, and one on one again.

With PPO the first checkpoint is of an actor that has not been trained yet."""

import math
import shutil
from pathlib import Path

import pytest
from plans import given
from small_pipeline import given_flags
from whole_runs import rollouts, rows, run_plan

DRAWS = (
    "--height 32 --width 32 --num_steps 3 --guidance_scale 2 --max_sequence_length 5 --rollout_batch_size 2 "
    "--n_samples_per_prompt 4 --micro_rollout_batch_size 2 --train_batch_size 4 --micro_train_batch_size 2 "
    "--max_eval_samples 0 --report false --num_trajectories_to_save 8 --learning_rate 1e-3 --eval_steps -1"
)
SEES = {
    "sees_full_2": "--zero_stage 2 --vision_learning_rate 1e-5 --enable_ema true",
    "sees_ppo_3": "--zero_stage 3 --advantage_estimator gae --freezing_actor_steps 1",
    "sees_lora_3": "--zero_stage 3 --lora_rank 4 --actor_learning_rate 1e-3",
}
DRAWN = {"draws_full_3": "--zero_stage 3 --lora_rank 0 --beta 0.1 --enable_ema true --ema_interval 1"}
NAMES = ("loss", "grad_norm", "reward_mean", "reward_std", "learning_rate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root) -> Path:
    own = tmp_path_factory.mktemp("other_ranks")
    pipeline = given_flags(own)
    runs = {name: given(f"{flags} --rollout_batch_size 4 --train_batch_size 16") for name, flags in SEES.items()}
    runs |= {name: ["diffusion", *DRAWS.split(), *flags.split(), *pipeline] for name, flags in DRAWN.items()}
    last = ""
    for ranks, steps in ((1, 1), (2, 2), (1, 3)):
        plan = {}
        for name, flags in runs.items():
            until = [*flags, "--save_steps", "1", "--max_steps", str(steps)]
            if last:
                shutil.copytree(own / f"{name}{last}", own / f"{name}_{steps}")
            plan[f"{name}_{steps}"] = [*until, *(["--resume"] if last else [])]
            if steps == 3:
                plan[f"{name}_whole"] = until
        run_plan(plan, own, cache_root, ranks)
        last = f"_{steps}"
    return own


@pytest.mark.parametrize("name", [*SEES, *DRAWN])
def test_a_run_that_changes_its_ranks_twice_is_the_run_that_did_not(folder, name):
    whole, changed = rows(folder / f"{name}_whole"), rows(folder / f"{name}_3")
    assert len(whole) == len(changed) == 3
    for column in NAMES:
        expected, found = ([row.get(column, math.nan) for row in each] for each in (whole, changed))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), column
        assert [step for step, value in enumerate(expected) if math.isnan(value)] in ([], [0]), column


@pytest.mark.parametrize("name", SEES)
def test_its_samples_are_the_same(folder, name):
    for before, after in zip(rollouts(folder / f"{name}_whole"), rollouts(folder / f"{name}_3"), strict=True):
        ours, theirs = ({each["sample_id"]: each["response"] for each in step} for step in (before, after))
        assert ours == theirs and ours
