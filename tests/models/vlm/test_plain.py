"""Types that the general adapter runs right, each from a folder as a run opens it: scored, sampled and trained."""

from pathlib import Path

import pytest
import torch
from engine_rig import Rig
from plain_families import PLAIN, plain
from stock_families import stock_prompts

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.rollouts import PromptBatch, SamplingSettings, ScoringRule
from lightrft_visual.models.loading import add_lora, load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.hf import TransformersEngine


def test_the_page_of_models_names_each_of_them(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import write_models

    assert set(write_models.GENERAL) == PLAIN.keys()


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_type_without_an_adapter_is_proven_sampled_and_trained(model_type, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path / "cache"))
    built, folder = plain(model_type), tmp_path / "model"
    for part in (built.model, built.tokenizer, built.processor):
        part.save_pretrained(folder)
    settings = ModelConfig(lora_rank=4)
    checkpoint = open_checkpoint(str(folder), settings, DataConfig())
    model = add_lora(load_transformer(str(folder), settings, torch.float32), settings)
    actor = Actor(model, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids).eval()
    assert "padded; without images)" in probe.prove_family(actor, checkpoint, 64, {"pretrain": model_type})
    rig = Rig(checkpoint, actor, TransformersEngine(actor, checkpoint.tokenizer, 8))
    for prompts in (stock_prompts(checkpoint), PromptBatch.of(["what is 1 plus 2?", "where?"])):
        assert rig.difference(prompts, SamplingSettings(n=2, max_new_tokens=4)) <= 1e-5
    actor(probe._padded(probe.made_up_samples(checkpoint, 0)), ScoringRule()).log_probs.sum().backward()
    assert any(each.grad is not None and each.grad.any() for each in actor.parameters())
