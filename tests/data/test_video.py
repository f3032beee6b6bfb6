"""Decoding of videos: sampling rules, frame lists, limits and damaged files."""

from __future__ import annotations

import av
import numpy as np
import pytest
from PIL import Image

from lightrft_visual.data.video import check_video, load_video
from lightrft_visual.errors import DataError


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Three seconds at 8 frames a second; frame i is grey 10 * i."""
    path = tmp_path_factory.mktemp("video") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        for level in range(24):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels(video):
    return [round(float(frame.mean()) / 10) for frame in video.frames]


def test_two_frames_a_second_are_taken_by_default(clip):
    video = load_video(clip)
    assert video.frames.shape == (6, 48, 64, 3) and video.frames.dtype == np.uint8
    assert video.metadata["frames_indices"] == [0, 5, 9, 14, 18, 23] == levels(video)
    assert (video.metadata["fps"], video.metadata["total_num_frames"], video.metadata["duration"]) == (8.0, 24, 3.0)
    assert video.metadata["do_sample_frames"] is False


@pytest.mark.parametrize(
    ("options", "count"), [({"fps": 4}, 12), ({"nframes": 4}, 4), ({"max_frames": 4}, 4), ({"fps": 100}, 24)]
)
def test_options_of_qwen_vl_utils_choose_the_frames(clip, options, count):
    assert len(load_video({"type": "video", "video": str(clip), **options}).frames) == count


def test_bytes_relative_paths_and_hugging_face_mappings_decode_alike(clip):
    wanted = load_video(clip).frames
    for source in (clip.read_bytes(), {"bytes": clip.read_bytes(), "path": None}, f"file://{clip}"):
        assert np.array_equal(load_video(source).frames, wanted)
    assert np.array_equal(load_video("clip.mp4", root=clip.parent).frames, wanted)


def test_frames_are_bounded_or_resized(clip):
    small = load_video({"video": str(clip), "max_pixels": 56 * 28})
    assert small.frames.shape[1] * small.frames.shape[2] <= 56 * 28
    assert load_video({"video": str(clip), "resized_height": 28, "resized_width": 56}).frames.shape[1:3] == (28, 56)


def test_lists_of_frames_and_arrays():
    frames = [Image.new("RGB", (32, 16), (level, 0, 0)) for level in (0, 50, 100)]
    video = load_video({"video": frames, "sample_fps": 4})
    assert video.frames.shape == (3, 16, 32, 3) and video.frames[:, 0, 0, 0].tolist() == [0, 50, 100]
    assert (video.metadata["fps"], video.metadata["frames_indices"]) == (4.0, [0, 1, 2])
    assert np.array_equal(load_video(video.frames).frames, video.frames)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "without frames"),
        ([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))], "differ in size"),
        (np.zeros((2, 8, 8), np.uint8), "expected a uint8 array"),
        ({"video": "x.mp4", "speed": 2}, "unknown video option.* speed"),
        ("nowhere.mp4", "nowhere.mp4"),
        (b"no video at all", "damaged, or no video"),
        ("http://example.com/a.mp4", "remote|allow"),
    ],
)
def test_unusable_videos_are_refused(source, message):
    with pytest.raises(DataError, match=message):
        load_video(source)


def test_truncated_and_oversized_files_are_refused(clip, tmp_path):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[:-400])
    with pytest.raises(DataError, match="cut.mp4"):
        load_video(cut)
    with pytest.raises(DataError, match="64x48 pixels are above"):
        load_video(clip, max_pixels=1000)


def test_playlists_are_refused_because_they_name_other_files(clip, tmp_path):
    listing = tmp_path / "list.ffconcat"
    listing.write_text(f"ffconcat version 1.0\nfile '{clip}'\n")
    playlist = tmp_path / "list.m3u8"
    playlist.write_text(f"#EXTM3U\n#EXTINF:3,\n{clip}\n#EXT-X-ENDLIST\n")
    for path in (listing, playlist):
        with pytest.raises(DataError):
            load_video(path)


def test_check_looks_at_files_without_decoding(clip, tmp_path):
    check_video(clip)
    check_video([str(clip)])
    check_video("http://example.com/a.mp4", allow_remote=True)
    for missing in (tmp_path / "none.mp4", [str(tmp_path / "none.png")], []):
        with pytest.raises(DataError):
            check_video(missing)
