"""Families that the package's own models do not cover, in vLLM on the CPU: it samples from what the trainer scores."""

import pytest
import torch
from engine_rig import check_parity, vllm_rig
from stock_families import claimed, stock_checkpoint, stock_prompts

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.tiny.vlm import VISION_FAMILIES
from lightrft_visual.models.vlm.actor import Actor


@pytest.mark.parametrize("name", sorted({*claimed("vllm")} - {*VISION_FAMILIES}))
def test_parity_as_loaded_and_after_a_sync(tmp_path, name):
    checkpoint = stock_checkpoint(tmp_path, name)
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    actor = Actor(load_transformer(checkpoint.path, ModelConfig(), torch.float32), banned, checkpoint.eos_ids).eval()
    with vllm_rig(checkpoint, banned, actor, max_num_seqs=16) as rig:
        check_parity(
            rig, stock_prompts(checkpoint), SamplingSettings(n=2, max_new_tokens=6), scale=0.01, most=2e-5, syncs=1
        )
