"""The plan of a configuration: shown by a dry run, and asked by a run before it loads anything."""

from __future__ import annotations

import logging
import os

from ..config.devices import DEVICES, PRESENT, Device
from ..config.diffusion import DiffusionRunConfig
from ..config.shared import PlanConfig
from ..config.vl import RunConfig
from ..errors import ConfigError
from .advice import advice
from .process import cpu, present
from .table import Plan

logger = logging.getLogger(__name__)
AnyConfig = RunConfig | DiffusionRunConfig


def dry_run(config: AnyConfig) -> tuple[str, int]:
    """(what to show, exit code) of a run that is only planned: 1 where it does not fit on the device that was named."""
    device, ranks, local = named_device(config.plan)
    try:
        plan = plan_of(config, device, ranks, local)
    except ConfigError:
        raise
    except Exception as error:  # of a model that is built otherwise than those planned so far
        return f"no plan of this run could be made: {type(error).__name__}: {error}", 0
    if plan is None:
        return unknown(config), 0
    named = config.plan.plan_device is not None
    text = plan.text()
    if isinstance(config, RunConfig) and (advised := advice(config, plan)):
        text = f"{text}\n{advised}"
    return text, int(named and not plan.fits and not config.plan.force)


def check_fits(config: AnyConfig) -> None:
    """Raise ConfigError with the plan of a run that cannot fit on the device that is here, unless it is forced."""
    ranks, local = _started()
    try:
        plan = plan_of(config, present(local), ranks, local, online=True)
    except ConfigError:
        raise
    except Exception as error:  # of a model that is built otherwise than those planned so far
        logger.warning("no plan of this run could be made: %s: %s", type(error).__name__, error)
        return
    if plan is None:
        logger.info("%s", unknown(config))
    elif plan.fits:
        logger.debug("%s", plan.text())
    elif config.plan.force:
        logger.warning("%s\n--force: the run starts nevertheless", plan.verdict())
    else:
        raise ConfigError(f"this run does not fit (--force starts it nevertheless)\n{plan.text()}")


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
    name, (started, local) = plan.plan_device, _started()
    if name in (None, PRESENT, "cpu"):
        ranks = plan.plan_world_size or started
        local = min(ranks, local) if started > 1 else ranks
        return (cpu(local) if name == "cpu" else present(local)), ranks, local
    device = DEVICES[name]
    ranks = plan.plan_world_size or (started if started > 1 else device.ranks)
    return device, ranks, min(ranks, device.ranks)


def _started() -> tuple[int, int]:
    """(ranks, ranks on this host) that a launcher has started."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks)


def plan_of(config: AnyConfig, device: Device, ranks: int, local: int, online: bool = False) -> Plan | None:
    """The plan of a run on a device; None where the shape of its model is not known, or its workers share the host.
    online: the hub may be asked."""
    if config.distributed.split and (device.on_cpu or isinstance(config, DiffusionRunConfig)):
        return None
    if isinstance(config, DiffusionRunConfig):
        from .diffusion import plan_diffusion
        from .pipelines import pipeline_policy

        policy = pipeline_policy(config)
        return None if policy is None else plan_diffusion(config, policy, device, ranks, local)
    from .shapes import language_model
    from .vl import plan_vl

    model = language_model(config.model, online, config.data.prompt_data)
    return None if model is None else plan_vl(config, model, device, ranks, local)
