"""Models that run beside the policy to judge it, in the plan: which there are, what they hold at rest and at work."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from ...config.shared import RewardConfig
from ...rewards.recipe import Recipe, RecipeEntry, recipe_from_components, recipe_of
from ...rewards.registry import find_scorer, named_entries, own_settings, scorer_names
from ...runtime.hub import fetch_model
from .meta import Work, on_meta
from .shapes import find_shipped
from .table import HOST, Item
from .times import Speeds
from .zero import Model, Zero

SEEN = 256  # tokens of an image in a scorer such as CLIP ViT-L/14
UNKNOWN = Model(0, 0, 0, 0, width=0)  # one whose shape is nowhere to be found


@dataclass(frozen=True)
class RewardModel:
    """Its numbers. offload: it waits on the host between uses; divided: over the ranks under ZeRO-3."""

    model: Model
    offload: bool
    divided: bool


def judges_of(config: Any, online: bool = False) -> dict[str, RewardModel]:
    """Those of a run, without the models that are in Ray actors, on devices which are not planned. online: the hub may
    be asked."""
    reward = config.reward
    if config.distributed.resources.rewards_placed:
        reward = replace(reward, reward_pretrain=None)
    gold = config.guard.gold(reward)
    return reward_models({"reward model": reward} | ({} if gold is None else {"gold": gold}), online)


def reward_models(rewards: Mapping[str, RewardConfig], online: bool = False) -> dict[str, RewardModel]:
    """Those of several reward engines, by name: checkpoints of `reward_pretrain`, and of the scorers that have a model.

    rewards: configurations by what the models are called. online: the hub may be asked.
    """
    found = {}
    for what, reward in rewards.items():
        for name, path in named_entries(reward.reward_pretrain).items():
            found[f"{what} {name}"] = RewardModel(_model_of(path, online), reward.reward_cpu_offload, divided=True)
        for entry in _scorers(reward):
            for number, (setting, path, offload, width) in enumerate(_checkpoints(entry)):
                called = f"{what} {entry.name}{f' ({setting})' if number else ''}"
                found[called] = RewardModel(_model_of(path, online, width), offload, divided=False)
    return found


def _model_of(path: str, online: bool, width: int | None = None) -> Model:
    """A checkpoint's; width: bytes of a weight, default: as it is stored."""
    known = None if Path(path).is_dir() else find_shipped(path)
    try:
        if known is not None:
            config = AutoConfig.for_model(known.pop("model_type"), **known)
        else:
            if online:
                fetch_model(path, files=["config.json"])
            config = AutoConfig.from_pretrained(path, local_files_only=not Path(path).is_dir())
        kind = getattr(transformers, (config.architectures or [""])[0], AutoModelForImageTextToText.from_config)
        module = on_meta(lambda: kind(config))
    except (OSError, ValueError):
        return UNKNOWN  # the run itself says what it cannot load
    stored = config.dtype or (torch.float32 if known is None else torch.bfloat16)  # in which language models come
    return Model.of(module.requires_grad_(False), width or stored.itemsize)


def _scorers(reward: RewardConfig) -> Iterator[RecipeEntry]:
    """The scorers that run in this process, each as often as it is built."""
    recipe = recipe_of(reward)
    built = set()
    for entry in _parts(recipe):
        if (entry.transport or reward.reward_transport) == "inprocess" and entry.scorer not in built:
            built.add(entry.scorer)
            yield entry


def _parts(recipe: Recipe | None) -> Iterator[RecipeEntry]:
    """Components that are scorers by name; of `multi`, which is several, its own."""
    for entry in recipe.components() if recipe is not None else ():
        if entry.key == "multi" and isinstance(entry.kwargs.get("components"), Mapping):
            yield from _parts(recipe_from_components(entry.kwargs["components"], entry.kwargs.get("kwargs")))
        elif entry.type in ("rule", "func") and entry.key in scorer_names():
            yield entry


def _checkpoints(entry: RecipeEntry) -> list[tuple[str, str, bool, int | None]]:
    """(setting, checkpoint, whether it is offloaded, bytes of a weight where a setting `bf16` says) of a scorer's
    models: that of its setting `model`, or those that its class names in `checkpoints`. None for one without any."""
    target = find_scorer(entry.key)
    names = getattr(target, "checkpoints", ("model",))
    parameters = inspect.signature(target).parameters
    if not {*names, "offload"} <= set(parameters):  # without `offload` it is a model of a server
        return []
    usual = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    settings = usual | own_settings(target, entry.kwargs)
    width = (2 if settings["bf16"] else 4) if "bf16" in settings else None
    return [(name, settings[name], bool(settings["offload"]), width) for name in names if settings.get(name)]


def reward_items(models: Mapping[str, RewardModel], zero: Zero, at_work: str | None = None) -> list[Item]:
    """Weights of reward models, and what ZeRO-3 gathers of the one at work.

    Args:
        models: by what the plan calls them.
        zero: which divides those that are divided.
        at_work: the one that judges now; those that are offloaded wait on the host but for it. None: none does.
    """
    items = []
    for name, each in models.items():
        held = zero.divided(each.model.bytes) if each.divided else each.model.bytes
        lower = "reward_cpu_offload, zero_stage 3, a reward server" if each.divided else "offload of its settings, Ray"
        waits = each.offload and not zero.on_cpu  # its memory on the host stays while it is at work
        items += [Item(f"{name}: weights", held, lower, HOST)] if waits else []
        items += [Item(f"{name}: weights", held, lower)] if name == at_work or not waits else []
        if name == at_work and each.divided:
            items += zero.gathered(each.model)
    return items


def judging(models: Mapping[str, RewardModel], speeds: Speeds, samples: int, tokens: float) -> float:
    """Seconds of reward models over samples: a forward each, and their way from the host and back.

    Functions, and models of other processes, are not known.

    Args:
        models: those that judge, one after the other.
        speeds: of the rank.
        samples: that each of them judges on this rank.
        tokens: of all these samples in sum; at least `SEEN` a sample are counted.
    """
    seconds = 0.0
    for each in models.values():
        seconds += speeds.seconds(Work(2.0 * each.model.numbers * max(tokens, samples * SEEN)))
        seconds += 2 * each.model.bytes / speeds.link if each.offload and not speeds.alone else 0.0
    return seconds
