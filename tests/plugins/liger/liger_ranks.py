"""Run by two ranks that divide the weights: log-probs and the norm of gradients with Liger's kernels and without."""

import json
import sys
from pathlib import Path

import interpreted  # noqa: F401  # what the interpreter lacks
import torch
from forked import leave

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings


def main(folder: str) -> None:
    torch.set_num_threads(1)
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    path, found = str(Path(folder, "model")), []
    checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    inputs = probe._padded(probe.made_up_samples(checkpoint, 0)[collectives.rank() :][:1])  # a text; one image
    for used in (False, True):
        with strategy.loading():
            transformer = load_transformer(path, ModelConfig(use_liger_kernel=used), strategy.dtype)
        assert ("forward" in vars(transformer.model.language_model.norm)) == used
        train = strategy.prepare(Actor(transformer, [], checkpoint.eos_ids), OptimizerSettings(1e-3, total_steps=4))
        output = train(inputs, ScoringRule())
        train.accumulate(-output.log_probs.sum() / 100, last=True)
        found.append((output.log_probs.detach(), train.step().grad_norm))
    differences = [float(torch.as_tensor(one - other).abs().max()) for one, other in zip(*found)]
    Path(folder, f"{collectives.rank()}.json").write_text(json.dumps([*differences, found[0][1]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
