"""One vLLM engine of two tensor-parallel ranks; what came of it goes to files.

Run by two ranks, each with prompts of its own, or by one process (`own`) whose engine starts both ranks by itself.
"""

import json
import sys
from pathlib import Path

import torch
from engine_rig import Rig
from forked import leave
from tiny_models import actor_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings
from lightrft_visual.rollout.weight_sync import WeightPost
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy


def main(folder: str, out: str, own: bool) -> None:
    torch.set_num_threads(1)
    if not own:
        DeepspeedStrategy(DistributedConfig()).setup_distributed()
    rank = collectives.rank()
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    actor = actor_of(checkpoint)
    engine = VLLMEngine(
        VLLMSettings(
            model=folder, max_model_len=1024, max_videos=2, max_num_seqs=64, tensor_parallel_size=2, own_ranks=own,
            banned_ids=actor.banned_ids.tolist(),
        )
    )  # fmt: skip
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "-cpushm_" in line]
    rig = Rig(checkpoint, actor, engine)
    mine = mixed_prompts().select([[0, 1, 5], [2, 6]][rank])
    settings = SamplingSettings(n=2, max_new_tokens=6)
    figures, tokens = [rig.difference(mine, settings)], []
    for turn in range(2):
        rig.move()
        if own and turn:  # as a worker hands on what the trainer has posted
            post = WeightPost()
            engine.update_weights(iter(()), posted=post.post(rig.weights()))
        else:
            rig.sync()
        figures.append(rig.difference(mine, settings))
        tokens.append(rig.token_ids(mine, settings))
    # A rank without prompts takes part all the same.
    rest = rig.stage.generate(mine if rank == 0 else mine.select([]), settings)
    figures.append(rig.apart(rest, settings) if rest else 0.0)
    found = {"figures": figures, "tokens": tokens, "rest": len(rest), "shared": shared}
    found["sharing"] = hasattr(torch.ops._C, "init_shm_manager")  # vLLM's build for CPUs without AVX-512 has none
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:3], own="own" in sys.argv)
    leave()
