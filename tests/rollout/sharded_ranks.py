"""Run by two ranks: the transformers engine on a ZeRO-3 model, ranks with different prompts, images and lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engine_rig import Rig
from launched import leave
from tiny_models import actor_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings, collate
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.parity import log_prob_difference
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings

SETTINGS = SamplingSettings(n=2, max_new_tokens=6)


def main(folder: str, out: str, seed: str) -> None:
    torch.set_num_threads(1)
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    rank = collectives.rank()
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    actor = actor_of(checkpoint)
    train = strategy.prepare(actor, OptimizerSettings(1e-2, total_steps=4))
    engine = TransformersEngine(train, checkpoint.tokenizer, micro_batch_size=3)
    rig = Rig(checkpoint, actor, engine)
    rig.stage.run_seed = int(seed)
    # Rank 0: text, images and a video in three micro-batches. Rank 1: text alone, then nothing at all.
    batches = [mixed_prompts().select([[0, 2, 4, 5], [0]][rank]), mixed_prompts().select([[1, 0], []][rank])]
    tokens, figures = [], []
    for batch in batches:
        tokens.append(rig.token_ids(batch, SETTINGS))
    for _ in range(2):
        figures.append(train_step(rig, train, mixed_prompts().select([[2], [0]][rank])))
    Path(out, f"{rank}.json").write_text(json.dumps({"tokens": tokens, "figures": figures}))


def train_step(rig: Rig, train, batch) -> float:
    """Sample, compare with the trainer's log-probs, and move the weights; ranks with and without images."""
    rollouts = rig.stage.generate(batch, SETTINGS)
    samples = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
    output = train(ModelInputs.of(samples), SETTINGS.scoring)
    figure = log_prob_difference(output.log_probs.detach(), samples.rollout_log_probs, samples.action_mask)
    train.accumulate(-output.log_probs.sum() / 100, last=True)
    assert train.step().applied
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
