"""The shape of a model before it is there: its configuration, of a folder, of the hub's cache, or shipped here.

`shapes/` holds the published configurations of the models that recipes name and of their siblings, so that a run can be
planned on a machine without them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ...config import registry
from ...config.constraints import load_target
from ...config.shared import EMBEDDED
from ...config.vl import ModelConfig
from ...errors import ConfigError, nearest
from ...runtime.hub import fetch_model, is_hub_name

FOLDER = Path(__file__).parent / "shapes"


@cache
def shipped() -> dict[str, Path]:
    """Files of shapes by the model's name in lower case, without its owner."""
    return {file.name.removesuffix(".json").lower(): file for file in sorted(FOLDER.glob("*.json"))}


def near_shipped(path: str) -> str:
    """'; did you mean OWNER/NAME?' for a hub name with a slip; else nothing."""
    owner, _, name = path.rpartition("/")
    names = [file.name.removesuffix(".json") + end for file in shipped().values() for end in ("", "-Instruct")]
    near = nearest(name, names) if is_hub_name(path) else None
    return f"; did you mean {owner}/{near}?" if near else ""


def find_shipped(path: str) -> dict[str, Any] | None:
    """The shape of a model by its hub name; None for one that is not known."""
    name = Path(path).name.lower()
    file = shipped().get(name.removesuffix("-instruct").removesuffix("-thinking"))
    return json.loads(file.read_text()) if file is not None else None


def language_model(model: ModelConfig, online: bool = False, task: str = EMBEDDED):
    """The transformers configuration of a run's checkpoint, or None where it is nowhere to be found.

    Raises ConfigError for a configuration that cannot be read.

    Args:
        model: with the checkpoint's path, and whether code of its own is trusted.
        online: whether the hub is asked too.
        task: prompt_data, which says the embedded model's vocabulary.
    """
    from transformers import AutoConfig

    path, trust = model.pretrain, model.trust_remote_code
    if path in registry.checkpoint_resolvers:
        return load_target(registry.checkpoint_resolvers[path].shape)(model, task)
    if Path(path).is_dir():
        if not Path(path, "config.json").is_file():
            raise ConfigError(f"model folder {path} has no config.json")
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {path} cannot be planned: {error}") from error
    known = find_shipped(path)
    if known is not None:
        return AutoConfig.for_model(known.pop("model_type"), **known)
    try:
        if online:
            fetch_model(path, trust, ["config.json"])
        cached = not online or is_hub_name(path)  # what the hub has is in the cache now
        return AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=cached)
    except (OSError, ValueError, KeyError):
        return None  # the run itself says what it cannot load
