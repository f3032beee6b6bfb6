"""Run by two ranks that divide the weights: each family of a folder agrees with its own class, before and after a step
in which one rank has text alone; where nobody has proven it, it is proven once, and refused alike where it is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers.models.smolvlm.processing_smolvlm as smolvlm
from launched import leave

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.models.vlm.families.unregistered import Unregistered
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings


def proven(actor: Actor, checkpoint) -> list[str | None]:
    """What is said at a first start, at a second one, and of wrong positions."""
    told = [probe.prove_family(actor, checkpoint, 64, {"pretrain": "one"}) for _ in range(2)]
    right = Unregistered.positions
    Unregistered.positions = lambda *given: 2 * right(*given)
    try:
        probe.prove_family(actor, checkpoint, 64, {"pretrain": "another"})
    except ConfigError as error:
        told.append(str(error))
    Unregistered.positions = right
    return told


def tried(strategy: DeepspeedStrategy, path: str) -> tuple[list[float], list[str | None]]:
    """The differences before and after a step, and what is said of a family that nobody has proven."""
    checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    with strategy.loading():
        transformer = load_transformer(path, ModelConfig(), strategy.dtype)
    actor = Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    train = strategy.prepare(actor, OptimizerSettings(1e-3, total_steps=4))
    told = proven(train.module, checkpoint) if type(checkpoint.family) is Unregistered else []
    samples = probe.made_up_samples(checkpoint, 0)
    found = [probe._tried(train.module, checkpoint, 0).difference]
    own = samples[:1] if collectives.is_rank_0() else samples[1:]
    form = probe._padded if train.module.backbone.family.unproven else probe._packed
    output = train(form(own), ScoringRule())
    train.accumulate(-output.log_probs.sum() / 100, last=True)
    assert train.step().applied
    if (routers := train.module.backbone.routers) is not None:
        routers._real = None  # of that pass, where the own class is called with another
    return [*found, probe._tried(train.module, checkpoint, 0).difference], told


def main(folder: str) -> None:
    torch.set_num_threads(1)
    smolvlm.num2words = smolvlm.num2words or str  # an optional package that spells the numbers of videos
    os.environ["LIGHTRFT_CACHE"] = str(Path(folder, "cache"))
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    found = {path.name: tried(strategy, str(path)) for path in sorted(Path(folder, "models").iterdir())}
    Path(folder, f"{collectives.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
