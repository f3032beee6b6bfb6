"""Tiny checkpoints, and the tiny SD3: ordinary ones that load, round-trip text, and come out the same from one seed."""

import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import checkpoint_of, load
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig

from lightrft_visual.models.tiny.diffusion import build_clip_tokenizer
from lightrft_visual.models.tiny.vlm import (
    SPECIAL_TOKENS,
    VISION_FAMILIES,
    build_tiny_checkpoint,
    build_tokenizer,
    tiny_config,
)
from lightrft_visual.models.vlm.families import family_of


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_every_string_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_single_tokens_unknown_words_are_spelt_and_unknown_families_are_an_error(tokenizer):
    assert all(len(tokenizer.encode(name, add_special_tokens=False)) == 1 for name in SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    clip = build_clip_tokenizer()
    assert clip.decode(clip("zebra").input_ids, skip_special_tokens=True) == "zebra"
    with pytest.raises(ValueError, match="unknown family 'gpt'; known: qwen2_vl, "):
        tiny_config("gpt", tokenizer, tie_embeddings=False)


def test_the_chat_template_places_media_where_they_are_said(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}, {"type": "image_url"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na{image}{video}{image}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "internvl"])
def test_checkpoints_load_through_the_auto_classes(root, family):
    checkpoint = checkpoint_of(root, family)
    model = load(checkpoint.path, checkpoint.vision)
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    assert family_of(model.config).vision is checkpoint.vision is (family in VISION_FAMILIES)
    assert AutoTokenizer.from_pretrained(checkpoint.path).get_vocab() == checkpoint.tokenizer.get_vocab()
    if family in VISION_FAMILIES:
        assert type(AutoProcessor.from_pretrained(checkpoint.path)) is type(checkpoint.processor)
    tied = load(checkpoint_of(root, f"{family}+tied").path, checkpoint.vision)
    for each, shared in ((model, False), (tied, True)):
        assert (each.get_output_embeddings().weight is each.get_input_embeddings().weight) == shared
    ends = GenerationConfig.from_pretrained(checkpoint.path).eos_token_id
    assert ends == [checkpoint.tokenizer.eos_token_id] == checkpoint.eos_ids


def test_one_seed_one_model(tmp_path):
    first, same, other = (
        load(build_tiny_checkpoint(tmp_path / name, "qwen2", seed=seed), False).state_dict()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
