"""The scorer of the embedded diffusion run cannot be satisfied by less than the picture that was asked for."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.embedded import shape_match as shape_match_module
from lightrft_visual.plugins.embedded.drawn_shapes import (
    all_captions,
    colour_table,
    draw,
    parse_caption,
    placed_captions,
    random_images,
)
from lightrft_visual.plugins.embedded.shape_match import ShapeMatch, pixels_of, shape_match

CAPTIONS = all_captions()
TEXTS = [caption.text for caption in CAPTIONS]
COLOURS = torch.tensor([caption.colour for caption in CAPTIONS])
SHAPES = torch.tensor([caption.shape for caption in CAPTIONS])


def pictures(seed=0):
    return random_images(COLOURS, SHAPES, 32, torch.Generator().manual_seed(seed))


def to_pil(image):
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())


def test_what_was_asked_for_scores_near_one():
    scores = shape_match(pictures(), TEXTS)
    assert scores["score"].min() > 0.8 and scores["score"].mean() > 0.97


def test_the_wrong_shape_or_colour_scores_little():
    wrong_shape = [f"a {text.split()[1]} {TEXTS[(i + 1) % 4].split()[2]}" for i, text in enumerate(TEXTS)]
    wrong_colour = [f"a {TEXTS[(i + 4) % 24].split()[1]} {text.split()[2]}" for i, text in enumerate(TEXTS)]
    assert shape_match(pictures(), wrong_shape)["score"].max() < 0.1
    assert shape_match(pictures(), wrong_colour)["score"].max() < 0.5


def test_flat_pictures_and_noise_score_nothing():
    ink = colour_table(torch.zeros(1))[COLOURS][:, :, None, None]
    flat = ink.expand(-1, -1, 32, 32)
    generator = torch.Generator().manual_seed
    nearly = flat + 0.02 * torch.randn(flat.shape, generator=generator(0))
    halves = torch.cat([torch.full_like(flat, 0.95)[..., :16], flat[..., 16:]], dim=-1)
    assert shape_match(flat, TEXTS)["score"].max() == 0
    assert shape_match(nearly, TEXTS)["score"].max() < 1e-3
    assert shape_match(halves, TEXTS)["score"].max() < 0.05
    assert shape_match(torch.rand(24, 3, 32, 32, generator=generator(0)), TEXTS)["score"].max() < 0.1


def test_a_tiny_or_a_filling_shape_scores_less():
    def score(area):
        drawn = draw(COLOURS, SHAPES, torch.full((24,), area), torch.full((24,), 0.5), torch.full((24,), 0.5), 32)
        return shape_match(drawn, TEXTS)["score"].mean()

    assert score(0.2) > 0.95 > score(0.02)
    assert score(0.9) < 0.1


def test_the_score_has_a_gradient_that_improves_the_picture():
    image = (0.7 * pictures() + 0.3 * 0.95).requires_grad_(True)
    before = shape_match(image, TEXTS)["score"]
    before.sum().backward()
    assert torch.isfinite(image.grad).all() and image.grad.abs().sum() > 0
    after = shape_match(image.detach() + 0.5 * image.grad, TEXTS)["score"]
    assert after.mean() > before.mean()


def test_a_named_place_counts_and_no_other_has_it():
    captions = placed_captions()
    kinds = [torch.tensor([getattr(each, name) for each in captions]) for name in ("colour", "shape", "place")]
    images = random_images(*kinds[:2], 32, torch.Generator().manual_seed(0), places=kinds[2])
    asked = shape_match(images, [caption.text for caption in captions])
    assert asked["score"].mean() > 0.95 and asked["place"].min() > 0.7
    for other in range(1, 4):
        elsewhere = [replace(caption, place=(caption.place + other) % 4).text for caption in captions]
        found = shape_match(images, elsewhere)
        assert found["place"].max() == 0 and found["score"].max() == 0
        torch.testing.assert_close(found["colour"], asked["colour"])
    without = shape_match(images, [replace(caption, place=None).text for caption in captions])
    assert without["place"].min() == 1
    middle = shape_match(pictures(), [f"{text} at the top left" for text in TEXTS])
    assert middle["score"].mean() < 0.2


def test_captions_without_a_known_shape_are_not_valid():
    assert shape_match(pictures()[:2], ["a red circle", "a dog"])["valid"].tolist() == [True, False]
    assert parse_caption("A green, SQUARE!") == parse_caption("a green square")
    assert all(parse_caption(caption.text) == caption for caption in [*all_captions(), *placed_captions()])
    assert parse_caption("At the top, left of it, a red circle") == parse_caption("a red circle at the top left")
    assert parse_caption("a red circle at the top").place is None


def test_scorers_by_name(monkeypatch):
    frames = [[to_pil(image)] for image in pictures()[:2]]
    scores = ShapeMatch()(frames + [[]], [TEXTS[0], "a dog", TEXTS[0]])
    assert scores[0] > 0.9 and scores[1:] == [None, None]
    drawn = [to_pil(image) for image in pictures()[:4]]
    videos = [[drawn[0]], [drawn[1].resize((16, 16)), drawn[1]], [drawn[2], drawn[3]]]
    alone = [
        [shape_match(pixels_of([image]), [text])["score"].item() for image in video]
        for text, video in zip(TEXTS, videos)
    ]
    for most in (shape_match_module.PIXELS_AT_ONCE, 1):  # as many images at once as may be, and one after the other
        monkeypatch.setattr(shape_match_module, "PIXELS_AT_ONCE", most)
        assert ShapeMatch()(videos, TEXTS[:3]) == pytest.approx([sum(each) / len(each) for each in alone], abs=1e-6)
    with pytest.raises(ConfigError, match="part"):
        ShapeMatch("size")
