"""Runs of two ranks with rollout workers, run by each: `rank_runs.py FOLDER` writes facts_<rank>.json."""

import json
import os
import sys
import traceback
from pathlib import Path

import psutil
import split_runs

from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import VL_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.rollout.weight_sync import WeightPost, WeightsRefused
from lightrft_visual.runtime import collectives, watchdog
from lightrft_visual.trainer.vl.trainer import build_trainer

FLAGS = (
    "--max_steps 2 --zero_stage 3 --lora_rank 4 --micro_train_batch_size 8 --micro_rollout_batch_size 4 "
    "--max_eval_samples 4"
)
AHEAD = f"{split_runs.EPISODES} --rollout_num_workers 1"


def refused(trainer) -> str:
    """What a rank says when rank 0 cannot hand the weights over."""
    if collectives.is_rank_0():
        trainer.maker.engine.workers.post = Refusing()
    try:
        trainer.sync()
    except WeightsRefused as error:
        return str(error)
    return "nothing"


class Refusing(WeightPost):
    """Reads one tensor and fails."""

    def post(self, named_tensors):
        next(iter(named_tensors))
        raise WeightsRefused("this version is refused")


def run(folder: Path, name: str, flags: str) -> dict:
    argv = [*split_runs.VL.split(), *FLAGS.split(), *flags.split(), "--output_dir", str(folder / name)]
    trainer = build_trainer(load_config(RunConfig, argv, preset=VL_PRESET))
    trainer.fit()
    facts = {"evaluated": trainer.latest_eval}
    if "split" in flags and collectives.is_rank_0():
        workers = trainer.maker.engine.workers.cluster.described
        facts["niceness"] = [psutil.Process(each["pid"]).nice() - os.nice(0) for each in workers]
    if "split" in flags:
        pool = trainer.maker.engine.workers.pool
        facts |= {
            "copied": pool.copied,
            "posts": trainer.maker.engine.workers.post is not None,
        }
        facts |= {"refused": refused(trainer)} if pool.copied else {}
    if "split" in flags:
        trainer.maker.engine.workers.cluster.connected_here = False  # one Ray cluster serves all runs
    trainer.close()
    facts["metrics"] = split_runs.metrics(folder / name) if collectives.is_rank_0() else []
    return facts


def main(folder: Path) -> None:
    runs = {"colocated": "", "split": f"{split_runs.SENT} --rollout_num_workers 2", "ahead": AHEAD}
    facts = {name: run(folder, name, flags) for name, flags in runs.items()}
    sys.modules["ray"].shutdown()  # imported by the first split run, after what Ray reads of the environment
    (folder / f"facts_{collectives.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    watchdog.stop()  # else the others would take this rank for one that died
    os._exit(0)
