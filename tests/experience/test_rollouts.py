"""Settings of sampling, and what they make of a response."""

import pytest

from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.models.tiny.vlm import build_tokenizer


@pytest.mark.parametrize("end", ["<|im_end|>", "."])
def test_text_of_a_response_has_its_end_token_only_where_special_tokens_are_kept(end):
    tokenizer = build_tokenizer()  # for which "." is a token like any other
    ids = tokenizer(f"<|vision_start|>a ring{end}")["input_ids"]
    for skips, whole, cut in (
        (True, "a ring", "a rin"),
        (False, f"<|vision_start|>a ring{end}", "<|vision_start|>a rin"),
    ):
        settings = SamplingSettings(skip_special_tokens=skips)
        assert settings.text(ids, False, tokenizer) == whole
        assert settings.text(tokenizer("<|vision_start|>a rin")["input_ids"], True, tokenizer) == cut
