"""From a configuration to a finished run: `run` raises, for programs; `run_script` is for scripts, and says errors in
a few lines and ends the process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import registry
from .config.load import OF_SEVERAL, check_ranks
from .config.sft import SFTRunConfig
from .config.summary import in_lines
from .config.vl import RunConfig
from .errors import ConfigError, FolderInUse, LightRFTVisualError, OutputClosed
from .runtime.files import disk_problem
from .runtime.host_memory import bound_spinning
from .runtime.packages import unseen_devices, wrong_torchvision
from .runtime.presence import handled, hangup_ends, ranks_started
from .runtime.start_up import (
    foreign_lines_aside,
    importing,
    open_closed_streams,
    say_last,
    screen,
    seldom_collecting,
    start_is_over,
)
from .runtime.usercode.calls import INTERRUPTED, describe_error, masked, source_line_of
from .runtime.usercode.surroundings import is_users, rng_state, set_rng_state

if TYPE_CHECKING:
    from .config.diffusion import DiffusionRunConfig
    from .trainer.loop import PolicyTrainer

    AnyConfig = RunConfig | DiffusionRunConfig | SFTRunConfig

LEFT_SECONDS = 10.0  # that threads get which a run has left, once the program is over
LOOK_SECONDS = 0.2
_RUNNING = threading.Lock()  # ranks, random states and signals are of the whole process


QUIET = {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
         "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
OF_LIBRARIES = "VLLM_", "TRITON_", "GOMP_", "CUBLAS_", "FLASH_ATTENTION_"  # what names begin with that a run sets
PLACE = ("RANK", *OF_SEVERAL)  # which a rank alone sets for itself
BARS = ("transformers.utils.logging", "diffusers.utils.logging")  # whose progress bars a run switches off
TALKING = ("httpx", "httpx2", "vllm", "deepspeed", "DeepSpeed", "transformers", "matplotlib", "PIL", "torch")


def quiet_libraries() -> None:
    """Keep libraries' start-up chatter out of a run's output; warnings about the run itself stay."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=".*")  # without it, Python's own would be moved
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO if rank == "0" else logging.WARNING, format="%(message)s")
    for name in TALKING:
        logging.getLogger(name).setLevel(logging.ERROR)


LESS_MEMORY = (
    "for less: --auto_micro_batches false and smaller micro_train_batch_size and micro_rollout_batch_size, or "
    "--gradient_checkpointing full; --dry_run says what each phase holds"
)
LESS_UNPLANNED = "for less: a smaller --micro_train_batch_size, or --gradient_checkpointing full"  # of supervised runs


def run_script(config: AnyConfig) -> None:
    """Train in a script; an error ends the process with a few lines and a code other than 0."""
    _run(config, partial(built, config))


def built(config: AnyConfig, callbacks: Sequence[Any] = ()) -> PolicyTrainer:
    """The trainer of a configuration. callbacks: hooks of a user. Raises ConfigError where it cannot fit."""
    build: Callable[..., PolicyTrainer]
    with importing():
        if isinstance(config, RunConfig):
            from .trainer.vl.trainer import build_trainer

            build = build_trainer
        elif isinstance(config, SFTRunConfig):
            from .trainer.vl.sft import build_supervised

            build = build_supervised
        else:
            from diffusers.utils import logging as diffusers_logging

            from .trainer.diffusion.build import build_diffusion_trainer

            build = build_diffusion_trainer
            diffusers_logging.disable_progress_bar()
    plan = registry.service("memory_plan") if config.plan is not None else None
    if plan is not None:
        plan.check_fits(config)
    return build(config, callbacks)


def run(config: AnyConfig, callbacks: Sequence[Any] = ()) -> PolicyTrainer:
    """Train in a program that goes on: whatever goes wrong is raised. Returns the trainer, closed.

    With several ranks the others are told of an error, and their processes end: they may wait in a collective.
    """
    check_ranks(config)
    with _released_on_error(config.plan is not None) as held:
        held.append(trainer := _build(partial(built, config, callbacks)))
        _train(trainer)
    return trainer


@contextmanager
def started(config: AnyConfig) -> Iterator[PolicyTrainer]:
    """Inside, a trainer whose engine has the weights of the model, or of the checkpoint that it resumes from."""
    check_ranks(config)
    with _released_on_error(config.plan is not None) as held:
        held.append(trainer := _build(partial(built, config)))
        if trainer.state.resume_folder is not None:
            trainer.state.take_weights()
        trainer.start()
        yield trainer
        _close(trainer)


