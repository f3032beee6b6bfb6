"""Run by two ranks: one engine over both, each with prompts of its own; what came back goes into a file per rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engine_rig import Rig
from launched import leave
from tiny_models import actor_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy


def main(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    DeepspeedStrategy(DistributedConfig()).setup_distributed()
    rank = collectives.rank()
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    actor = actor_of(checkpoint)
    engine = VLLMEngine(
        VLLMSettings(
            model=folder, max_model_len=1024, max_videos=2, max_num_seqs=64, tensor_parallel_size=2,
            banned_ids=actor.banned_ids.tolist(),
        )
    )  # fmt: skip
    rig = Rig(checkpoint, actor, engine)
    mine = mixed_prompts().select([[0, 1, 5], [2, 6]][rank])
    settings = SamplingSettings(n=2, max_new_tokens=6)
    figures = [rig.difference(mine, settings)]
    rig.move()
    rig.sync()
    figures.append(rig.difference(mine, settings))
    # A rank without prompts takes part all the same.
    rest = rig.stage.generate(mine if rank == 0 else mine.select([]), settings)
    figures.append(rig.apart(rest, settings) if rest else 0.0)
    facts = {"figures": figures, "responses": len(rig.token_ids(mine, settings)), "rest": len(rest)}
    Path(out, f"{rank}.json").write_text(json.dumps(facts))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
