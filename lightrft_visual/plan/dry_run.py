"""What `--dry_run` shows: the plan of a run for a device."""

from __future__ import annotations

from ..errors import ConfigError
from .check import AnyConfig, named_device, plan_of, unknown, why_not
from .sizes import planned_sizes


def dry_run(config: AnyConfig) -> tuple[str, int]:
    """(what to show, exit code) of a run that is only planned: 1 where it does not fit on the device that was named.

    The micro-batch sizes that the run would choose are put into `config`.
    """
    device, ranks, local = named_device(config.plan)
    try:
        sizes = planned_sizes(config)
        plan = plan_of(config, device, ranks, local)
    except ConfigError:
        raise
    except Exception as error:  # of a model that is built otherwise than those planned so far
        return why_not(error), 0
    if plan is None:
        return unknown(config), 0
    refused = config.plan.plan_device is not None and not plan.fits and not config.plan.force
    return "\n".join(filter(None, [sizes, plan.text()])), int(refused)
