"""Pairs of images for offline Diffusion-DPO: both forms of rows, and rows that are none."""

import io
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from lightrft_visual.config.diffusion import DiffusionDataConfig
from lightrft_visual.data.drawing_prompts import PreferencePairs
from lightrft_visual.errors import DataError
from lightrft_visual.given import give


def written(folder: Path, *rows: dict) -> str:
    for name, colour in (("red.png", "red"), ("blue.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(folder / name)
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, **settings) -> PreferencePairs:
    return PreferencePairs(path, "train", 100, DiffusionDataConfig(**settings))


def colours(pairs: PreferencePairs, index: int) -> list[tuple[int, ...]]:
    return [image.getpixel((0, 0)) for image in pairs[index].images]


RED, BLUE = (255, 0, 0), (0, 0, 255)


GOOD = {"prompt": "a sky", "chosen": "blue.png", "rejected": "red.png"}


PICK = {"caption": "a sky", "jpg_0": "red.png", "jpg_1": "blue.png"}
NAMED = {"input_key": "text", "chosen_key": "win", "rejected_key": "lose"}


@pytest.mark.parametrize(
    "row,settings,expected",
    [
        (GOOD, {}, [BLUE, RED]),
        ({"text": "a sky", "win": "blue.png", "lose": "red.png"}, NAMED, [BLUE, RED]),
        (PICK | {"label_0": 0.0}, {}, [BLUE, RED]),
        (PICK | {"label_0": "1"}, {}, [RED, BLUE]),
    ],
)
def test_chosen_comes_first_whatever_the_columns(tmp_path, row, settings, expected):
    pairs = read(written(tmp_path, row), **settings)
    assert len(pairs) == 1 and pairs[0].prompt == "a sky" and colours(pairs, 0) == expected


def test_bytes_of_a_parquet_file(tmp_path):
    encoded = []
    for colour in ("red", "blue"):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), colour).save(file, "PNG")
        encoded.append(file.getvalue())
    frame = pandas.DataFrame({"caption": ["a sky"], "jpg_0": encoded[:1], "jpg_1": encoded[1:], "label_0": [0.0]})
    frame.to_parquet(tmp_path / "pairs.parquet")
    assert colours(read(str(tmp_path / "pairs.parquet")), 0) == [BLUE, RED]


def test_arrays_of_pixels_that_a_program_gives():
    sides = {"chosen": "red", "rejected": "blue"}
    images = {name: np.array(Image.new("RGB", (8, 8), colour)) for name, colour in sides.items()}
    assert colours(read(give("pairs", [{"prompt": "a sky", **images}])), 0) == [RED, BLUE]


@pytest.mark.parametrize(
    "row,message",
    (
        (PICK | {"label_0": 0.5}, "neither image is preferred"),
        (PICK | {"label_0": "left"}, "no number"),
        ({"prompt": "x", "chosen": "blue.png"}, "no image in column 'rejected'"),
        ({"chosen": "blue.png", "rejected": "red.png"}, "no text in column 'prompt'"),
    ),
)
def test_rows_that_are_no_pair(tmp_path, row, message):
    path = written(tmp_path, GOOD, row)
    with pytest.raises(DataError, match=f"pairs.jsonl:2.*{message}"):
        read(path)
    kept = read(path, on_bad_row="skip", max_bad_share=0.9)
    assert len(kept) == 1 and len(kept.bad) == 1 and colours(kept, 0) == [BLUE, RED]
