"""Small files of images and videos: strips, thumbnails, contact sheets."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.errors import DataError
from lightrft_visual.observe.images import (
    contact_sheet,
    data_uri,
    film_strip,
    fit,
    save_video,
    score_text,
    wrap,
    write_contact_sheet,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def test_a_strip_of_frames():
    frames = [Image.new("RGB", (6, 8), (index, 0, 0)) for index in range(5)]
    strip = film_strip(frames, 3, 16)
    assert strip.size == (3 * 12 + 4, 16) and [strip.getpixel((x, 0))[0] for x in (0, 14, 28)] == [0, 2, 4]
    with pytest.raises(DataError):
        film_strip([])


@pytest.mark.parametrize("size", [(1960, 28), (200, 1), (1, 200)])
def test_a_video_of_any_shape_is_stored_as_a_strip(size, tmp_path):
    frames = np.zeros((8, size[1], size[0], 3), np.uint8)
    with Image.open(tmp_path / save_video(tmp_path, frames)) as strip:
        assert strip.width <= 8 * 514 and strip.height <= 128


def test_fit_never_enlarges():
    assert fit(Image.new("RGB", (10, 5)), 20).size == (10, 5)
    assert fit(Image.new("RGB", (40, 1)), 20).size == (20, 1)


def test_data_uri_holds_the_image():
    uri = data_uri(Image.fromarray(PIXELS), 64)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))) as image:
        assert image.size == (6, 4)


def test_sheet_has_a_cell_for_each_picture():
    records = [{"prompt": f"a cat {index}", "reward": index / 5, "images": [PIXELS]} for index in range(5)]
    sheet = contact_sheet([*records, {"prompt": "no picture", "reward": 1.0}])
    assert sheet.width == 4 * 234 + 10
    # PIXELS is 6 wide: enlarged 37 times without blurring, in the first cell.
    assert sheet.getpixel((12, 12)) == tuple(PIXELS[0, 0])
    with pytest.raises(DataError):
        contact_sheet([{"prompt": "nothing"}])


def test_sheet_and_videos_on_disk(tmp_path):
    import imageio.v2 as imageio

    records = [
        {"prompt": "moving", "reward": 0.5, "videos": [torch.rand(3, 6, 33, 35)], "fps": 16.0},
        {"prompt": "bad", "reward": None, "valid": False, "videos": [torch.rand(3, 6, 32, 32)]},
    ]
    path = write_contact_sheet(tmp_path / "eval_epoch_000001", records)
    assert sorted(item.name for item in path.parent.iterdir()) == [
        "contact_sheet.png",
        "video_000.mp4",
        "video_001.mp4",
    ]
    with imageio.get_reader(path.parent / "video_000.mp4") as reader:
        assert reader.get_data(0).shape == (32, 34, 3) and reader.count_frames() == 6
        assert reader.get_meta_data()["fps"] == 16


def test_words_under_a_picture():
    from PIL import ImageFont

    assert score_text({"reward": 0.25, "components": {"ocr": 1.0}}) == "0.250  ocr 1"
    assert score_text({"reward": 0.25, "components": {"match": 0.25, "gold": 0.9}}) == "0.250  gold 0.9"
    two = {"reward": 0.5, "components": {"match": 0.25, "form": 0.25, "gold": 0.9}}
    assert score_text(two) == "0.500  gold 0.9  match 0.25  form 0.25"
    assert score_text({"reward": 0.25, "valid": False}) == "no valid reward"
    lines = wrap("word " * 100, ImageFont.load_default(12), 120, 2)
    assert len(lines) == 2 and lines[-1].endswith("…")
    assert wrap("", ImageFont.load_default(12), 120, 2) == [""]
