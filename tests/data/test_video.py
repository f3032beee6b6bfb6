"""Decoding of videos: sampling rules, frame lists, limits and damaged files."""

import struct

import av
import numpy as np
import pytest
import torch
from PIL import Image

import lightrft_visual.data.video as video_module
from lightrft_visual.data.video import check_video, load_video
from lightrft_visual.errors import DataError


def write(path, arrays):
    """A file of 8 frames a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        for array in arrays:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Three seconds at 8 frames a second; frame i is grey 10 * i."""
    return write(
        tmp_path_factory.mktemp("video") / "clip.mp4", [np.full((48, 64, 3), 10 * n, np.uint8) for n in range(24)]
    )


def levels(video):
    return [round(float(frame.mean()) / 10) for frame in video.frames]


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((1, 0, 0, 1), 0)])
def test_frames_are_upright_as_players_show_them(tmp_path, matrix, turns):
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32] = 255
    path = write(tmp_path / "turned.mp4", [picture] * 8)
    before, mark, rest = path.read_bytes().partition(b"tkhd")
    identity, (a, b, c, d) = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), (n << 16 for n in matrix)
    path.write_bytes(before + mark + rest.replace(identity, struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30), 1))
    frame, wanted = load_video(path).frames[0], np.rot90(picture, turns)
    assert frame.shape == wanted.shape and np.abs(frame.astype(int) - wanted).mean() < 3


def test_frames_that_an_edit_cuts_off_are_left_out(clip, tmp_path):
    with av.open(str(clip)) as container:
        second = container.streams.video[0].time_base.denominator
    before, mark, rest = clip.read_bytes().partition(b"elst")
    (tmp_path / "cut.mp4").write_bytes(before + mark + rest[:12] + struct.pack(">i", second) + rest[16:])
    video = load_video(tmp_path / "cut.mp4")
    assert video.metadata["total_num_frames"] == 16 and levels(video)[0] == 8 and levels(video)[-1] == 23


def test_two_frames_a_second_are_taken_by_default_of_every_source(clip):
    video = load_video(clip)
    assert video.frames.shape == (6, 48, 64, 3) and video.frames.dtype == np.uint8
    assert video.metadata["frames_indices"] == [0, 5, 9, 14, 18, 23] == levels(video)
    assert (video.metadata["fps"], video.metadata["total_num_frames"], video.metadata["duration"]) == (8.0, 24, 3.0)
    assert video.metadata["do_sample_frames"] is False
    for source in (clip.read_bytes(), {"bytes": clip.read_bytes(), "path": None}, f"file://{clip}"):
        assert np.array_equal(load_video(source).frames, video.frames)


def test_options_of_qwen_vl_utils_choose_bound_and_resize_the_frames(clip, monkeypatch):
    for options, count in (({"fps": 4}, 12), ({"nframes": 4}, 4), ({"max_frames": 4}, 4), ({"fps": 100}, 24)):
        assert len(load_video({"type": "video", "video": str(clip), **options}).frames) == count
    small = load_video({"video": str(clip), "max_pixels": 56 * 28})
    assert small.frames.shape[1] * small.frames.shape[2] <= 56 * 28
    assert load_video({"video": str(clip), "resized_height": 28, "resized_width": 56}).frames.shape[1:3] == (28, 56)
    monkeypatch.setattr(video_module, "MAX_VIDEO_PIXELS", 10 * 56 * 56)
    assert load_video([Image.new("RGB", (112, 112))] * 10).frames.shape == (10, 56, 56, 3)


def test_lists_of_frames_and_arrays():
    frames = [Image.new("RGB", (32, 16), (level, 0, 0)) for level in (0, 50, 100)]
    video = load_video({"video": frames, "sample_fps": 4})
    assert video.frames.shape == (3, 16, 32, 3) and video.frames[:, 0, 0, 0].tolist() == [0, 50, 100]
    assert (video.metadata["fps"], video.metadata["frames_indices"]) == (4.0, [0, 1, 2])
    assert np.array_equal(load_video(video.frames).frames, video.frames)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"nframes": 2}, [0, 6]),
        ({"max_frames": 4}, [0, 2, 4, 6]),
        ({"max_frames": 7}, [0, 1, 2, 3, 4, 5, 6]),
        ({"min_frames": 4}, [0, 1, 2, 3, 4, 5, 6]),
        ({"fps": 1, "min_frames": 2}, [0, 6]),
        ({"fps": 1, "sample_fps": 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"max_frames": 4, "sample_fps": 8}, [0, 2, 4, 6]),
    ],
)
def test_options_choose_frames_of_lists_and_arrays(options, kept):
    frames = [Image.new("RGB", (32, 16), (10 * level,) * 3) for level in range(7)]
    for source in (frames, np.stack([np.asarray(frame) for frame in frames])):
        video = load_video({"video": source, **options})
        assert levels(video) == kept == video.metadata["frames_indices"]
        assert (video.metadata["total_num_frames"], video.metadata["fps"]) == (7, options.get("sample_fps", 2.0))


