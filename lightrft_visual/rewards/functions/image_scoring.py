"""Shared by the image scorers: many frames a sample in, one score a sample out; checkpoints with clear errors."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

from ...errors import ConfigError, refused_as


def mean_over_frames(
    frames: Sequence[Sequence[Any]], texts: Sequence[str], score: Callable[[list[Any], list[str]], list[float]]
) -> list[float | None]:
    """Score all frames of all samples as one list, then average over each sample's; None for a sample without any.

    Args:
        frames: of each sample.
        texts: one for each sample.
        score: a number for each frame, of frames and as many texts.
    """
    flat = [frame for sample in frames for frame in sample]
    repeated = [text for text, sample in zip(texts, frames) for _ in sample]
    scores = iter(score(flat, repeated) if flat else [])
    return [sum(next(scores) for _ in sample) / len(sample) if sample else None for sample in frames]


def in_batches(size: int, count: int) -> list[range]:
    """Index ranges of at most `size` that cover 0 to count - 1."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def load_checkpoint(loader: Callable[..., Any], path: str, scorer: str, **options: Any) -> Any:
    """What the loader makes of a path. Raises ConfigError that names scorer and path when it cannot be had.

    Args:
        loader: such as `from_pretrained` of a class of transformers.
        path: a folder or hub name.
        scorer: for messages.
        options: further arguments of the loader.
    """
    try:
        return loader(path, **options)
    except ConfigError as error:
        raise ConfigError(f"scorer {scorer}: {error}") from error
    except Exception as error:  # libraries raise every kind of exception at a damaged folder
        raise ConfigError(
            f"scorer {scorer}: {path} cannot be loaded ({type(error).__name__}); give a folder or a hub name that "
            "this machine can reach"
        ) from error


def load_tensors(path: str, scorer: str) -> dict[str, torch.Tensor]:
    """Weights of a .safetensors, .pt or .pth file (tensors only, nothing is executed), local or `hub/name:file`."""
    if ":" in path and not Path(path).exists():
        repository, _, name = path.partition(":")
        path = load_checkpoint(hf_hub_download, repository, scorer, filename=name)
    if not Path(path).is_file():
        raise ConfigError(f"scorer {scorer}: the file {path} does not exist")
    with refused_as(ConfigError, f"scorer {scorer}: {path} cannot be loaded"):
        if path.endswith(".safetensors"):
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return loaded.get("state_dict", loaded)


def load_published(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], names: Mapping[str, str], scorer: str,
    unread: Collection[str] = (),
) -> torch.nn.Module:  # fmt: skip
    """Load weights that stand under the names of another code.

    Args:
        model: of transformers, which the weights are for.
        state: the published weights; those that `model` has no place for are left out.
        names: the model's part of a name by a pattern of the published one, applied in this order.
        scorer: for messages.
        unread: beginnings of the model's names that may be missing, as nothing reads them.

    Raises:
        ConfigError: a weight is missing, or has another shape.
    """
    found = {}
    for name, tensor in state.items():
        for pattern, own in names.items():
            name = re.sub(pattern, own, name)
        found[name] = tensor
    with refused_as(ConfigError, f"scorer {scorer}: the published weights do not fit the model"):
        missing = model.load_state_dict(found, strict=False).missing_keys
    if missing := [key for key in missing if not key.startswith(tuple(unread))]:
        raise ConfigError(f"scorer {scorer}: the published weights lack {len(missing)}, such as {missing[0]}")
    return model


def linear_stack(state: dict[str, torch.Tensor], prefix: str, scorer: str) -> torch.nn.Sequential:
    """Linear layers in order, without activations between them, as the aesthetic and ImageReward heads are. Raises
    ConfigError when there are none.

    Args:
        state: weights and biases, `<prefix><i>.weight` and `<prefix><i>.bias`, among others.
        prefix: with the dot before the number.
        scorer: for messages.
    """
    indices = sorted(
        int(key[len(prefix) : -len(".weight")]) for key in state if key.startswith(prefix) and key.endswith(".weight")
    )
    if not indices:
        raise ConfigError(f"scorer {scorer}: the head has no weights named {prefix}0.weight")
    layers = []
    for index in indices:
        weight, bias = state[f"{prefix}{index}.weight"].float(), state[f"{prefix}{index}.bias"].float()
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    return torch.nn.Sequential(*layers)
