"""Families that the package's own models do not cover, in vLLM on the CPU: it samples from what the trainer scores."""

from __future__ import annotations

import pytest
import torch
from engine_rig import Rig, environment_restored
from stock_families import claimed, stock_checkpoint, stock_prompts

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.tiny.vlm import VISION_FAMILIES
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings


@pytest.mark.parametrize("name", sorted({*claimed("vllm")} - {*VISION_FAMILIES}))
def test_parity_as_loaded_and_after_a_sync(tmp_path, name):
    checkpoint = stock_checkpoint(tmp_path, name)
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    actor = Actor(load_transformer(checkpoint.path, ModelConfig(), torch.float32), banned, checkpoint.eos_ids).eval()
    settings = VLLMSettings(checkpoint.path, max_model_len=1024, max_num_seqs=16, banned_ids=banned, vision=True)
    with environment_restored():
        rig = Rig(checkpoint, actor, VLLMEngine(settings))
        sampling = SamplingSettings(n=2, max_new_tokens=6)
        found = [rig.difference(stock_prompts(checkpoint), sampling)]
        rig.move(0.01)
        rig.sync()
        found.append(rig.difference(stock_prompts(checkpoint), sampling))
        rig.engine.close()
    assert max(found) <= 2e-5, found
