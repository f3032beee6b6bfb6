"""Run by one rank: actor and reference of every ZeRO stage in bfloat16, before any step, at positions up to 1,900."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from launched import leave
from tiny_models import features_of, inputs_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import Rollout, ScoringRule
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.parity import log_prob_difference
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings

LENGTH = 1890


def main(folder: str, out: str) -> None:
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    prompts = features_of(checkpoint, mixed_prompts().select([0, 1]))
    ids = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    inputs = inputs_of(checkpoint, [Rollout(prompt, ids, None, "", False, sample_id=0) for prompt in prompts])
    differences = {}
    for stage in range(4):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=stage), bf16=True)
        if not stage:
            strategy.setup_distributed()

        def new_actor(strategy=strategy):
            with strategy.loading():
                transformer = load_transformer(folder, ModelConfig(), strategy.dtype)
            return Actor(transformer, [], checkpoint.eos_ids)

        actor = strategy.prepare(new_actor(), OptimizerSettings(1e-4, total_steps=4))
        reference = strategy.prepare_inference(new_actor())
        with torch.no_grad():
            ours, theirs = (model(inputs, ScoringRule()).log_probs for model in (actor, reference))
        differences[stage] = log_prob_difference(ours, theirs, inputs.action_mask, mean=True)
    Path(out).write_text(json.dumps(differences))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
