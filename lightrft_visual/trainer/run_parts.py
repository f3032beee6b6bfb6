"""Parts that every kind of run is built with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from ..config import registry
from ..config.diffusion import DiffusionRunConfig
from ..config.load import resolved_yaml, write_resolved
from ..config.vl import RunConfig
from ..data.bad_rows import TooManyBadRows, list_bad_rows
from ..errors import ConfigError
from ..observe import crash_log
from ..observe.earlier_runs import holds_results, set_aside
from ..observe.recorder import RecorderOptions, RunRecorder
from ..runtime import collectives
from ..runtime.deepspeed import DeepspeedStrategy
from ..runtime.folder_lock import FolderLock

logger = logging.getLogger(__name__)
AnyConfig = RunConfig | DiffusionRunConfig


@contextmanager
def output_folder_held(output_dir: str) -> Iterator[FolderLock | None]:
    """Inside it a run is built in a folder that is its alone: rank 0 gets the lock, for the recorder to release.

    It is released at once where the start fails. A collective: where another run is still going in the folder, every
    rank raises FolderInUse, before anything is moved or loaded; ConfigError where the folder cannot be written.
    """
    lock, refused = None, None
    if collectives.is_rank_0():
        try:
            lock = FolderLock.take(Path(output_dir))
        except ConfigError as error:
            refused = error
    refused = collectives.broadcast_object(refused)
    if refused is not None:
        raise refused
    with nullcontext() if lock is None else lock.released_on_error():
        yield lock


@contextmanager
def refused_data_listed(output_dir: str) -> Iterator[None]:
    """Inside it, a start that bad rows end lists them in `bad_rows.jsonl`, behind those of an earlier run there."""
    try:
        yield
    except TooManyBadRows as error:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        list_bad_rows(output_dir, holds_results(Path(output_dir)), error.rows)
        raise


def start_strategy(config: AnyConfig) -> DeepspeedStrategy:
    """The strategy of a run, its process group joined and this rank seeded."""
    strategy = DeepspeedStrategy(
        config.distributed,
        bf16=config.model.bf16,
        micro_batch_size=config.train.micro_train_batch_size,
        seed=config.train.seed,
    )
    strategy.setup_distributed()
    if config.plan.auto_micro_batches:
        plan = registry.service("memory_plan")
        if plan is not None:
            plan.use_chosen_sizes(config)
        elif collectives.is_rank_0():
            logger.warning("auto_micro_batches needs the plug-in memory_plan: the sizes stay as they are given")
        strategy.micro_batch_size = config.train.micro_train_batch_size
    return strategy


def open_recorder(config: AnyConfig, resumed: bool, lock: FolderLock | None) -> RunRecorder:
    """The recorder of a run, with config.resolved.yaml and env.json written. Raises ConfigError.

    resumed: whether the run goes on from a checkpoint; else what an earlier one left in the folder is put aside.
    lock: of the folder; the recorder releases it when it is closed.
    """
    output = config.output
    if collectives.is_rank_0() and not resumed:
        aside = set_aside(Path(output.output_dir), paths_read(config))
        if aside is not None:
            logger.warning("%s held an earlier run; its files are in %s now", output.output_dir, aside)
        (Path(output.output_dir) / crash_log.FILE_NAME).unlink(missing_ok=True)  # of a start that came to nothing
    options = RecorderOptions(output.run_name, output.use_tensorboard, output.use_wandb)
    recorder = RunRecorder(output.output_dir, options, config={"config": resolved_yaml(config)}, lock=lock)
    if collectives.is_rank_0():
        write_resolved(config, Path(output.output_dir) / "config.resolved.yaml")
    recorder.write_env()
    return recorder


def paths_read(config: AnyConfig) -> list[Path]:
    """What the configuration names outside `output` and may be a path to read; lists and name=path taken apart."""
    texts = [
        value
        for section, settings in asdict(config).items()
        if section != "output" and isinstance(settings, dict)
        for value in settings.values()
        if isinstance(value, str)
    ]
    return [Path(part.rpartition("=")[2].strip()) for text in texts for part in text.split(",") if part.strip()]


def synchronize() -> None:
    """Wait for the accelerator's queue, so that a phase is charged with its own work; nothing to wait for on CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.synchronize()
