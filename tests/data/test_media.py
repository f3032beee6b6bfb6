"""Safe decoding of images: sources, colour modes, and everything that must be refused."""

import base64
import io
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from PIL.PngImagePlugin import PngInfo

from lightrft_visual.data.media import (
    describe_source,
    evenly_spaced,
    image_size,
    is_remote,
    is_video,
    load_image,
    looks_like_media,
    media_to_video_array,
    resolve_source,
    to_pil,
    to_rgb,
    to_uint8,
    video_frames,
)
from lightrft_visual.data.video import load_video
from lightrft_visual.errors import DataError
from lightrft_visual.rewards.imaging import is_finite


def encode(image, format="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.fixture
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def same(left, right):
    return left.mode == right.mode == "RGB" and np.array_equal(np.asarray(left), np.asarray(right))


def test_every_kind_of_source_gives_the_same_pixels(picture, tmp_path):
    data, pixels = encode(picture), np.asarray(picture)
    (tmp_path / "a b.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    sources = [
        picture, pixels, data, bytearray(data), memoryview(data), text,
        f"data:image/png;base64,{text}", tmp_path / "a b.png",
        str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri(), {"bytes": data, "path": None},
        {"bytes": None, "path": str(tmp_path / "a b.png")}, {"url": f"data:image/png;base64,{text}"},
        {"image": pixels}, {"bytes": pixels, "path": None},
        f"\n  {base64.encodebytes(data).decode()}", f"data:image/png;base64,\r\n{base64.encodebytes(data).decode()}",
    ]  # fmt: skip
    for source in sources:
        assert same(load_image(source), picture), describe_source(source)
        assert image_size(source) == (20, 12)
    loaded = load_image(picture)
    assert load_image(loaded) is loaded  # not held twice
    assert not looks_like_media("cell", {"bytes": pixels, "path": None}, "image")
    for mapping in ({"image": pixels}, {"bytes": pixels, "path": "a.png"}):
        assert resolve_source(mapping, tmp_path) == mapping and not is_remote(mapping)
    channels_first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    for form in (picture, pixels, channels_first.numpy(), channels_first, channels_first / 255):
        assert np.array_equal(np.asarray(to_pil(form)), pixels)


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_pil_image_that_several_threads_load_at_once_is_read_once(format):
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    content = encode(Image.fromarray(noise), format)
    wanted = Image.open(io.BytesIO(content))
    wanted.load()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            shared = Image.open(io.BytesIO(content))
            assert all(same(image, wanted) for image in threads.map(load_image, [shared] * 8))


def test_the_size_in_the_header_is_that_of_the_pixels_in_every_format(picture):
    exif, xmp = Image.Exif(), PngInfo()
    exif[0x0112] = 6
    xmp.add_itxt("XML:com.adobe.xmp", XMP)
    turned = [encode(picture, format, exif=exif) for format in ("PNG", "JPEG", "WEBP", "TIFF")]
    for data in (*turned, encode(picture, pnginfo=xmp), encode(picture, "JPEG", xmp=XMP.encode())):
        assert image_size(data) == load_image(data).size == (12, 20)
    assert same(load_image(turned[0]), picture.transpose(Image.Transpose.ROTATE_270))
    assert image_size(encode(picture, "TIFF")) == (20, 12)


def test_colour_modes_become_rgb_over_white_and_sixteen_bit_greys_are_scaled_not_clipped(picture):
    assert load_image(encode(picture.convert("CMYK"), "JPEG")).mode == "RGB"
    assert same(load_image(encode(picture.convert("P"))), picture.convert("P").convert("RGB"))
    assert np.asarray(load_image(encode(Image.new("1", (2, 2), 1)))).min() == 255
    image = Image.new("RGBA", (3, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (200, 0, 0, 0))
    assert np.asarray(load_image(encode(image)))[0].tolist() == [[200, 0, 0], [255, 255, 255], [200, 0, 0]]
    for values, kind, wanted in (
        ([0, 257, 32768, 65535], np.uint16, [0, 1, 128, 255]), ([9, 99], np.uint16, [0, 0]),
        ([0, 65535], np.int32, [0, 255]), ([0, 0], np.int32, [0, 0]),
    ):  # fmt: skip
        grey = Image.fromarray(np.array([values], dtype=kind))
        assert np.asarray(load_image(encode(grey) if kind is np.uint16 else grey))[0, :, 0].tolist() == wanted
    for most in (1, 255):
        grey = Image.fromarray(np.array([[0, most]], dtype=np.int32))
        for source in (grey, encode(grey, "TIFF")):
            with pytest.raises(DataError, match=f"levels up to {most}, which may be of 8 or of 16 bits"):
                load_image(source)


def test_size_is_checked_before_decoding():
    # The second has a sound header and no pixel data: a decoder would fail on it first.
    for content in (encode(Image.new("L", (300, 200))), png_header(300, 200)):
        with pytest.raises(
            DataError, match="300x200 pixels, above the limit of 1000: .* in vision-language runs raise max_"
        ):
            image_size(content, max_pixels=1000)
        with pytest.raises(DataError, match="300x200 pixels"):
            load_image(content, max_pixels=1000)
    with pytest.raises(DataError, match="bytes> is too large for Pillow, whatever the settings are"):
        load_image(png_header(60_000, 60_000))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_whose_exif_cannot_be_read_is_read_as_it_lies(format):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), "red").save(buffer, format, exif=b"Exif\0\0no tiff")
    assert image_size(buffer.getvalue()) == load_image(buffer.getvalue()).size == (40, 20)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_image_of_several_frames_is_refused_with_what_works_in_its_place(format):
    frames = [Image.effect_noise((64, 56), level).convert("RGB") for level in (20, 60, 90)]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], duration=100)
    with pytest.raises(DataError) as refused:
        load_image(data)
    assert ("give it as a video" in str(refused.value)) == (format == "GIF")
    assert len(load_video(data if format == "GIF" else frames).frames) >= 2
    assert format == "GIF" or "give its frames as a list in videos" in str(refused.value)


