"""Saving, resuming and stopping a run, between the loop and the checkpoint manager."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from ..config import registry
from ..config.diffusion import DiffusionRunConfig
from ..config.load import resolved_yaml, write_resolved
from ..config.sft import SFTRunConfig
from ..config.shared import AUTO, FULL, OutputConfig
from ..config.vl import RunConfig
from ..data.bad_rows import TooManyBadRows, list_bad_rows
from ..errors import CheckpointError, ConfigError
from ..observe import environment as crash_log
from ..observe.environment import holds_results, set_aside
from ..observe.recorder import RecorderOptions, RunRecorder
from ..runtime import collectives
from ..runtime.checkpoint.manager import CheckpointManager, on_rank_0, resolve_resume
from ..runtime.checkpoint.state import load_state, save_state
from ..runtime.deepspeed import DeepspeedStrategy
from ..runtime.files import FolderLock, check_space
from ..runtime.presence import LauncherWatch, handled, hangup_ends
from ..runtime.usercode.calls import INTERRUPTED, Interrupt, StopRequest
from ..runtime.usercode.surroundings import rng_state, set_rng_state

logger = logging.getLogger(__name__)
AnyConfig = RunConfig | DiffusionRunConfig | SFTRunConfig


def final_folder(output: OutputConfig) -> Path:
    """Where the exported model goes at the end."""
    return Path(output.save_path or Path(output.output_dir) / "checkpoint-final")


def best_metric(output: OutputConfig) -> tuple[str, str] | None:
    """(metric, "max" | "min") of `best_metric`: "eval_reward", "max:eval_reward" or "min:eval_length"."""
    if output.best_metric is None:
        return None
    mode, separator, name = output.best_metric.rpartition(":")
    if mode not in (("max", "min") if separator else ("",)) or not name:
        raise ConfigError(f"best_metric is {output.best_metric!r}; write it as NAME, max:NAME or min:NAME")
    save, evaluate = output.intervals(1)
    if evaluate <= 0 or save <= 0 or save % evaluate:
        raise ConfigError(
            f"best_metric compares checkpoints by their own evaluation: save_steps ({save}) must be a "
            f"multiple of eval_steps ({evaluate}), both positive"
        )
    return name, mode or "max"


def check_output(output: OutputConfig) -> Path | None:
    """Look, before any model loads, whether the run can resume from and write where it is told to. A collective.

    Returns the checkpoint folder to resume from, None for a fresh start. Raises CheckpointError, or ConfigError for a
    `best_metric` that cannot be read.
    """
    best_metric(output)
    final = final_folder(output)
    on_rank_0("checking save_path", lambda: CheckpointManager(final.parent).check_target(final.name))
    if output.save_path is not None:
        on_rank_0("checking save_path", CheckpointManager(final.parent).check_writable)
    if output.ckpt_path is not None:
        on_rank_0("checking ckpt_path", CheckpointManager(output.ckpt_path).check_writable)
    source = "auto" if output.load_checkpoint and output.resume_from is None else output.resume_from
    if source is not None:
        return resolve_resume(source, output.ckpt_path or output.output_dir)
    return None


class Resumable(Protocol):
    """What is saved and restored of a trainer; see `loop.PolicyTrainer` for the methods."""

    step: int
    nonfinite_streak: int
    latest_eval: dict[str, float]
    evaluated_step: int
    hooks: Any
    settings: Any
    recorder: Any
    console: Any

    def state_dict(self) -> dict[str, Any]:
        """Plain state, weights and optimizers aside."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `load_state_dict` takes, of the states of another number of ranks."""

    def save_engines(self, folder: Path) -> None:
        """Weights and optimizer states of this rank."""

    def load_engines(self, folder: Path, saved_ranks: int | None = None) -> None:
        """The inverse of `save_engines`."""

    def export(self, folder: Path) -> None:
        """The trained model for other programs."""


BEST = "checkpoint-best"  # of the best gold
# Without best_metric: the first of them that was measured.
BEST_BY = (("eval_gold", "max"), ("eval_reward", "max"), ("eval_loss", "min"))


