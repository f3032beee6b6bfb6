"""Images and videos of every kind become the same pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.data.media import evenly_spaced, is_video, to_pil, to_rgb, to_uint8, video_frames
from lightrft_visual.data.video import load_video
from lightrft_visual.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "form",
    [
        Image.fromarray(PIXELS),
        PIXELS,
        np.moveaxis(PIXELS, -1, 0),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1).float() / 255,
    ],
)
def test_every_form_gives_the_same_pixels(form):
    assert np.array_equal(np.asarray(to_pil(form)), PIXELS)


def test_floats_are_clamped_and_rounded_and_alpha_is_white():
    values = torch.tensor([[[-1.0, 0.5, 2.0, float("nan")]]])
    assert np.asarray(to_rgb(values))[0, :, 0].tolist() == [0, 128, 255, 0]
    assert to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("wrong", [np.zeros((2, 2, 7)), np.zeros(3), np.zeros((2, 2), np.int64), 5, None])
def test_what_is_no_image_is_refused(wrong):
    with pytest.raises(DataError):
        to_pil(wrong)


def test_videos():
    video = torch.rand(3, 5, 8, 6)
    frames = video_frames(video)
    assert len(frames) == 5 and frames[0].size == (6, 8)
    assert np.array_equal(np.asarray(frames[2]), np.asarray(to_pil(video[:, 2])))
    assert len(video_frames((video.transpose(0, 1) * 255).to(torch.uint8))) == 5
    assert is_video(video) and is_video(frames) and not is_video(video[0]) and not is_video(frames[0])
    with pytest.raises(DataError):
        video_frames(torch.rand(3, 8, 6))


def test_a_few_of_many_are_evenly_spaced():
    assert evenly_spaced(range(10), 4) == [0, 3, 6, 9] and evenly_spaced(range(3), 9) == [0, 1, 2]
    assert evenly_spaced(range(5), 1) == [0]
    frames = video_frames(torch.arange(5).byte().view(5, 1, 1, 1), 3)
    assert [frame.getpixel((0, 0))[0] for frame in frames] == [0, 2, 4]


def test_bytes_have_a_storage_of_their_own():
    batch = torch.rand(8, 3, 4, 4)
    mine = to_uint8(batch[2])
    assert mine.untyped_storage().nbytes() == mine.numel() == 48 and mine.dtype == torch.uint8
    whole = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    assert to_uint8(whole[1]).untyped_storage().nbytes() == 48


def test_frames_of_a_decoded_video_are_its_own_not_its_two_parts():
    video = load_video({"video": [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (10, 20, 30)]})
    assert is_video(video)
    assert [frame.getpixel((0, 0))[0] for frame in video_frames(video)] == [10, 20, 30]
    assert [frame.getpixel((0, 0))[0] for frame in video_frames(video, 2)] == [10, 30]
