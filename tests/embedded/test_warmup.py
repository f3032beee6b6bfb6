"""The supervised warm-up: when its clean steps end, and that prompts encoded together equal those encoded alone."""

from __future__ import annotations

from itertools import islice

import pytest
from transformers import AutoProcessor

from lightrft_visual.embedded.questions import supervised_pairs, vocabulary_texts
from lightrft_visual.embedded.tiny_vlm import build_tiny_checkpoint
from lightrft_visual.embedded.warmup import CLEAN_WINDOW, PairEncoder, WarmUp, embedded_task, warm_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("warmup") / "model", "qwen2_5_vl", texts=vocabulary_texts())


@pytest.mark.parametrize(
    "settings, steps",
    [
        (WarmUp(clean_steps=3, noisy_steps=2, batch_size=4), 5),
        (WarmUp(clean_steps=60, clean_loss=1e9, noisy_steps=1, batch_size=2), CLEAN_WINDOW + 1),
        (WarmUp(clean_steps=0, noisy_steps=2, batch_size=2), 2),
    ],
)
def test_clean_steps_end_at_the_loss_or_at_the_limit(folder, cache_root, settings, steps):
    losses = warm_up(folder, embedded_task(cache_root), settings)
    assert len(losses) == steps


def test_prompts_encoded_together_equal_those_encoded_alone(folder, cache_root):
    processor = AutoProcessor.from_pretrained(folder)
    pairs = list(islice(supervised_pairs(embedded_task(cache_root).train, seed=3, random_share=0.0), 40))
    assert {len(pair.images) for pair in pairs} == {0, 1, 2}
    together = PairEncoder(processor.tokenizer, processor)
    together.batch(pairs)
    for pair in pairs:
        alone = PairEncoder(processor.tokenizer, processor)
        alone.batch([pair])
        assert alone.known.keys() == {(pair.prompt, pair.images)}
        for key, (ids, vision) in alone.known.items():
            assert together.known[key] == (ids, vision)
