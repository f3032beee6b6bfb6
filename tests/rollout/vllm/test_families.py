"""Families that the package's own models do not cover, in vLLM on the CPU: it samples from what the trainer scores."""

from dataclasses import replace

import pytest
import torch
from engine_rig import check_parity, vllm_rig
from stock_families import STOCK, claimed, stock_checkpoint, stock_prompts
from tiny_models import BOS, begin_with_bos

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


@pytest.mark.parametrize("name", ["llava", "mistral3"])
def test_a_prompt_whose_template_wrote_the_first_token_has_it_once(tmp_path, monkeypatch, name):
    built = STOCK[name]()
    begin_with_bos(built[1])
    monkeypatch.setitem(STOCK, name, lambda: built)
    checkpoint = stock_checkpoint(tmp_path, name)
    batch = stock_prompts(checkpoint)
    batch.prompts = [*(BOS + each for each in batch.prompts[:2]), batch.prompts[2]]  # which gets it of the tokenizer
    bos = checkpoint.tokenizer.bos_token_id
    with vllm_rig(checkpoint, max_num_seqs=16) as rig:
        rollouts = rig.stage.generate(batch, SamplingSettings(n=1, max_new_tokens=4))
        begun = [replace(each.prompt, continued=each.token_ids[:1]) for each in rollouts]
        rest = [each for (each,) in rig.engine.generate(begun, SamplingSettings(n=1, max_new_tokens=3))]
    for prompt, own in zip(begun, rest):
        assert own.prompt_token_ids == prompt.token_ids and prompt.token_ids.count(bos) == 1
