"""Run by two ranks: a family is proven on weights that are divided over them, refused alike, and trained on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from launched import leave

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.loading import Checkpoint, load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.models.vlm.families.unregistered import Unregistered
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.train_engine import TrainEngine


def divided(folder: str, learning_rate: float) -> tuple[Checkpoint, TrainEngine]:
    """The model of the folder, with its weights divided over the ranks."""
    torch.set_num_threads(1)
    os.environ["LIGHTRFT_CACHE"] = str(Path(folder, "cache"))
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    path = str(Path(folder, "model"))
    checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    with strategy.loading():
        transformer = load_transformer(path, ModelConfig(), strategy.dtype)
    actor = Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    return checkpoint, strategy.prepare(actor, OptimizerSettings(learning_rate, total_steps=4))


def main(folder: str) -> None:
    checkpoint, train = divided(folder, 1e-2)
    told = [probe.prove_family(train.module, checkpoint, 64, {"pretrain": "one"}) for _ in range(2)]
    right = Unregistered.positions
    Unregistered.positions = lambda *given: 2 * right(*given)
    try:
        probe.prove_family(train.module, checkpoint, 64, {"pretrain": "another"})
    except ConfigError as error:
        told.append(str(error))
    Unregistered.positions = right
    output = train(probe._padded(probe.made_up_samples(checkpoint, 0)), ScoringRule())
    train.accumulate(-output.log_probs.sum() / 100, last=True)
    assert train.step().applied
    Path(folder, f"{collectives.rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
