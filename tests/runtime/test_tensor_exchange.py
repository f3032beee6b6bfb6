"""Objects travel as parcels: equal on arrival, what is shared stays shared, and tensors are not pickled."""

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from PIL import Image

from lightrft_visual.experience.fields import values_equal
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.tensor_exchange import pack, unpack

TENSORS = [
    torch.tensor(3.5, dtype=torch.bfloat16), torch.tensor([True, False, True]), torch.empty(0, 3), torch.arange(5),
    torch.randn(3, 4).t(), torch.arange(20)[3:9], torch.tensor([float("nan")], dtype=torch.float64),
]  # fmt: skip


def test_tensors_of_every_kind_arrive_as_they_were_with_memory_of_their_own():
    assert len(pack(torch.zeros(100_000)[:10])) < 1000  # a view takes along its own numbers only
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


def parcel(sender: int, receiver: int) -> dict | None:
    """Of another size for each pair; rank 1 sends nothing to rank 2."""
    if (sender, receiver) == (1, 2):
        return None
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return {"from": sender, "numbers": torch.randn(200 * (sender + 1) + receiver, generator=generator)}


def exchanged() -> bool:
    """Each of three ranks sends every other one objects of its own, more than go in one round."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    collectives.STAGED_BYTES = 999
    sent = [parcel(rank, other) for other in range(3)]
    received = collectives.exchange_objects(sent)
    assert received[rank] is sent[rank]
    for sender, arrived in enumerate(received):
        wanted = parcel(sender, rank)
        assert (arrived is None) == (wanted is None)
        if wanted is not None:
            assert arrived["from"] == sender and torch.equal(arrived["numbers"], wanted["numbers"])
    return True


@pytest.mark.slow
def test_ranks_exchange_in_rounds_and_keep_what_is_their_own():
    assert on_ranks(exchanged, ranks=3) == [True] * 3
