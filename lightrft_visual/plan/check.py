"""The plan of a configuration, and what a run asks of it before it loads anything."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ..config.devices import DEVICES, PRESENT, Device
from ..config.diffusion import DiffusionRunConfig
from ..config.shared import PlanConfig
from ..config.vl import RunConfig
from ..errors import ConfigError
from .process import cpu, present
from .table import Plan

logger = logging.getLogger(__name__)
AnyConfig = RunConfig | DiffusionRunConfig


def check_fits(config: AnyConfig) -> None:
    """Raise ConfigError with the plan of a run that cannot fit on the device that is here, unless it is forced."""
    ranks, local = started()
    try:
        plan = plan_of(config, present(local), ranks, local, online=True)
    except ConfigError:
        raise
    except Exception as error:  # of a model that is built otherwise than those planned so far
        logger.warning("%s", why_not(error))
        return
    if plan is None:
        logger.info("%s", unknown(config))
    elif plan.fits:
        logger.debug("%s", plan.text())
    elif config.plan.force:
        logger.warning("%s\n--force: the run starts nevertheless", plan.verdict())
    else:
        raise ConfigError(f"this run does not fit (--force starts it nevertheless)\n{plan.text()}")


def why_not(error: Exception) -> str:
    """What is said where a plan failed."""
    return f"no plan of this run could be made: {type(error).__name__}: {error}"


def unknown(config: AnyConfig) -> str:
    """What is said where there is no plan."""
    if config.distributed.split:
        return (
            "no plan: rollout workers of this kind are not planned yet (those of vision-language runs on accelerators "
            "are); --placement colocated plans the trainer and the engine on one device"
        )
    return (
        f"no plan: the shape of {config.model.pretrain} is not known here; give a folder that has its configuration "
        "(config.json, or model_index.json and those of its parts)"
    )


def named_device(plan: PlanConfig) -> tuple[Device, int, int]:
    """(device, ranks, ranks on a host) of a plan's settings."""
    name, (here, local) = plan.plan_device, started()
    if name in (None, PRESENT, "cpu"):
        ranks = plan.plan_world_size or here
        local = min(ranks, local) if here > 1 else ranks
        return (cpu(local) if name == "cpu" else present(local)), ranks, local
    device = DEVICES[name]
    ranks = plan.plan_world_size or (here if here > 1 else device.ranks)
    return device, ranks, min(ranks, device.ranks)


def started() -> tuple[int, int]:
    """(ranks, ranks on this host) that a launcher has started."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks)


def plan_of(config: AnyConfig, device: Device, ranks: int, local: int, online: bool = False) -> Plan | None:
    """The plan of a run on a device; None where the shape of its model is not known, or its workers share the host.
    online: the hub may be asked."""
    planned = planner_of(config, device, ranks, local, online)
    return None if planned is None else planned(config)


def planner_of(
    config: AnyConfig, device: Device, ranks: int, local: int, online: bool = False
) -> Callable[[AnyConfig], Plan] | None:
    """What plans this run and others of the same model, which is put on meta tensors once; None as `plan_of`."""
    if config.distributed.split and (device.on_cpu or isinstance(config, DiffusionRunConfig)):
        return None
    if isinstance(config, DiffusionRunConfig):
        from .diffusion import Computed, DiffusionPlanner
        from .pipelines import pipeline_policy

        policy = pipeline_policy(config)
        if policy is None:
            return None
        computed = Computed(config, policy)
        return lambda each: DiffusionPlanner(each, computed, device, ranks, local).plan()
    from .shapes import language_model
    from .vl import VLPlanner
    from .vl_shape import VLShape

    model = language_model(config.model, online, config.data.prompt_data)
    if model is None:
        return None
    shape = VLShape(config, model)
    return lambda each: VLPlanner(each, shape, device, ranks, local).plan()
