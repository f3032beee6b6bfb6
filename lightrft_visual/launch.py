"""What the example scripts share: from a configuration to a finished run, errors said in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from .config.vl import RunConfig
from .errors import LightRFTVisualError, StoppedBySignal
from .strategy.host import bound_spinning
from .usercode.calls import TERMINATED

if TYPE_CHECKING:
    from .config.diffusion import DiffusionRunConfig
    from .trainer.loop import PolicyTrainer


def quiet_libraries() -> None:
    """Keep libraries' start-up chatter out of a run's output; warnings about the run itself stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO if rank == "0" else logging.WARNING, format="%(message)s")
    for name in ("httpx", "vllm", "deepspeed", "DeepSpeed", "transformers", "matplotlib", "PIL", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_vl(config: RunConfig) -> None:
    """Build and run a vision-language trainer; the package's own errors end the process with one line and code 1."""

    def build():
        from .trainer.vl.trainer import build_trainer

        return build_trainer(config)

    _run(build)


def run_diffusion(config: DiffusionRunConfig) -> None:
    """The same for a diffusion trainer."""

    def build():
        from diffusers.utils import logging as diffusers_logging

        from .trainer.diffusion.build import build_diffusion_trainer

        diffusers_logging.disable_progress_bar()
        return build_diffusion_trainer(config)

    _run(build)


def _run(build: Callable[[], PolicyTrainer]) -> None:
    bound_spinning()  # before anything loads torch
    quiet_libraries()
    signal.signal(signal.SIGTERM, _end_at_once)  # until the trainer has a handler of its own
    try:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        trainer = build()
        trainer.fit()
        trainer.close()
    except StoppedBySignal as error:
        _fail(f"{type(error).__name__}: {error}", TERMINATED)
    except LightRFTVisualError as error:
        _fail(f"{type(error).__name__}: {error}")
    except Exception as error:
        traceback.print_exc()
        _fail(f"{type(error).__name__}: {error}")
    except SystemExit as leaving:  # a plugin's or library's: the steps of the run were not done
        traceback.print_exc()
        _fail(f"sys.exit({leaving.code!r}) was called before the run was done")
    _leave()
    if trainer.state.exit_code:
        sys.exit(trainer.state.exit_code)


def _end_at_once(*_: object) -> None:
    print("error: ended by SIGTERM before the first step; there is nothing new to save", file=sys.stderr, flush=True)
    os._exit(TERMINATED)


def _fail(text: str, code: int = 1) -> None:
    """Say what went wrong and end this process, and with it the other ranks.

    They may wait in a collective: a plain exit would wait for them, or for the engine's threads.
    """
    from .strategy import collectives, watchdog

    stage, rank = watchdog.stage(), f"rank {collectives.rank()}, " if collectives.world_size() > 1 else ""
    where = "" if stage == watchdog.STARTING else f" ({rank}stage {stage})"
    first, *rest = text.split("\n")
    print("\n".join([f"error: {first}{where}", *rest]), file=sys.stderr, flush=True)
    watchdog.report_failure(f"{text} (stage {stage})")
    os._exit(code)


def _leave() -> None:
    import torch.distributed as dist

    from .strategy import watchdog

    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