@contextmanager
def _released_on_error(planned: bool) -> Iterator[list[PolicyTrainer]]:
    """Inside, a trainer is built and used; after an error its engines and files are let go, and other ranks told.
    planned: as of `_in_words`."""
    environment, before = dict(os.environ), sys.exc_info()[1]
    bound_spinning()  # before anything loads torch
    gc.unfreeze()
    gc.collect()  # an earlier run's models and engine, which `importing` hides from the collector
    with importing():
        from .runtime import collectives, watchdog

    if not _RUNNING.acquire(blocking=False):
        raise ConfigError("another run goes on in this process: wait for it, or start a process for each")
    held: list[PolicyTrainer] = []
    with ExitStack() as way_back:
        way_back.callback(_RUNNING.release)
        way_back.enter_context(_put_back(environment))
        way_back.callback(watchdog.stop)
        try:
            yield held
        except BaseException as error:
            if collectives.world_size() > 1:
                watchdog.report_failure(f"{_in_words(error, planned)} (stage {watchdog.stage()})")
            try:
                for trainer in held:
                    _close(trainer)
            except Exception as second:
                logging.getLogger(__name__).warning("what the run holds could not be released: %s", second)
            for trainer in held:
                vars(trainer).clear()  # whoever called this still names it
            _empty_frames(error, before)
            raise


def _empty_frames(error: BaseException, before: BaseException | None) -> None:
    """Take the variables of ours and of libraries from an error. Notebooks keep the last one, and with it all that its
    frames name: weights and optimizer, beside which the next run finds no room on its device. before: an error that the
    caller was at, which stays as it is."""
    waiting: list[BaseException | None] = [error]
    seen = {id(before)}
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            waits = frame.f_code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)  # to be cleared would end it
            if not waits and not is_users(frame.f_code.co_filename):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        waiting += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]