def png_header(width, height):
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    buffer = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    buffer.seek(8)
    PngImagePlugin.putchunk(buffer, b"IHDR", header)
    PngImagePlugin.putchunk(buffer, b"IDAT", b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encode(Image.new("F", (4, 4)), "TIFF"), "floating-point"),
        (png_header(0, 5), "empty|damaged|known format"),
        ({"image": torch.zeros(3, 4, 4)}, "a Tensor is no path"),
        ({"other": 1}, "no bytes, path, url or image"),
        ("a\0b.png", "file not found"),
        ("s3://bucket/a.png?key=1", "^s3://bucket/a.png: of URLs only http.s. and file are read"),
    ],
)
def test_unusable_sources_are_data_errors(content, message):
    with pytest.raises(DataError, match=message):
        load_image(content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_damaged_files_give_an_image_or_a_data_error(format):
    rng = random.Random(0)
    data = encode(Image.effect_noise((40, 30), 60).convert("RGB"), format)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(min(len(data), rng.choice([40, len(data)])))] = rng.randrange(256)
        damaged = bytes(damaged[: rng.choice([len(data), rng.randrange(1, len(data))])])
        for read in (image_size, load_image):
            try:
                read(damaged, max_pixels=10**5)
            except DataError as error:
                assert "bytes>" in str(error) or "empty" in str(error)


def test_messages_hold_neither_content_nor_query_strings(picture):
    text = base64.b64encode(encode(picture)).decode()
    assert describe_source(text) == f"<base64 of {len(text)} characters>"
    assert describe_source("https://host/a.png?token=secret") == "https://host/a.png"
    assert describe_source(b"12345") == "<5 bytes>"
    assert describe_source({"path": "a.png", "bytes": None}) == "a.png"


def test_only_relative_paths_are_joined_to_the_root(picture):
    text = base64.b64encode(encode(picture)).decode()
    assert resolve_source("a.png", "/data") == "/data/a.png"
    for key in ("path", "image", "url"):
        assert resolve_source({key: "a.png", "bytes": None}, "/data")[key] == "/data/a.png"
        for source in ("https://h/a.png", "data:,", "file:///a.png", "/abs/a.png"):
            assert resolve_source({key: source}, "/data") == {key: source}
    for source in ("/abs/a.png", "https://h/a.png", "data:,", text, b"1", picture, {"bytes": b"1", "path": "a"}):
        assert resolve_source(source, "/data") == source