class RunState:
    """Checkpoints of one trainer. SIGTERM, Ctrl-C or the end of the launcher asks for a checkpoint and an orderly end.

    resume_folder: what `check_output` found. exit_code: of the process, once the run has ended.
    """

    def __init__(self, trainer: Resumable, output: OutputConfig, resume_folder: Path | None = None):
        self.trainer, self.output, self.resume_folder = trainer, output, resume_folder
        self.best = best_metric(output)
        usual = BEST_BY if output.max_ckpt_num > 1 else BEST_BY[:1]  # one checkpoint is the newest, as asked for
        by = (self.best,) if self.best else usual
        self.manager = CheckpointManager(output.ckpt_path or output.output_dir, output.max_ckpt_num, by)
        self.exit_code = 0
        self._stop, self._launchers = StopRequest(), LauncherWatch()
        self._interrupt, self._interrupted = Interrupt(), False
        self._between_steps: dict[str, Any] = {}
        self._optional = False  # whether nobody asked for the checkpoint that is being written

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM, Ctrl-C and the loss of the terminal ask for a checkpoint and an orderly end; the handlers of
        before come back. A checkpoint that is being written is complete at the end, or said to be not."""
        with handled(signal.SIGTERM, self._stop), handled(signal.SIGINT, self._interrupt), hangup_ends():
            try:
                yield
            except BaseException:
                self.manager.leave()
                raise
            self.settle()

    def check_space(self, needed: int) -> None:
        """Refuse, or warn of, a disk without room for the checkpoints that were asked for. needed: bytes of one."""
        if (self.output.save_steps or 0) > 0:
            manager = self.manager
            on_rank_0("looking for room", lambda: check_space(manager.root, needed, manager.max_num))

    def signalled(self) -> bool:
        """Whether this process was asked to stop."""
        return self._stop.made

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer. Raises CheckpointError, on all ranks,
        where one could not write its part of the last checkpoint."""
        stop = 2 if self._interrupt.first else int(self._stop.made or self._launchers.gone())
        behind = self.manager.behind
        failed = behind is not None and behind.error is not None
        agreed, failed = collectives.all_reduce_max(torch.tensor([float(stop), float(failed)])).tolist()
        if failed:
            self.settle()
        elif self.manager.saved:
            self._say_saved()
        self._interrupted = agreed > 1
        return agreed > 0

    def settle(self) -> None:
        """Wait for a checkpoint that is being written. Raises CheckpointError where it failed and was asked for."""
        try:
            self.manager.finish()
        except CheckpointError as error:
            self._missing(error)
        self._say_saved()

    def _missing(self, error: CheckpointError) -> None:
        if not self._optional:
            raise error
        where = "save_steps says how often one is saved, ckpt_path where"
        self.trainer.console.message(f"there is no checkpoint: {error}; the run goes on ({where})")

    def _say_saved(self) -> None:
        while self.manager.saved:
            self.trainer.console.message(str(self.manager.saved.pop(0)))

    def mark(self) -> None:
        """Remember where the run stands between two steps, for `stop(rewound=True)` when the next one is given up."""
        self._between_steps = self._changing()

    def stop(self, rewound: bool = False) -> Path:
        """Save and end early. rewound: as of the last `mark`; nothing may have been trained since."""
        interrupted = self._interrupted or self._interrupt.first is not None
        self.exit_code = INTERRUPTED if interrupted else self.output.sigterm_exit_code
        if not rewound:
            self.mark()
        return self.save_marked()

    def save_marked(self) -> Path:
        """A checkpoint as of the last `mark`; nothing may have been trained since."""
        return self.save(self._between_steps)

    def save(self, changing: Mapping[str, Any] | None = None, behind: bool = False) -> Path:
        """A checkpoint of this step, with the metrics of the evaluation that these very weights had, if any.

        changing: what a step changes before it trains, where it is not to be saved as it is now. behind: it is written
        while the run goes on.
        """
        self.settle()
        trainer, changing = self.trainer, changing or self._changing()
        self._optional = behind and self.output.save_steps is None
        metrics = trainer.latest_eval if trainer.evaluated_step == trainer.step else {}
        path = self.manager.save(
            trainer.step,
            lambda folder: self._write(folder, changing),
            metrics=metrics,
            model=trainer.settings.model,
            behind=behind,
        )
        self._say_saved()
        return path

    def save_best(self) -> Path:
        """This step as checkpoint-best, in place of an earlier one; a run can be resumed from it."""
        self.settle()
        trainer, changing = self.trainer, self._changing()
        return self.manager.save(
            trainer.step,
            lambda folder: self._write(folder, changing),
            name=BEST,
            metrics=trainer.latest_eval,
            resumable=True,
            model=trainer.settings.model,
        )

    def roll_back(self) -> None:
        """Take over the best checkpoint, and save it again: as the newest, from which the run would be resumed."""
        self.settle()
        self._read(self.manager.root / BEST)
        self.save_best()

    def _changing(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer.state_dict(),
            "hooks": self.trainer.hooks.state_dict(),
            "random": rng_state(),
        }

    def save_due(self) -> None:
        """`save` in the run's course. Where nobody asked for it, one that cannot be written is said, and the run goes
        on."""
        try:
            self.save(behind=self.output.async_save)
        except CheckpointError as error:
            self._optional = self.output.save_steps is None
            self._missing(error)

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise ConfigError when `best_metric` is not among an evaluation's metrics."""
        if self.best is not None and self.best[0] not in metrics:
            known = ", ".join(metrics) or "none, there is no evaluation data"
            raise ConfigError(f"best_metric {self.best[0]!r} is no metric of the evaluation; those are: {known}")

    def save_final(self, folder: Path) -> None:
        """The exported model, in a folder of its own (written aside and renamed like every checkpoint)."""
        self.settle()
        final = CheckpointManager(folder.parent, 1)
        final.save(self.trainer.step, self.trainer.export, name=folder.name, metrics=self.trainer.latest_eval)

    def resume(self) -> None:
        """Continue from the checkpoint, or start afresh; either way rows and rollouts of later steps go."""
        trainer = self.trainer
        if self.resume_folder is None:
            trainer.recorder.cut_back(-1)
            return
        self._read(self.resume_folder)
        trainer.recorder.cut_back(trainer.step)
        trainer.console.resumed(trainer.step)
        trainer.console.message(f"resumed from {self.resume_folder} at step {trainer.step}")
        if trainer.step >= trainer.settings.total_steps:
            trainer.console.message(f"all {trainer.settings.total_steps} steps are done: nothing is left to train")

    def take_weights(self) -> None:
        """Only what is evaluated of the checkpoint to resume from: the weights, and those that hooks lend. Data and
        rewards may be others now."""
        folder, ranks = self.resume_folder, collectives.world_size()
        paths = by_rank(sorted(folder.glob("run_state_rank*.safetensors")))
        self.trainer.load_engines(folder, None if len(paths) == ranks else len(paths))
        hooks = [state.get("hooks") or _hooks_of_version_2(state) for state in map(load_state, paths)]
        joined = hooks[collectives.rank()] if len(paths) == ranks else self.trainer.hooks.state_of_ranks(hooks)
        self.trainer.hooks.load_lending(joined)

    def _write(self, folder: Path, changing: Mapping[str, Any]) -> None:
        self.trainer.save_engines(folder)
        state = {
            "step": self.trainer.step,
            "world_size": collectives.world_size(),
            "nonfinite_in_a_row": self.trainer.nonfinite_streak,
            "latest_eval": self.trainer.latest_eval,
            "evaluated_step": self.trainer.evaluated_step,
            **changing,
        }
        save_state(folder / f"run_state_rank{collectives.rank()}.safetensors", state)

    def _read(self, folder: Path) -> None:
        paths = sorted(folder.glob("run_state_rank*.safetensors"))
        own, ranks = folder / f"run_state_rank{collectives.rank()}.safetensors", collectives.world_size()
        if len(paths) == ranks:
            path, state = own, load_state(own)
            self.trainer.load_engines(folder)
        else:
            path, state = folder, self._state_of_ranks([load_state(each) for each in by_rank(paths)])
            self.trainer.load_engines(folder, len(paths))
            told = f"{len(paths)} rank(s) saved it and {ranks} go on: weights, optimizers and data are divided anew"
            self.trainer.console.message(told)
        try:
            self._take_over(state)
        except KeyError as error:
            raise CheckpointError(f"{path} has no {error}: another version of lightrft_visual saved it") from error

    def _state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's state, of those of another number of ranks. Samples stay the same: their seeds are their own."""
        return {
            **states[0],
            "trainer": self.trainer.state_of_ranks([state["trainer"] for state in states]),
            "hooks": self.trainer.hooks.state_of_ranks(
                [state.get("hooks") or _hooks_of_version_2(state) for state in states]
            ),
            "random": states[collectives.rank() % len(states)]["random"],
        }

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self.trainer.step = int(state["step"])
        self.trainer.nonfinite_streak = int(state["nonfinite_in_a_row"])
        self.trainer.latest_eval = dict(state["latest_eval"])
        self.trainer.evaluated_step = int(state["evaluated_step"])
        self.trainer.load_state_dict(state["trainer"])
        self.trainer.hooks.load_state_dict(state.get("hooks") or _hooks_of_version_2(state))
        set_rng_state(state["random"])


