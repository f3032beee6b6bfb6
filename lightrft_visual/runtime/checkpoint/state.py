"""Plain state in one safetensors file: tensors as tensors, everything around them as JSON. Nothing in it can run code.

Counters, random states, the order of the data, running moments, replay items. Types come back as they were: tuples stay
tuples, integer keys stay integers, NumPy arrays stay arrays, floats keep every bit.
"""

import base64
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...errors import CheckpointError
from ..files import write_atomic
from .behind import write_file

TREE = "lightrft_visual.state"  # the tensor with the JSON, which a header of at most 100 MB may be too small for
TAG = "__type__"
IMAGE_MODES = ("1", "L", "RGB", "RGBA", "I", "F", "I;16")


class Encoder:
    """Turns nested state into a JSON tree, collecting its tensors on the way."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """The JSON form of a value, tensors put aside by key. CheckpointError, with the path, for other types."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "key": self._keep(value)}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {TAG: "tuple", "items": items}
        return self._encode_special(value, path)

    def _encode_mapping(self, value: Mapping, path: str) -> dict[str, Any]:
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path} key"), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        return {TAG: "dict", "pairs": pairs}

    def _encode_special(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            whole = np.ascontiguousarray(value)
            raw = torch.from_numpy(np.frombuffer(whole.tobytes(), dtype=np.uint8).copy())
            return {TAG: "array", "key": self._keep(raw), "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            data = base64.b64encode(value.tobytes()).decode()
            return {TAG: "number", "dtype": value.dtype.str, "data": data}
        if isinstance(value, torch.dtype):
            return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, bytes):
            return {TAG: "bytes", "data": base64.b64encode(value).decode()}
        if isinstance(value, Image.Image) and value.mode in IMAGE_MODES:
            raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            return {TAG: "image", "key": self._keep(raw), "mode": value.mode, "size": list(value.size)}
        raise CheckpointError(f"{path}: a {type(value).__name__} cannot be saved as plain state")

    def _keep(self, tensor: torch.Tensor) -> str:
        key = str(len(self.tensors))
        self.tensors[key] = tensor.detach()
        return key


def decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `Encoder.encode`. CheckpointError on a type that this version does not know."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        return {key: decode(item, tensors) for key, item in node.items()}
    kind = node[TAG]
    if kind == "tensor":
        return tensors[node["key"]]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in node["items"])
    if kind == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in node["pairs"]}
    if kind == "array":
        data = tensors[node["key"]].numpy().tobytes()
        return np.frombuffer(data, dtype=np.dtype(node["dtype"])).reshape(node["shape"]).copy()
    if kind == "number":
        return np.frombuffer(base64.b64decode(node["data"]), dtype=np.dtype(node["dtype"]))[0]
    if kind == "dtype":
        found = getattr(torch, node["name"], None)
        if not isinstance(found, torch.dtype):  # nothing else of torch
            raise CheckpointError(f"state with the unknown dtype {node['name']!r}: written by a newer version?")
        return found
    if kind == "bytes":
        return base64.b64decode(node["data"])
    if kind == "image":
        return Image.frombytes(node["mode"], tuple(node["size"]), tensors[node["key"]].numpy().tobytes())
    raise CheckpointError(f"state of unknown type {kind!r}: written by a newer version?")


def save_state(path: str | Path, state: Any) -> None:
    """Write nested dicts, lists, tuples of tensors, arrays, dtypes, numbers, text, bytes, images; whole or not at all.

    CheckpointError names the place of anything else (a function, an object of a class): state must be plain.
    """
    path, encoder = Path(path), Encoder()
    tree = encoder.encode(state, "state")
    write_file(path, encoder.tensors, partial(_write_state, path, tree))


def _write_state(path: Path, tree: Any, tensors: dict[str, torch.Tensor]) -> None:
    apart = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    text = json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
    write_atomic(path, save({**apart, TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}))


def load_state(path: str | Path) -> Any:
    """What `save_state` wrote, tensors on the CPU. CheckpointError names a file that is missing, damaged or foreign."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if TREE not in tensors:
        raise CheckpointError(f"{path} holds no state of this package")
    try:
        return decode(json.loads(tensors[TREE].numpy().tobytes()), tensors)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
