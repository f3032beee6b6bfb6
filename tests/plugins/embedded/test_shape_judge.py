"""The gold judge: trained within seconds, cached once, right on drawings, and not fooled by what is none."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.embedded.captions import EVAL_REPEATS, embedded_prompts
from lightrft_visual.plugins.embedded.drawn_shapes import (
    COLOURS,
    SHAPES,
    all_captions,
    held_out,
    placed_captions,
    random_images,
)
from lightrft_visual.plugins.embedded.shape_judge import (
    ShapeJudgeScorer,
    embedded_judge,
    judge_file,
    judge_images,
    kinds_of,
    no_drawings,
)
from lightrft_visual.plugins.embedded.shape_match import shape_match


def clean(repeats: int = 8, seed: int = 3) -> tuple[torch.Tensor, list[str]]:
    captions = [caption for caption in all_captions() for _ in range(repeats)]
    colours, shapes = (torch.tensor([getattr(c, name) for c in captions]) for name in ("colour", "shape"))
    images = random_images(colours, shapes, 32, torch.Generator().manual_seed(seed))
    return images, [caption.text for caption in captions]


def test_held_out_captions_share_words_but_no_combination_with_training(tmp_path):
    shown = {}
    for split, size in (("test", 18), ("dev", 12)):
        train, kept = shown[split] = [
            [json.loads(line)["prompt"] for line in path.open()] for path in embedded_prompts(tmp_path, split)
        ]
        assert len(train) == len(set(train)) == size and len(set(kept)) == 6 and len(kept) == 6 * EVAL_REPEATS
        assert not set(train) & set(kept)
        assert all(any(word in caption for caption in train) for word in (*COLOURS, *SHAPES))
    train, kept = shown["test"]
    assert set(train) | set(kept) == {caption.text for caption in all_captions()}
    assert all(any(word in caption for caption in kept) for word in (*COLOURS, *SHAPES))
    assert set().union(*shown["dev"]) == set(train)  # those of the test are left alone
    assert sorted(c.colour for c in all_captions() if held_out(c)) == list(range(6))
    with pytest.raises(ConfigError, match="eval_split is 'train'; the embedded task evaluates on dev or test"):
        embedded_prompts(tmp_path, "train")


def test_the_judge_knows_clean_drawings_and_says_how_well(cache_root):
    images, texts = clean()
    assert judge_images(images, texts)["both"].mean() > 0.97
    with safe_open(judge_file(), "pt") as file:
        accuracy = json.loads(file.metadata()["accuracy"])
    assert accuracy["drawings"] > 0.98 and accuracy["others"] > 0.95


def test_the_judge_of_captions_with_a_place_knows_places(cache_root):
    captions = [caption for caption in placed_captions() for _ in range(2)]
    kinds = [torch.tensor([getattr(each, name) for each in captions]) for name in ("colour", "shape", "place")]
    images = random_images(*kinds[:2], 32, torch.Generator().manual_seed(3), places=kinds[2])
    found = judge_images(images, [caption.text for caption in captions])
    assert found["score"].mean() > 0.95 and found["both"].mean() > 0.95
    elsewhere = [replace(caption, place=(caption.place + 1) % 4).text for caption in captions]
    assert judge_images(images, elsewhere)["score"].mean() < 0.02
    middle, texts = clean(2)
    assert judge_images(middle, [f"{text} at the top left" for text in texts])["place"].mean() < 0.1
    mixed = judge_images(torch.cat([images[:2], middle[:2]]), [captions[0].text, "a dog", *texts[:2]])
    assert mixed["score"].isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(mixed["score"][0], found["score"][0])


def test_what_pleases_the_reward_in_part_is_no_drawing_to_the_judge(cache_root):
    others, _, _ = no_drawings(256, 32, torch.Generator().manual_seed(9))
    texts = [caption.text for caption in all_captions()] * 11
    assert judge_images(others, texts[:256])["both"].mean() < 0.03
    flat = torch.tensor(list(COLOURS.values()))[torch.arange(24) // 4].view(-1, 3, 1, 1).expand(-1, -1, 32, 32)
    found = judge_images(flat, texts[:24])
    assert found["both"].max() < 0.05 and shape_match(flat, texts[:24])["score"].max() < 0.05


def test_images_of_another_size_and_captions_without_a_shape(cache_root):
    big = random_images(torch.tensor([0]), torch.tensor([1]), 96, torch.Generator().manual_seed(0))
    assert judge_images(big, ["a red square"])["both"].item() > 0.9
    assert judge_images(big, ["a dog"])["both"].isnan().all()
    assert ShapeJudgeScorer()([[None]], ["a dog"]) == [None]
    with pytest.raises(Exception, match="part is 'size'"):
        ShapeJudgeScorer("size")


def test_kinds_are_one_number_a_pair(cache_root):
    images, _ = clean(1)
    assert len(set(kinds_of(embedded_judge(), images).tolist())) == 24