def by_rank(paths: Sequence[Path]) -> list[Path]:
    """`run_state_rank0`, 1, … in the order of the ranks. CheckpointError where one is missing."""
    found = [paths[0].with_name(f"run_state_rank{number}.safetensors") for number in range(len(paths))] if paths else []
    if not found or set(found) != set(paths):
        raise CheckpointError(f"a checkpoint has no state of every rank: {', '.join(path.name for path in paths)}")
    return found


def _hooks_of_version_2(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the hooks of a checkpoint of the second version had: it stood beside the trainer's state, and in it."""
    return {"guard": state.get("guard")} | {
        name: state["trainer"].get(name) for name in ("ema", "replay", "reference") if state["trainer"].get(name)
    }


@contextmanager
def folders_held(output: OutputConfig) -> Iterator[list[FolderLock]]:
    """Inside it a run is built in folders that are its alone: rank 0 gets their locks, for the recorder to release.

    They are released at once where the start fails. A collective: where another run is still going in one, every rank
    raises FolderInUse, before anything is moved or loaded; ConfigError where a folder cannot be written.
    """
    folders, refused = {"output_dir": Path(output.output_dir)}, None
    if output.ckpt_path is not None and Path(output.ckpt_path).resolve() != folders["output_dir"].resolve():
        folders["ckpt_path"] = Path(output.ckpt_path)
    with ExitStack() as held:
        locks = []
        try:
            for setting, folder in folders.items() if collectives.is_rank_0() else ():
                if (lock := FolderLock.take(folder, setting)) is not None:
                    held.enter_context(lock.released_on_error())
                    locks.append(lock)
        except ConfigError as error:
            refused = error
        refused = collectives.broadcast_object(refused)
        if refused is not None:
            raise refused
        yield locks


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
    _use_plan(config)
    strategy.micro_batch_size = config.train.micro_train_batch_size
    return strategy


def _use_plan(config: AnyConfig) -> None:
    """Let the plan of memory choose what is left to it; without one the sizes stay, and checkpointing is full."""
    planned, auto = config.plan is not None, config.model.gradient_checkpointing == AUTO
    sized = planned and config.plan.auto_micro_batches
    plan = registry.service("memory_plan") if planned and (auto or sized) else None
    if plan is not None:
        plan.use_choices(config)
        return
    if auto:
        config.model.gradient_checkpointing = FULL
    need = "the plug-in memory_plan" if planned else "a plan, which supervised runs do not have"
    told = {"gradient_checkpointing auto": (auto, "full"), "auto_micro_batches": (sized, "the sizes as they are given")}
    for name, (asked, taken) in told.items() if collectives.is_rank_0() else ():
        if asked:
            logger.warning("%s needs %s: it takes %s", name, need, taken)


def open_recorder(config: AnyConfig, resumed: bool, locks: Sequence[FolderLock]) -> RunRecorder:
    """The recorder of a run, with config.resolved.yaml and env.json written. Raises ConfigError.

    resumed: whether the run goes on from a checkpoint; else what an earlier one left in the folder is put aside.
    locks: of its folders; the recorder releases them when it is closed.
    """
    output = config.output
    if collectives.is_rank_0() and not resumed:
        aside = set_aside(Path(output.output_dir), paths_read(config))
        if aside is not None:
            logger.warning("%s held an earlier run; its files are in %s now", output.output_dir, aside)
        (Path(output.output_dir) / crash_log.FILE_NAME).unlink(missing_ok=True)  # of a start that came to nothing
    options = RecorderOptions(output.run_name, output.use_tensorboard, output.use_wandb)
    recorder = RunRecorder(output.output_dir, options, config={"config": resolved_yaml(config)}, locks=locks)
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
