"""Objects travel as parcels: equal on arrival, what is shared stays shared, and tensors are not pickled."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from launched import run_ranks
from PIL import Image

from lightrft_visual.experience.fields import values_equal
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.runtime.tensor_exchange import pack, unpack

TENSORS = [
    torch.tensor(3.5, dtype=torch.bfloat16), torch.tensor([True, False, True]), torch.empty(0, 3), torch.arange(5),
    torch.randn(3, 4).t(), torch.arange(20)[3:9], torch.tensor([float("nan")], dtype=torch.float64),
]  # fmt: skip


def test_tensors_of_every_kind_arrive_as_they_were_with_memory_of_their_own():
    arrived = unpack(pack({"tensors": TENSORS, "words": ("a", None, 3)}))
    assert arrived["words"] == ("a", None, 3) and values_equal(arrived["tensors"], TENSORS)
    for tensor, sent in zip(arrived["tensors"], TENSORS):
        assert tensor.untyped_storage().nbytes() == sent.nbytes  # a view would keep the whole parcel alive


def test_images_arrive_as_they_were():
    pixels = Image.effect_noise((7, 5), 80)
    kinds = [pixels, pixels.convert("RGB"), pixels.convert("RGBA"), pixels.convert("P"), pixels.convert("1")]
    tagged = pixels.copy()
    tagged.info["dpi"] = (72, 72)
    arrived = unpack(pack([*kinds, tagged]))
    assert [image.mode for image in arrived] == ["L", "RGB", "RGBA", "P", "1", "L"]
    assert all(image.tobytes() == sent.tobytes() for image, sent in zip(arrived, kinds))
    assert arrived[-1].info == {"dpi": (72, 72)}


def test_what_samples_share_is_there_once_and_shared_afterwards():
    patches, image = torch.randn(1000, 50), Image.new("RGB", (100, 100))
    one = {"pixel_values": patches}
    samples = [(VisionTensors([one]), image, index) for index in range(16)]
    parcel = pack(samples)
    assert len(parcel) < 1.1 * (patches.nbytes + 30000)
    arrived = unpack(parcel)
    assert [number for _, _, number in arrived] == list(range(16))
    assert len({id(image) for _, image, _ in arrived}) == 1
    assert len({id(vision.samples[0]["pixel_values"]) for vision, _, _ in arrived}) == 1
    assert VisionTensors.gather([vision for vision, _, _ in arrived]).nbytes() == patches.nbytes


def test_a_view_takes_along_its_own_numbers_only():
    assert len(pack(torch.zeros(100_000)[:10])) < 1000


def test_ranks_exchange_in_rounds_and_keep_what_is_their_own(tmp_path):
    run_ranks("exchange_ranks.py", str(tmp_path), ranks=3, folder=Path(__file__).parent)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)] == ["well"] * 3
