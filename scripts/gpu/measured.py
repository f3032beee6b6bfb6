"""measured.py OUTPUT.json SCRIPT [ARGUMENTS...]: runs a script, writes the accelerator's peak memory and the time."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    output, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    began = time.monotonic()
    runpy.run_path(script, run_name="__main__")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    output.write_text(
        json.dumps({"peak_bytes": accelerator.max_memory_allocated(), "seconds": time.monotonic() - began})
    )
