"""Runs with rollout workers on one Ray cluster: `split_runs.py FOLDER` writes FOLDER/facts.json."""

import csv
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "trainer" / "diffusion"))
import picture_runs

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import VL_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.plugins.ray.cluster import connect
from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
from lightrft_visual.trainer.vl.trainer import build_trainer

VL = (
    "--engine_type hf --report false --eval_steps 0 --max_eval_samples 0 --max_steps 2 --rollout_batch_size 4 "
    "--n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 16 --generate_max_len 8 "
    "--max_samples 64 --image_dependence_every 0 --num_trajectories_to_save 16"
)
SPLIT = "--placement split --rollout_num_cpus 0.5"
SENT = f"{SPLIT} --weight_transfer device"
ASYNC = f"{SPLIT} async.max_staleness=1 async.partial_rollouts=true async.partial_tokens=1 --max_steps 3"
EPISODES = (
    f"{SPLIT} async.max_staleness=1 --prompt_data embedded_zoom --max_turns 3 --generate_max_len 20 --max_steps 2 "
    "--max_episode_tokens 96"
)


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return [{name: value for name, value in row.items() if "time" not in name} for row in csv.DictReader(file)]


def train(trainer, folder: Path, kill_after: int | None = None) -> list[dict[str, str]]:
    """The metrics of a run; kill_after: the step after which its worker is killed."""
    sync = trainer.sync

    def sync_and_kill() -> None:
        sync()
        if trainer.step == kill_after:
            os.kill(trainer.maker.engine.workers.cluster.described[0]["pid"], signal.SIGKILL)

    trainer.sync = sync_and_kill
    trainer.fit()
    if kill_after is not None:
        assert trainer.maker.engine.workers.pool.deaths == 1
    trainer.close()
    return metrics(folder)


def vl(folder: Path, name: str, flags: str, kill_after: int | None = None) -> list[dict[str, str]]:
    argv = [*VL.split(), "--output_dir", str(folder / name), *flags.split()]
    trainer = build_trainer(load_config(RunConfig, argv, preset=VL_PRESET))
    return train(trainer, folder / name, kill_after)


def drawn(folder: Path, name: str, flags: str) -> list[dict[str, str]]:
    prompts = str(folder / "prompts.jsonl")
    argv = [
        *picture_runs.BASE.split(), "--pretrain", str(folder / "pipeline"), "--prompt_data", prompts,
        "--eval_steps", "0", "--max_eval_samples", "0", "--reward_fn", f"{folder}/scores.py:red",
        "--rollout_graph_gib", "0",  # workers' graphs cannot serve the trainer: both replay, in the same order of sums
        "--max_steps", "2", "--output_dir", str(folder / name), *flags.split(),
    ]  # fmt: skip
    trainer = build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None))
    return train(trainer, folder / name)


def main(folder: Path) -> None:
    picture_runs.prepare(folder)
    connect("these tests", cpus=2)
    facts = {
        "colocated": vl(folder, "colocated", ""),
        "killed": vl(folder, "killed", SENT, kill_after=1),
        "ahead": vl(folder, "ahead", ASYNC),
        "drawn": drawn(folder, "drawn", ""),
        "drawn_split": drawn(folder, "drawn_split", SENT),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
