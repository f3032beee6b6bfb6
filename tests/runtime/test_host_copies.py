"""What the host knows of tensors on a device; the device is `meta`, of which nothing can be read."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft_visual.experience.vision import VisionTensors, pixels_on_host
from lightrft_visual.models.vlm.vision_cache import first_occurrences
from lightrft_visual.runtime import host_copies, offload
from lightrft_visual.runtime.host_copies import known_on_host, on_host, to_device


def test_the_host_knows_what_it_moved_until_the_device_lets_it_go_and_nothing_else():
    ids = torch.arange(5)
    moved = to_device(ids, "meta")
    assert on_host(moved) is ids
    told = weakref.ref(ids)
    del ids
    assert told() is not None
    del moved
    assert told() is None
    assert known_on_host(torch.arange(3, device="meta")) is None
    with pytest.raises(NotImplementedError):
        on_host(torch.arange(3, device="meta"))


@pytest.mark.parametrize("of", [lambda moved: moved, lambda moved: moved.view_as(moved)], ids=["itself", "a view"])
def test_the_host_does_not_know_what_was_changed_on_the_device(of):
    moved = to_device(torch.arange(5), "meta")
    other = to_device(torch.arange(5), "meta")
    of(moved).add_(1)
    assert known_on_host(moved) is None and known_on_host(other) is not None
    with torch.inference_mode():
        assert known_on_host(to_device(torch.arange(5), "meta")).tolist() == [0, 1, 2, 3, 4]


def test_a_small_copy_to_the_device_does_not_wait_for_it():
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            asked.append((kwargs or {}).get("non_blocking", False))
            return operation(*args, **(kwargs or {}))

    asked: list[bool] = []
    with Copies():
        to_device(torch.arange(3), "meta")
    assert asked[-1] is True


@pytest.mark.parametrize("size,by_pinned", [(2**16, False), (2**16 + 1, True), (2**26 + 1, False)])
def test_pixels_go_to_the_device_by_page_locked_memory(monkeypatch, size, by_pinned):
    """From other memory CUDA lets the host wait for what is before the copy."""
    asked, pixels = [], torch.empty(size, dtype=torch.uint8)
    monkeypatch.setattr(host_copies, "pins", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor)
    assert on_host(to_device(pixels, "meta")) is pixels and to_device(pixels, "cpu") is pixels
    assert [each is pixels for each in asked] == [True] * by_pinned


def test_equal_media_of_a_joined_batch_are_found_without_its_device():
    one, other = torch.rand(4, 5), torch.rand(8, 5)
    grids = torch.tensor([[1, 2, 2]]), torch.tensor([[1, 2, 4]])
    of = VisionTensors.of
    both = of(pixel_values=torch.cat([other, one]), image_grid_thw=torch.cat([grids[1], grids[0]]))
    parts = [of(pixel_values=one, image_grid_thw=grids[0]), both, of(pixel_values=one.clone(), image_grid_thw=grids[0])]
    whole = VisionTensors.gather(parts).to("meta").joined()
    assert whole["pixel_values"].device.type == "meta"
    assert on_host(whole["image_grid_thw"]).tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 2, 2]]
    assert first_occurrences(pixels_on_host(whole["image_grid_thw"]), whole["image_grid_thw"]) == [0, 1, 0, 0]


@pytest.fixture
def locked(monkeypatch):
    """Bytes of each tensor that is made in page-locked memory; nothing is copied there."""
    asked, empty = [], torch.empty

    def made(*shape, pin_memory=False, **kind):
        asked.extend([empty(*shape, **kind).nbytes] * pin_memory)
        return empty(*shape, **kind)

    monkeypatch.setattr(host_copies, "pins", lambda: True)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pytest.fail)
    return asked


def test_copies_to_the_host_go_to_page_locked_memory_that_is_made_for_them(locked):
    """Contents of other memory are not copied there first."""
    there = torch.empty(3, dtype=torch.float64, device="meta")
    there.detach = lambda: torch.ones(3)  # of meta nothing can be copied
    assert host_copies.HostCopies().of(there).tolist() == [1, 1, 1] and locked == [24]


def test_what_waits_on_the_host_takes_page_locked_memory_of_powers_of_two_and_comes_back_whole(monkeypatch, locked):
    weights = torch.arange(1000, dtype=torch.float32)
    monkeypatch.setattr(offload, "SMALL_PIECE", 64)
    stay = offload.OptimizerOffload()
    for _ in range(2):  # the second time in the memory of the first
        stay.leave([weights[5:]])
        assert weights.untyped_storage().nbytes() == 0
        stay.come_back()
        assert torch.equal(weights, torch.arange(1000, dtype=torch.float32))
    assert locked == [2048, 1024, 512, 256, 128, 32]