def test_media_to_video_array_clamps_and_rounds_and_refuses_anything_else():
    image = torch.tensor([-1.0, 0.0, 0.5, 0.999, 1.0, 7.0]).reshape(1, 2, 3)
    assert media_to_video_array(image).tolist() == [[[[0, 0, 128], [255, 255, 255]]]]
    video = torch.rand(3, 5, 4, 2)
    array = media_to_video_array(video)
    assert array.shape == (5, 3, 4, 2) and array.dtype == np.uint8
    assert np.array_equal(array[2], (video[:, 2] * 255).round().numpy().astype(np.uint8))
    assert media_to_video_array(video.bfloat16()).dtype == np.uint8
    whole, unknown = torch.ones(3, 4, 4, dtype=torch.uint8), torch.full((3, 2, 2), float("nan"))
    for media in (torch.rand(4, 4), torch.rand(1, 3, 2, 4, 4), whole, "x", unknown):
        with pytest.raises(ValueError):
            media_to_video_array(media)


def test_verls_mapping_is_a_source(tmp_path):
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    assert resolve_source({"image": "a.png"}, tmp_path) == {"image": str(tmp_path / "a.png")}
    for source in ({"image": str(tmp_path / "a.png")}, {"image": (tmp_path / "a.png").read_bytes()}):
        assert load_image(source).size == (5, 4)
    with pytest.raises(DataError, match="its own max_pixels; sizes are set by --max_pixels"):
        load_image({"image": str(tmp_path / "a.png"), "max_pixels": 784})


def test_pixels_of_floats_are_clamped_alpha_is_white_bytes_are_their_own_and_other_arrays_refused():
    values = torch.tensor([[[-1.0, 0.5, 2.0, float("nan")]]])
    assert np.asarray(to_rgb(values))[0, :, 0].tolist() == [0, 128, 255, 0]
    assert to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    for batch in (torch.rand(8, 3, 4, 4), torch.zeros(8, 3, 4, 4, dtype=torch.uint8)):
        mine = to_uint8(batch[2])
        assert mine.untyped_storage().nbytes() == mine.numel() == 48 and mine.dtype == torch.uint8
    for wrong in (np.zeros((2, 2, 7)), np.zeros((2, 2), np.int64), None):
        with pytest.raises(DataError):
            to_pil(wrong)


def test_frames_of_videos_and_a_few_of_many_evenly_spaced():
    video = torch.rand(3, 5, 8, 6)
    frames = video_frames(video)
    assert len(frames) == 5 and frames[0].size == (6, 8)
    assert np.array_equal(np.asarray(frames[2]), np.asarray(to_pil(video[:, 2])))
    assert len(video_frames((video.transpose(0, 1) * 255).to(torch.uint8))) == 5
    assert is_video(video) and is_video(frames) and not is_video(video[0]) and not is_video(frames[0])
    with pytest.raises(DataError):
        video_frames(torch.rand(3, 8, 6))
    assert evenly_spaced(range(10), 4) == [0, 3, 6, 9] and evenly_spaced(range(3), 9) == [0, 1, 2]
    assert evenly_spaced(range(5), 1) == [0]
    decoded = load_video({"video": [Image.new("RGB", (8, 8), (level, 0, 0)) for level in range(5)]})
    assert is_video(decoded)  # of two parts, frames and metadata
    assert [frame.getpixel((0, 0))[0] for frame in video_frames(decoded, 3)] == [0, 2, 4]


def test_to_pil_of_channels_first_is_that_of_channels_last_and_leaves_what_it_was_given():
    floats = torch.randn(3, 5, 7)
    floats[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    given = floats.clone()
    levels = floats.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    turned = levels.numpy()[:, ::-1]
    turned.flags.writeable = False
    assert np.array_equal(np.asarray(to_pil(floats)), levels.permute(1, 2, 0))
    assert torch.allclose(floats, given, rtol=0, atol=0, equal_nan=True)
    assert np.array_equal(np.asarray(to_pil(turned)), np.moveaxis(turned, 0, -1))
    assert np.array_equal(np.asarray(to_pil(levels[:1])), levels[0]) and to_pil(levels[:1]).mode == "L"
    expanded = floats[:1].expand(3, 5, 7)
    assert np.array_equal(np.asarray(to_pil(expanded)), levels[:1].expand(3, 5, 7).permute(1, 2, 0))


def test_media_are_finite_unless_a_value_is_not_whatever_their_sum():
    largest = torch.full((3, 4, 4), torch.finfo(torch.float32).max)
    assert is_finite(largest) and is_finite(torch.zeros(3, 0, 4)) and is_finite(torch.ones(2, 2, dtype=torch.uint8))
    assert not is_finite(torch.tensor([torch.inf, -torch.inf])) and not is_finite(torch.tensor([1.0, torch.nan]))
