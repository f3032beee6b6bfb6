"""measured.py OUTPUT.json SCRIPT [ARGUMENTS...]: runs a script and writes the accelerator's peak memory, the time, and
what the run's own plan said about memory (null where there was none)."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def noted_plans() -> list:
    """The plans that runs of this process make from now on, before they load anything."""
    from lightrft_visual.plugins.memory_plan import check

    plans, make = [], check.plan_of

    def noted(*arguments, **options):
        plans.append(make(*arguments, **options))
        return plans[-1]

    check.plan_of = noted
    return plans


if __name__ == "__main__":
    output, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    plans, began = noted_plans(), time.monotonic()
    runpy.run_path(script, run_name="__main__")
    from deepspeed.accelerator import get_accelerator

    plan = plans[-1] if plans else None
    result = {
        "peak_bytes": get_accelerator().max_memory_allocated(),
        "seconds": time.monotonic() - began,
        "planned_bytes": None if plan is None else plan.peak(),
        "planned_phase": None if plan is None else plan.fullest().name,
    }
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(result))
