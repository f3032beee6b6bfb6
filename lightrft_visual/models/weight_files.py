"""What the weight files of a model's folder hold, from their headers alone."""

import json
import threading
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_NAME

from ..errors import ConfigError

# Transformers allocates whatever config.json asks for before it compares shapes: above this it could fill the host.
MORE_ELEMENTS, MOST_LAYERS = 50_000_000, 1000
LOADING = threading.RLock()  # meanwhile libraries change how modules are made, for all of the process
HEAD = "lm_head.weight"  # of models of which only hidden states are read
DEPTHS = {"num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"}


def weight_files(folder: Path, name: str = SAFE_WEIGHTS_NAME) -> dict[str, Path]:
    """The safetensors file of each weight of a model's folder; {} where the weights are in another format.

    name: of the file where there is one; `name.index.json` lists several.
    """
    listed = folder / f"{name}.index.json"
    if listed.is_file():
        return {weight: folder / file for weight, file in json.loads(listed.read_text())["weight_map"].items()}
    single = folder / name
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def load_whole(kind: Any, path: str, unread: Collection[str] = (), **arguments: Any) -> Any:
    """`kind.from_pretrained`, of weights that are all in files: transformers would draw others at random, and go on.

    Args:
        kind: a class of transformers that loads a model.
        path: a folder or hub name.
        unread: names of weights that nobody reads.
        **arguments: further ones of `from_pretrained`.

    Raises:
        ConfigError: weights are missing; what `from_pretrained` raises.
    """
    with LOADING:
        model, report = kind.from_pretrained(path, output_loading_info=True, **arguments)
    own = dict(model.named_parameters())
    missing = sorted(name for name in report["missing_keys"] if name in own and name not in unread)
    if missing:
        where = "/".join(filter(None, (str(path), arguments.get("subfolder"))))
        raise ConfigError(f"model {where} lacks {len(missing)} weight(s): {', '.join(missing[:3])}")
    return model


def check_size(folder: Path, config: Any, auto: Any) -> None:
    """Refuse a config.json that describes a far larger model than the weights beside it hold. ConfigError.

    A model within twice their size is left to the loader, which names each weight that does not fit; so are folders
    without safetensors files, quantized weights, where several share an element, and code of the folder's own. Not
    inside a load under ZeRO-3, where transformers would divide what is built here.

    Args:
        folder: where config.json and the weights lie.
        config: the configuration of transformers that was read there.
        auto: the class of transformers that builds the model, such as AutoModelForCausalLM.
    """
    files = weight_files(folder)
    if not files or getattr(config, "quantization_config", None) or getattr(config, "auto_map", None):
        return
    if deepest := max(
        (depth for depth in _depths(config.to_dict()) if depth > max(MOST_LAYERS, len(files))), default=0
    ):
        raise ConfigError(
            f"model {folder}: config.json describes {deepest} layers, the files hold {len(files)} weights"
        )
    held = sum(map(_elements, set(files.values())))
    with torch.device("meta"):
        wanted = sum(weight.numel() for weight in auto.from_config(config).parameters())
    if wanted > 2 * held + MORE_ELEMENTS:
        raise ConfigError(f"model {folder}: config.json describes {wanted:,} parameters, the files hold {held:,}")


def _depths(settings: Mapping[str, Any]) -> Iterator[int]:
    """Numbers of layers that a configuration or one inside it names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _depths(value)
        elif name in DEPTHS and isinstance(value, int):
            yield value


def _elements(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no mapping
