"""The embedded model that sees and draws: its warm-up, the codes of its images, and its task."""

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, AutoTokenizer

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.plugins.embedded.drawn_shapes import COLOURS, PLACES, SHAPES, ShapeCaption, held_out, parse_caption
from lightrft_visual.plugins.embedded.shape_match import shape_match
from lightrft_visual.plugins.embedded.task import SupervisedPair
from lightrft_visual.plugins.embedded.warmup import embedded_task
from lightrft_visual.plugins.unified.task import unified_task
from lightrft_visual.plugins.unified.tiny_janus import (
    Drawings,
    UnifiedWarmUp,
    codes_of,
    drawn,
    partly_wrong,
    vocabulary,
    warm_up,
)

KINDS = {"colour": range(len(COLOURS)), "shape": range(len(SHAPES)), "place": range(len(PLACES))}
SHORT = UnifiedWarmUp(
    vq_steps=30, vq_batch_size=8, vq_rate=5e-3, images=32, steps=12, batch_size=4, descriptions=24, described_steps=9
)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, cache_root):
    folder = build_tiny_checkpoint(tmp_path_factory.mktemp("janus") / "model", "janus", texts=vocabulary())
    before = AutoModelForImageTextToText.from_pretrained(folder)
    errors, losses = warm_up(folder, embedded_task(cache_root), SHORT)
    return before, AutoModelForImageTextToText.from_pretrained(folder), errors, losses


def test_the_warm_up_teaches_both_halves_and_is_saved(warmed):
    before, after, errors, losses = warmed
    assert sum(errors[-5:]) < 0.7 * sum(errors[:5])
    told = SHORT.described_steps
    assert [sorted(each) for each in losses[:told]] == [["descriptions", "drawing", "questions"]] * told
    assert [sorted(each) for each in losses[told:]] == [["drawing", "questions"]] * (SHORT.steps - told)
    for kind in ("descriptions", "drawing", "questions"):
        each = [step[kind] for step in losses if kind in step]
        assert sum(each[-3:]) < sum(each[:3])
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    for part in ("vqmodel", "generation_head", "generation_embeddings", "vision_model", "language_model"):
        assert any(f".{part}." in name for name in changed), part


@torch.no_grad()
def test_codes_lie_where_the_stock_decoder_reads_them(warmed):
    vq = warmed[1].model.vqmodel
    book = vq.quantize.embedding.weight
    torch.testing.assert_close(book.norm(dim=1), torch.ones(len(book)), atol=1e-5, rtol=0)
    pixels, _ = drawn(SHORT.vq_batch_size, SHORT, torch.Generator().manual_seed(1))
    codes = codes_of(vq, pixels)
    encoded = F.normalize(vq.quant_conv(vq.encoder(pixels)), dim=1).permute(0, 2, 3, 1).flatten(0, 2)
    likeness = encoded @ book.T
    chosen = likeness.gather(1, codes.reshape(-1, 1)).squeeze(1)
    torch.testing.assert_close(chosen, likeness.amax(dim=1), atol=1e-5, rtol=0)  # of two equally near ones either
    assert vq.decode(codes).shape == pixels.shape


def test_each_image_is_coded_with_its_caption(warmed):
    images, captions = drawn(48, SHORT, torch.Generator().manual_seed(1))
    scores = shape_match((images + 1) / 2, [caption.text for caption in captions])
    assert scores["place"].min() > 0.95 and scores["score"].mean() > 0.8 and len(set(captions)) > 24


def test_only_the_named_shares_of_words_are_wrong(warmed):
    tokenizer = AutoTokenizer.from_pretrained(warmed[1].name_or_path)
    actor = Actor(warmed[1], [], [])

    def asked(**wrong) -> list[tuple[ShapeCaption, str]]:
        settings = replace(SHORT, no_caption=0.0, **wrong)
        drawings = Drawings(actor, tokenizer, settings, torch.Generator().manual_seed(1))
        return [(shown, tokenizer.decode(drawings._caption(shown))) for shown in drawings.shown for _ in range(8)]

    assert all(shown.text in text for shown, text in asked(wrong_colour=0.0, wrong_shape=0.0, wrong_place=0.0))
    replaced = asked(wrong_colour=1.0, wrong_shape=0.0, wrong_place=0.0)
    one_of = [{replace(shown, colour=colour).text for colour in KINDS["colour"]} for shown, _ in replaced]
    named = [next(other for other in others if other in text) for others, (_, text) in zip(one_of, replaced)]
    right = sum(name == shown.text for name, (shown, _) in zip(named, replaced))
    assert 0 < right < 0.3 * len(replaced)  # one of six by chance


def test_the_named_share_of_answers_is_that_of_another_question_of_the_kind():
    words = {"colour": ["red", "green", "blue", "yellow"], "count": ["1", "2", "3"]}
    rows = [(kind, words[kind][number % len(words[kind])]) for number in range(4000) for kind in words]
    pairs = [SupervisedPair(str(number), (), word, kind) for number, (kind, word) in enumerate(rows)]
    given = list(partly_wrong(iter(pairs), 0.4, torch.Generator().manual_seed(0)))
    assert [(each.prompt, each.kind) for each in given] == [(each.prompt, each.kind) for each in pairs]
    for kind, answers in words.items():
        mine = [(own.answer, each.answer) for own, each in zip(pairs, given) if own.kind == kind]
        assert {said for _, said in mine} == set(answers)
        wrong = sum(right != said for right, said in mine) / len(mine)
        assert wrong == pytest.approx(0.4 * (1 - 1 / len(answers)), abs=0.03)
    assert list(partly_wrong(iter(pairs), 0.0, torch.Generator())) == pairs


def test_held_out_captions_are_drawn_in_evaluations_only(cache_root):
    task = unified_task(cache_root)

    def rows(path) -> list[dict]:
        return [json.loads(line) for line in open(path)]

    assert all(not row["draw"] for row in rows(task.questions()))
    assert task.train("dev") == f"{task.drawings('dev')},{task.questions()}"
    for split, count in (("test", 72), ("dev", 48)):
        kept, train = rows(task.held_out(split)), rows(task.drawings(split))
        assert [row["draw"] for row in kept[:4]] == [False, True] * 2 and len(kept) % 2 == 0
        drawn = {row["prompt"] for row in kept if row["draw"]}
        trained = {row["prompt"] for row in train}
        assert all(row["draw"] for row in train) and len(train) == len(rows(task.questions()))
        assert len(drawn) == 24 and len(trained) == count and not drawn & trained
        asked = [parse_caption(text) for text in trained]
        for one, two in combinations(("colour", "shape", "place"), 2):
            together = {(getattr(each, one), getattr(each, two)) for each in asked}
            assert together == set(product(KINDS[one], KINDS[two]))
        assert all(held_out(parse_caption(text), split) for text in drawn)
        assert not any(held_out(parse_caption(text)) for text in trained)
    with pytest.raises(ConfigError, match="eval_split is 'train'; the embedded task evaluates on dev or test"):
        task.held_out("train")
