"""An engine in this process whose two tensor-parallel ranks are processes of vLLM's; what came of it goes to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engine_rig import Rig
from tiny_models import actor_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings


def main(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    actor = actor_of(checkpoint)
    engine = VLLMEngine(
        VLLMSettings(
            model=folder, max_model_len=1024, max_videos=2, max_num_seqs=64, tensor_parallel_size=2, own_ranks=True,
            banned_ids=actor.banned_ids.tolist(),
        )
    )  # fmt: skip
    rig, prompts = Rig(checkpoint, actor, engine), mixed_prompts().select([0, 1, 5])
    settings = SamplingSettings(n=2, max_new_tokens=6)
    figures, tokens = [rig.difference(prompts, settings)], []
    for _ in range(2):
        rig.move()
        rig.sync()
        figures.append(rig.difference(prompts, settings))
        tokens.append(rig.token_ids(prompts, settings))
    Path(out).write_text(json.dumps({"figures": figures, "tokens": tokens}))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
