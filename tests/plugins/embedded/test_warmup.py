"""The supervised warm-up: when it ends, what it shows, and that prompts encoded together equal those encoded alone."""

from dataclasses import replace
from itertools import islice

import pytest
from transformers import AutoProcessor

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.observe.console import short
from lightrft_visual.plugins.embedded import questions
from lightrft_visual.plugins.embedded.questions import vocabulary_texts
from lightrft_visual.plugins.embedded.task import supervised_pairs
from lightrft_visual.plugins.embedded.warmup import (
    EMBEDDED,
    LOSS_WINDOW,
    REPORT_EVERY,
    SOURCES,
    PairEncoder,
    WarmUp,
    embedded_checkpoint,
    embedded_task,
    warm_up,
    warm_up_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("warmup") / "model", "qwen2_5_vl", texts=vocabulary_texts())


def test_data_of_ones_own_trains_the_base_of_the_questions_whatever_its_file():
    assert warm_up_of("/data/mine.jsonl") == warm_up_of("theirs.csv") == warm_up_of(EMBEDDED) == WarmUp()


@pytest.mark.parametrize(
    "settings, steps",
    [(WarmUp(max_steps=3, batch_size=4), 3), (WarmUp(max_steps=60, until_loss=1e9, batch_size=2), LOSS_WINDOW)],
)
def test_steps_end_at_the_loss_or_at_the_limit(folder, cache_root, settings, steps):
    losses = warm_up(folder, embedded_task(cache_root), settings)
    assert len(losses) == steps


def test_another_warm_up_or_other_questions_make_another_checkpoint(tmp_path, monkeypatch):
    def build(**settings):
        return embedded_checkpoint(WarmUp(max_steps=0, **settings), tmp_path)

    first = build()
    assert build() == first and build(until_loss=0.1) != first
    monkeypatch.setitem(SOURCES, EMBEDDED, replace(questions.SOURCE, version=questions.VERSION + 1))
    assert build() != first


def test_the_warm_up_shows_its_steps_and_losses(folder, cache_root, capsys):
    losses = warm_up(folder, embedded_task(cache_root), WarmUp(max_steps=REPORT_EVERY + 2, batch_size=2))
    first, last = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith(f"warm-up step {REPORT_EVERY}/{REPORT_EVERY + 2}  loss {short(losses[REPORT_EVERY - 1])}")
    assert last.startswith(f"warm-up step {REPORT_EVERY + 2}/{REPORT_EVERY + 2}  loss {short(losses[-1])}")


def test_prompts_encoded_together_equal_those_encoded_alone(folder, cache_root):
    processor = AutoProcessor.from_pretrained(folder)
    pairs = list(islice(supervised_pairs(embedded_task(cache_root).train, seed=3), 40))
    assert {len(pair.images) for pair in pairs} == {0, 1, 2}
    together = PairEncoder(processor.tokenizer, processor)
    together.batch(pairs)
    for pair in pairs:
        alone = PairEncoder(processor.tokenizer, processor)
        alone.batch([pair])
        assert alone.known.keys() == {(pair.prompt, pair.images, ())}
        for key, (ids, vision) in alone.known.items():
            assert together.known[key] == (ids, vision)