@pytest.mark.parametrize(
    ("count", "options"), [(4, {"nframes": 8}), (1, {"fps": 1}), (1, {"nframes": 8}), (5, {"nframes": 5})]
)
def test_options_that_ask_for_no_fewer_frames_than_a_list_has_keep_all(count, options):
    source = {"video": [Image.new("RGB", (32, 16))] * count} | options
    check_video(source)
    assert len(load_video(source).frames) == count


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))], "differ in size"),
        (np.zeros((2, 8, 8), np.uint8), "expected a uint8 array"),
        ({"video": "x.mp4", "speed": 2}, "unknown video option.* speed"),
    ],
)
def test_unusable_videos_are_refused(source, message):
    with pytest.raises(DataError, match=message):
        load_video(source)


@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(4, 8, 8, 3).bfloat16(),
        torch.zeros(4, 8, 8, 3, requires_grad=True),
        torch.zeros(4, 8, 8, 3, dtype=torch.uint8).to_sparse(),
        torch.zeros(4, 8, 8, 3, dtype=torch.uint8, device="meta"),
        np.zeros((4, 3, 8, 8), np.uint8),
    ],
)
def test_arrays_that_are_no_frames_are_refused_by_the_check_too(array):
    for read in (load_video, check_video):
        with pytest.raises(DataError, match="expected a uint8 array"):
            read({"video": array})
    frames = torch.arange(4 * 8 * 8 * 3, dtype=torch.uint8).reshape(4, 8, 8, 3)
    check_video(frames)
    assert np.array_equal(load_video(frames).frames, frames.numpy())


def test_truncated_and_oversized_files_are_refused(clip, tmp_path):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[:-400])
    with pytest.raises(DataError, match="cut.mp4"):
        load_video(cut)
    with pytest.raises(DataError, match="it has 1 frames; two are the fewest"):
        load_video(write(tmp_path / "one.mp4", [np.zeros((48, 64, 3), np.uint8)]))
    with pytest.raises(DataError, match="64x48 pixels are above"):
        load_video(clip, max_pixels=1000)


def test_packets_that_show_nothing_are_no_frames_where_the_header_counts_none(tmp_path):
    """Without its first key frame a stream shows nothing up to the second one."""
    for name in ("cut.mkv", "cut.mp4"):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("libx264", rate=8, options={"g": "6", "bf": "0", "sc_threshold": "0"})
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            grey = [av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * n, np.uint8)) for n in range(24)]
            packets = [packet for frame in [*grey, None] for packet in stream.encode(frame)]
            container.mux(packets[1:])
    video = load_video(tmp_path / "cut.mkv")
    assert (video.metadata["total_num_frames"], levels(video)[0], levels(video)[-1]) == (18, 6, 23)
    assert video.metadata["frames_indices"][-1] == 17 and len(video.frames) == 4
    with pytest.raises(DataError, match="it ends before frame 22, which its header promises"):
        load_video(tmp_path / "cut.mp4")


def test_a_stream_without_a_container_is_refused_by_its_format(tmp_path):
    path = tmp_path / "raw.h264"
    with av.open(str(path), "w", format="h264") as raw:
        stream = raw.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for packet in [*stream.encode(av.VideoFrame(64, 48, "yuv420p")), *stream.encode()]:
            raw.mux(packet)
    with pytest.raises(DataError, match="container format h264 is not supported"):
        load_video(path)


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
    Image.new("RGB", (8, 8)).save(tmp_path / "frame.png")
    check_video([str(tmp_path / "frame.png")] * 2)
    for missing in (tmp_path / "none.mp4", [str(tmp_path / "none.png")], [], [str(clip)]):
        with pytest.raises(DataError):
            check_video(missing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nframes": 10**400}, "nframes is 1000"),
        ({"nframes": 2.5}, "nframes is 2.5; it must be a whole number"),
        ({"resized_height": 8192, "resized_width": 8192}, "more than 100352000 pixels together"),
        ({"resized_height": 56}, "need each other"),
        ({"fps": 1, "nframes": 4}, "exclude each other"),
    ],
)
def test_options_are_bounded_before_a_frame_is_decoded(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(video_module, "load_image", None)
    Image.new("RGB", (8, 8)).save(tmp_path / "frame.png")
    for check in (check_video, load_video):
        with pytest.raises(DataError, match=message):
            check({"video": [str(tmp_path / "frame.png")] * 4, **options})


def test_lists_of_frames_are_bounded_by_their_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(video_module, "load_image", None)
    Image.new("RGB", (8, 8)).save(tmp_path / "frame.png")
    Image.new("1", (7000, 7000)).save(tmp_path / "large.png")
    for frames, message in (
        ([str(tmp_path / "frame.png")] * 769, "769 frames are above the limit of 768"),
        ([str(tmp_path / "large.png")] * 100, "100 frames of 7000x7000 pixels are too many"),
        ([str(tmp_path / "frame.png"), str(tmp_path / "large.png")], "differ in size"),
    ):
        for check in (check_video, load_video):
            with pytest.raises(DataError, match=message):
                check(frames)
