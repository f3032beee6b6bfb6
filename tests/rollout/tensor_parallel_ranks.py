"""One vLLM engine of two tensor-parallel ranks, each with prompts of its own: what came of it on a rank."""

from pathlib import Path

import torch
from engine_rig import Rig
from tiny_models import actor_of, mixed_prompts

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy

SETTINGS = SamplingSettings(n=2, max_new_tokens=6)


def one_engine(folder: str) -> dict:
    torch.set_num_threads(1)
    DeepspeedStrategy(DistributedConfig()).setup_distributed()
    rank = collectives.rank()
    checkpoint = open_checkpoint(folder, ModelConfig(), DataConfig())
    actor = actor_of(checkpoint)
    settings = {"max_model_len": 1024, "max_videos": 2, "max_num_seqs": 64, "host_cache": 2**26}
    engine = VLLMEngine(VLLMSettings(folder, tensor_parallel_size=2, banned_ids=actor.banned_ids.tolist(), **settings))
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "-cpushm_" in line]
    rig = Rig(checkpoint, actor, engine)
    mine = mixed_prompts().select([[0, 1, 5], [2, 6]][rank])
    differences = [rig.difference(mine, SETTINGS)]
    for _ in range(2):
        rig.move()
        rig.sync()
        differences.append(rig.difference(mine, SETTINGS))
    # A rank without prompts takes part all the same.
    rest = rig.stage.generate(mine if rank == 0 else mine.select([]), SETTINGS)
    differences.append(rig.apart(rest, SETTINGS) if rest else 0.0)
    engine.close()
    sharing = hasattr(torch.ops._C, "init_shm_manager")  # vLLM's build for CPUs without AVX-512 has none
    return {"differences": differences, "rest": len(rest), "shared": shared, "sharing": sharing}
