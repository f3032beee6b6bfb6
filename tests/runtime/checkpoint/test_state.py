"""Plain state round-trips exactly, and nothing in a file, of ours or DeepSpeed's, can run. That steps go on bit for bit
after a load is in test_precision.py."""

import math
import pickle
import random
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.state import load_state, save_state
from lightrft_visual.runtime.safe_loading import SafeCheckpointEngine
from lightrft_visual.runtime.usercode.surroundings import rng_state, set_rng_state

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


def same(left, right) -> bool:
    """Equal in value and in type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_nested_plain_state_round_trips(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    save_state(path, tree)
    assert same(load_state(path), tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_every_type_and_shape(tmp_path, dtype):
    whole = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    state = {"whole": whole, "view": whole.transpose(0, 2), "empty": whole[:0], "one": whole[0, 0, 1], "again": whole}
    save_state(tmp_path / "s", state)
    loaded = load_state(tmp_path / "s")
    for name, tensor in state.items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], tensor) and loaded[name].shape == tensor.shape
    loaded["whole"].zero_()
    assert torch.equal(loaded["again"], whole)


def test_arrays_numbers_images_and_special_floats(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8))
    state = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float32(0.1),
        "image": image,
        "mask": image.convert("1"),
        "dtypes": [torch.int64, torch.bfloat16],
        "floats": [math.inf, -math.inf, -0.0, 5e-324],
        "__type__": "a key of the user's",
    }
    save_state(tmp_path / "s", state)
    loaded = load_state(tmp_path / "s")
    assert np.array_equal(loaded["array"], state["array"]) and loaded["array"].dtype == np.uint32
    assert type(loaded["scalar"]) is np.float32 and loaded["scalar"] == state["scalar"]
    assert loaded["image"].mode == "RGB" and loaded["image"].tobytes() == image.tobytes()
    assert loaded["mask"].tobytes() == state["mask"].tobytes()
    assert loaded["dtypes"] == [torch.int64, torch.bfloat16]
    assert loaded["floats"] == state["floats"] and math.copysign(1, loaded["floats"][2]) == -1
    assert loaded["__type__"] == state["__type__"]


def test_random_states_continue_exactly(tmp_path):
    def draw():
        return random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), random.gauss(0, 1)

    draw()
    save_state(tmp_path / "rng", rng_state())
    expected = draw()
    draw()
    set_rng_state(load_state(tmp_path / "rng"))
    assert draw() == expected


def test_text_of_any_size_leaves_the_header_small_and_comes_back_with_lone_surrogates(tmp_path):
    """safetensors refuses headers above 100 MB."""
    state = {"answers": ["字" * 10_000, "\ud83d", "\0"], "tensor": torch.arange(3)}
    save_state(tmp_path / "s", state)
    content = (tmp_path / "s").read_bytes()
    assert int.from_bytes(content[:8], "little") < 500 and len(content) < 31_000
    loaded = load_state(tmp_path / "s")
    assert loaded["answers"] == state["answers"] and torch.equal(loaded["tensor"], state["tensor"])


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, np.array(["text"]), Path("x"), 1j])
def test_what_is_not_plain_is_refused_with_its_place(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"state\.replay\[1\]\.thing"):
        save_state(tmp_path / "s", {"replay": [0, {"thing": value}]})
    assert not (tmp_path / "s").exists()


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_pickle_payloads_in_files_of_ours_or_deepspeeds_do_not_run(tmp_path):
    mark = tmp_path / "ran"
    torch.save({"weights": torch.zeros(2), "bad": Payload(mark)}, tmp_path / "zip.pt")
    torch.save(Payload(mark), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Payload(mark)))
    for name in ("zip.pt", "old.pt", "plain.pkl"):
        with pytest.raises(CheckpointError, match=name):
            load_state(tmp_path / name)
    with pytest.raises(CheckpointError, match="zip.pt is refused"):
        SafeCheckpointEngine().load(str(tmp_path / "zip.pt"))
    assert not mark.exists()
    pickle.loads((tmp_path / "plain.pkl").read_bytes())
    assert mark.exists()
    (tmp_path / "cut.pt").write_bytes((tmp_path / "zip.pt").read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"cut\.pt"):
        SafeCheckpointEngine().load(str(tmp_path / "cut.pt"))


@pytest.mark.parametrize(
    "change",
    [lambda whole: b"", lambda whole: b"\0" * 100, lambda whole: b"\xff" * 100]
    + [lambda whole, cut=cut: whole[:-cut] for cut in (1, 8, 100)],
)
def test_files_that_are_damaged_missing_or_of_someone_else_are_named(tmp_path, change):
    save_state(tmp_path / "broken", {"a": torch.arange(100)})
    (tmp_path / "broken").write_bytes(change((tmp_path / "broken").read_bytes()))
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    for told in ("broken is damaged", "foreign holds no state of this package", "absent is missing"):
        with pytest.raises(CheckpointError, match=told):
            load_state(tmp_path / told.split()[0])


def test_enums_load_whatever_pythons_way_of_pickling_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))
    state = {"zero_stage": ZeroStageEnum.gradients, "weights": torch.arange(3.0)}
    engine, path = SafeCheckpointEngine(), str(tmp_path / "optim_states.pt")
    engine.save(state, path)
    found = engine.load(path)
    assert found["zero_stage"] is ZeroStageEnum.gradients
    assert torch.equal(found["weights"], state["weights"])