@contextmanager
def _put_back(environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, libraries are quiet. Afterwards random states, warnings, logging, bars and PyTorch's deterministic
    mode are the program's, as this environment is.

    The process group of a rank alone ends, unless the program began it.
    """
    with importing():
        import torch.distributed as dist
        import transformers.utils.logging  # noqa: F401  its logger takes its level from the program's environment

        from .runtime.seeding import kernel_modes, set_kernel_modes

    states, filters, handlers = rng_state(), list(warnings.filters), list(logging.root.handlers)
    modes = kernel_modes()
    set_rng_state(states | {"users": {}})  # what users' functions draw begins with the run
    grouped, hook = ranks_started() > 1 or dist.is_initialized(), sys.excepthook
    levels = {each: each.level for each in (logging.root, *map(logging.getLogger, TALKING))}
    bars = [each for each in BARS if each not in sys.modules or sys.modules[each].is_progress_bar_enabled()]
    quiet_libraries()
    ours = [each for each in warnings.filters if each not in filters]
    added = [each for each in logging.root.handlers if each not in handlers]
    try:
        yield
    finally:
        for name in {*os.environ, *environment}:
            if name in (*QUIET, *PLACE) or name.startswith(OF_LIBRARIES):
                os.environ.pop(name, None)
                os.environ.update({name: environment[name]} if name in environment else {})
        for handler in added:
            logging.root.removeHandler(handler)
        for logger, level in levels.items():
            logger.setLevel(level)
        warnings.filters = [each for each in warnings.filters if each not in ours]
        with warnings.catch_warnings(action="ignore"):  # of the hub's, which read QUIET if the run has loaded it
            for name in bars:
                if name in sys.modules:
                    sys.modules[name].enable_progress_bar()
        set_rng_state(states)
        set_kernel_modes(modes)
        if not grouped:
            sys.excepthook = hook  # torch puts the rank before every line of a traceback
            if dist.is_initialized():
                from deepspeed import comm  # which keeps groups of its own, where it has begun

                (comm if comm.is_initialized() else dist).destroy_process_group()


def _close(trainer: PolicyTrainer) -> None:
    trainer.close()
    trainer.recorder.close()


def _run(config: AnyConfig, build: Callable[[], PolicyTrainer]) -> None:
    open_closed_streams()
    try:
        with handled(signal.SIGTERM, _end_at_once), handled(signal.SIGINT, _end_at_once), hangup_ends():
            bound_spinning()  # before anything loads torch
            quiet_libraries()  # whose handler the lines of ours reach the screen by
            foreign_lines_aside(Path(config.output.output_dir))
            for line in in_lines(config) if os.environ.get("RANK", "0") == "0" else ():
                screen().write(f"{line}\n")
            trainer = _build(build)
            _train(trainer)
    except BaseException as error:  # also sys.exit and the like: the steps of the run were not done
        _fail(config, error)
    start_is_over()
    _leave(trainer.state.exit_code)
    if trainer.state.exit_code:
        sys.exit(trainer.state.exit_code)


def _end_at_once(number: int, _: object) -> None:
    by, code = ("Ctrl-C", INTERRUPTED) if number == signal.SIGINT else ("SIGTERM", 1)
    say_last(f"error: ended by {by} before the first step; there is nothing new to save")
    os._exit(code)


_end_at_once.ends_process = True  # so does, later in the run, a second Ctrl-C


def _build(build: Callable[[], PolicyTrainer]) -> PolicyTrainer:
    with importing():
        if told := wrong_torchvision():  # transformers would say that it has no AutoProcessor
            raise ConfigError(told)
        if (told := unseen_devices()) and os.environ.get("RANK", "0") == "0":
            logging.getLogger(__name__).warning("%s", told)
        from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with seldom_collecting():
        return build()


def _train(trainer: PolicyTrainer) -> None:
    with trainer.state.listening():
        trainer.fit()
        if trainer.state.stopped:  # launchers end the others once one rank has left with another code than 0
            from .runtime import collectives

            collectives.meet()  # rank 0 may have a report to write, and records to send
            collectives.barrier()  # it holds the store that `meet` reads
        trainer.close()


def _fail(config: AnyConfig, error: BaseException) -> None:
    """Say what went wrong, where the rest of it is written, and end this process, and with it the other ranks.

    They may wait in a collective: a plain exit would wait for them, or for the engine's threads.
    """
    from .config.load import resolved_yaml
    from .observe.environment import FAILED, write_crash_log, write_end
    from .runtime import collectives, watchdog

    if isinstance(error, RuntimeError) and not isinstance(error, LightRFTVisualError):
        watchdog.give_way()  # as every collective fails once a rank is gone
    stage, rank = watchdog.stage(), f"rank {collectives.rank()}, " if collectives.world_size() > 1 else ""
    text = _in_words(error, config.plan is not None)
    where = "" if stage == watchdog.STARTING else f" ({rank}stage {stage})"
    plain = isinstance(error, FolderInUse | OutputClosed)  # crash.log is the other run's, or has nothing to tell
    log = None if plain else write_crash_log(config.output.output_dir, error, resolved_yaml(config))
    if log is not None and stage != watchdog.STARTING:  # before it the folder may be another run's
        write_end(log.parent, FAILED, text.split("\n")[0] + where)
    if log is None and not plain and disk_problem(error) is None and not isinstance(error, ConfigError):
        traceback.print_exception(error)
    first, *rest = text.split("\n")
    rest += [f"the full traceback, versions and configuration: {log}"] if log is not None else []
    say_last("\n".join([f"error: {first}{where}", *rest]))
    watchdog.report_failure(f"{text} (stage {stage})")
    codes = {KeyboardInterrupt: INTERRUPTED, FolderInUse: 1, ConfigError: 2}
    os._exit(next((code for kind, code in codes.items() if isinstance(error, kind)), 1))


def _in_words(error: BaseException, planned: bool = True) -> str:
    """Our own errors as they are; of others what was raised, and the lines of a user's own files. planned: whether the
    run has a plan, with settings of its own."""
    if isinstance(error, LightRFTVisualError):
        return f"{type(error).__name__}: {error}"
    if problem := disk_problem(error):
        return f"{problem}; make room, or name an output_dir elsewhere"
    first, *lines = masked(describe_error(error)).split("\n")
    if first.startswith("called "):
        first = f"{first.removeprefix('called ')} was called before the run was done"
    if isinstance(error, KeyboardInterrupt):
        first = "interrupted before the run was done"
    if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which may not be loaded
        lines.append(LESS_MEMORY if planned else LESS_UNPLANNED)
    return "\n".join([first.removeprefix("raised "), *lines])


def _leave(code: int) -> None:
    import torch.distributed as dist

    from .runtime import watchdog

    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.freeze()  # the interpreter's last collection would walk through everything that was ever imported
    threading.Thread(target=_end_in_time, args=(code,), name="leaving", daemon=True).start()


def _end_in_time(code: int) -> None:
    """In a thread: once the program is over, threads that would keep its process get LEFT_SECONDS and are then named.

    The interpreter waits for every thread that is no daemon, and a reward function may have left one that never ends.
    """
    while not _program_is_over():
        time.sleep(LOOK_SECONDS)
    for _ in range(round(LEFT_SECONDS / LOOK_SECONDS)):
        if not _left_threads():
            return
        time.sleep(LOOK_SECONDS)
    left, frames = _left_threads(), sys._current_frames()
    if not left:
        return
    named = "; ".join(f"{thread.name}{source_line_of(frames.get(thread.ident))}" for thread in left)
    told = f"the run is done, but threads that it started go on: {named}; the process ends without them"
    print(f"warning: {told}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _program_is_over() -> bool:
    """Whether the main thread has left the program, and waits inside `threading` for the others or is gone."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename == threading.__file__


def _left_threads() -> list[threading.Thread]:
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
