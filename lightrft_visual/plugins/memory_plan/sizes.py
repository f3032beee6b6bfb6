"""Micro-batch sizes that fill the device, chosen by the plan of the run (`--auto_micro_batches`)."""

from __future__ import annotations

import logging
from copy import deepcopy
from math import ceil

import torch

from ...config.devices import Device
from ...config.diffusion import DiffusionRunConfig, trained_steps
from ...config.vl import RunConfig
from ...errors import ConfigError
from ...runtime import collectives
from .check import named_device, planner_of, started
from .process import present
from .table import Plan

logger = logging.getLogger(__name__)
AnyConfig = RunConfig | DiffusionRunConfig
Size = tuple[str, str]  # section and name of a setting
FILLED, FILLED_HOST = 0.9, 0.5  # of the memory that the plan may fill; on the host others want some too


def chosen_sizes(config: AnyConfig, device: Device, ranks: int, local: int, online: bool = False) -> dict[Size, int]:
    """The largest micro-batch sizes, of rollouts first, whose plan fills at most `FILLED` of the device, by setting.

    What is given is the least; sizes are that times a power of two, and at most what a rank has in a step. {} where the
    run cannot be planned. What depends on no size, such as an engine's share of the device, does not count.
    """
    trial = deepcopy(config)
    planned = planner_of(config, device, ranks, local, online)
    if planned is None:
        return {}
    least = planned(config)
    sizes: dict[Size, int] = {}
    for (section, name), most in _limits(config, ranks).items():
        settings = getattr(trial, section)
        given = getattr(settings, name)
        options = [given]
        while options[-1] < most:
            options.append(min(2 * options[-1], most))
        low, high = 0, len(options) - 1
        while low < high:  # the largest that fits: memory grows with each
            middle = (low + high + 1) // 2
            setattr(settings, name, options[middle])
            fits = _fits(planned(trial), least)
            low, high = (middle, high) if fits else (low, middle - 1)
        sizes[section, name] = options[low]
        setattr(settings, name, options[low])
    return sizes


def _limits(config: AnyConfig, ranks: int) -> dict[Size, int]:
    """The settings to choose, and more than which a rank has no use for."""
    own = max(1, ceil(config.train.train_batch_size / ranks))
    if isinstance(config, DiffusionRunConfig):
        if config.algorithm.entry.trains_on == "reward":  # its rollout is its training
            return {("train", "micro_train_batch_size"): own}
        sampling = config.sampling
        drawn = ceil(sampling.rollout_batch_size * sampling.n_samples_per_prompt / ranks)
        return {
            ("sampling", "micro_rollout_batch_size"): drawn,
            ("train", "micro_train_batch_size"): own,
            ("train", "steps_per_forward"): trained_steps(config),
        }
    samples = ceil(config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt / ranks)
    return {("rollout", "micro_rollout_batch_size"): samples, ("train", "micro_train_batch_size"): own}


def _fits(plan: Plan, least: Plan) -> bool:
    share = FILLED_HOST if plan.device.on_cpu else FILLED
    return all(
        needed <= max(share * limit, before)
        for phase, smallest in zip(plan.phases, least.phases)
        for (_, needed, limit), (_, before, _) in zip(plan.needed(phase), least.needed(smallest))
    )


def planned_sizes(config: AnyConfig) -> str:
    """The sizes for the device that a dry run names, which `config` gets, in a line; empty where none are asked for."""
    if not config.plan.auto_micro_batches:
        return ""
    return _use(config, chosen_sizes(config, *named_device(config.plan)))


def use_chosen_sizes(config: AnyConfig) -> None:
    """Put the sizes for this rank's device into the configuration, the smallest of all ranks. A collective."""
    ranks, local = started()
    try:
        sizes = chosen_sizes(config, present(local), ranks, local, online=True)
    except ConfigError:
        raise
    except Exception as error:  # of a model that is built otherwise than those planned so far
        logger.warning("micro-batch sizes stay as they are given, as no plan could be made: %s", error)
        sizes = {}
    names = list(_limits(config, ranks))
    mine = [sizes.get(name) or getattr(getattr(config, name[0]), name[1]) for name in names]
    least = -collectives.all_reduce_max(-torch.tensor(mine, dtype=torch.float64))
    text = _use(config, dict(zip(names, (int(value) for value in least.tolist()))))
    if collectives.is_rank_0():
        logger.info("%s", text)


def _use(config: AnyConfig, sizes: dict[Size, int]) -> str:
    for (section, name), value in sizes.items():
        setattr(getattr(config, section), name, value)
    found = ", ".join(f"{name} {value}" for (_, name), value in sizes.items())
    return f"auto_micro_batches: {found or 'nothing chosen, as the run cannot be planned'}"
