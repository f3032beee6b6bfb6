"""The tiny SD3: tokenizers that know their words, settings that decide the weights."""

import torch

from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_clip_tokenizer, build_pipeline


def test_unknown_words_are_spelt():
    clip = build_clip_tokenizer()
    assert clip.decode(clip("zebra").input_ids, skip_special_tokens=True) == "zebra"


def test_the_same_settings_give_the_same_weights():
    settings = TinyDiffusionSettings(layers=1)
    one, two = build_pipeline(settings), build_pipeline(settings)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        left, right = one.components[name].state_dict(), two.components[name].state_dict()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert one.tokenizer.get_vocab() == two.tokenizer.get_vocab()
