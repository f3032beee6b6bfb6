"""Settings of other systems that become another value here, or several settings; plain names are in spellings.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Translation:
    """How a setting of another system is read.

    Args:
        like: a setting here that takes the same kind of value.
        read: its value to the settings that it stands for. Raises ConfigError for a value that means nothing here.
        about: for `--help`.
    """

    like: str
    read: Callable[[Any], dict[str, Any]]
    about: str


def _model_name(name: Any) -> dict[str, Any]:
    if name == "wan2_2":
        return {"family": "wan_i2v"}
    raise ConfigError(f"model_name is {name!r}; of ROLL's models there is wan2_2. A path or hub name is --pretrain")


def _extra_inputs(names: Any) -> dict[str, Any]:
    if names == "input_image":
        return {"image_key": names}
    raise ConfigError(f"extra_inputs is {names!r}; of ROLL's inputs there is input_image, the first frame")


def _reward_model_path(folder: Any) -> dict[str, Any]:
    return {
        "differentiable_reward": "face_similarity",
        "differentiable_kwargs.embedder": os.path.expanduser(str(folder)),
    }


def _origin_paths(found: Any) -> dict[str, Any]:
    if found in (None, "", "null", "None"):
        return {}
    raise ConfigError(
        "model_id_with_origin_paths names files of a hub, which are not fetched: name local ones by --model_paths"
    )


def _eval_enable(on: Any) -> dict[str, Any]:
    known = {"true": {}, "false": {"max_eval_samples": 0}}
    if str(on).lower() in known:
        return known[str(on).lower()]
    raise ConfigError(f"eval.enable is {on!r}; it is true or false")


def _precision(word: Any) -> dict[str, Any]:
    known = {"bf16": True, "fp32": False}
    if word in known:
        return {"bf16": known[word]}
    raise ConfigError(f"precision is {word!r}; there are bf16 and fp32")


TRANSLATIONS: dict[str, dict[str, Translation]] = {
    "DiffusionRunConfig": {
        "model_name": Translation("family", _model_name, "wan2_2 is --family wan_i2v (ROLL)"),
        "extra_inputs": Translation("image_key", _extra_inputs, "input_image is --image_key input_image (ROLL)"),
        "reward_model_path": Translation(
            "pretrain", _reward_model_path, "the embedder of --differentiable_reward face_similarity (ROLL)"
        ),
        "model_id_with_origin_paths": Translation("image_root", _origin_paths, "null only (ROLL)"),
        "eval.enable": Translation("bf16", _eval_enable, "false is --max_eval_samples 0 (VRL)"),
        "precision": Translation("pretrain", _precision, "bf16 is --bf16 (VRL)"),
    },
}
