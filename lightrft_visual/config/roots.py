"""The kinds of run: the schema of each, and the preset of its embedded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig

from . import registry
from .diffusion import DiffusionRunConfig
from .shared import EMBEDDED_REASONING, accumulated
from .vl import RunConfig

# The recipe of the embedded model, or how it follows from the settings, those of the recipe it named before among them.
Preset = str | Callable[[DictConfig], str]


def _of_algorithm(tree: DictConfig) -> str:
    entry = registry.diffusion_algorithms[tree.algorithm.diffusion_algorithm]
    return entry.embedded if tree.data.pair_data is None else f"{entry.embedded}_offline"


def _of_task(tree: DictConfig) -> str:
    if tree.model.embedded_family == "janus":
        return "embedded_unified"
    if tree.data.prompt_data == EMBEDDED_REASONING:
        return "embedded_reasoning"
    return "embedded_vl_updates" if _several_updates(tree) else "embedded_vl"


def _several_updates(tree: DictConfig) -> bool:
    """Whether a rollout is trained on in more than one optimizer step."""
    train, samples = tree.train, tree.rollout.rollout_batch_size * tree.rollout.n_samples_per_prompt
    size = train.train_batch_size or samples
    if train.groups_per_update is not None:
        size = train.groups_per_update * tree.rollout.n_samples_per_prompt
    elif train.gradient_accumulation_steps is not None:
        size = accumulated(train.gradient_accumulation_steps, train.micro_train_batch_size)
    return samples // max(1, size) * train.max_epochs > 1


DIFFUSION_PRESET: Preset = _of_algorithm
VL_PRESET: Preset = _of_task


@dataclass(frozen=True)
class Root:
    """kind is the folder of its recipes below experiment/."""

    kind: str
    schema: type
    preset: Preset


ROOTS = (
    Root("vl", RunConfig, VL_PRESET),
    Root("diffusion", DiffusionRunConfig, DIFFUSION_PRESET),
)
