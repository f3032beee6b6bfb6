"""Hooks: how a feature follows a step without the trainer's knowing it.

A hook is an object with some of the methods of `StepHook`. Those of a run are built from its configuration, by the
registry's entries of the kind `hooks`, and given by the user (`callbacks`). They are called in the order of
registration, with the same calls on every rank, so a hook may use collectives.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import registry
from ..config.kinds import MOMENTS, check_hooks
from ..errors import CheckpointError, ConfigError
from ..experience.rollouts import Rollouts
from ..observe.metrics import MetricsAccumulator
from ..observe.recorder import Record
from ..runtime.checkpoint.state import Encoder
from ..runtime.packages import is_shipped

if TYPE_CHECKING:
    from .run_state import RunState

V = TypeVar("V")
logger = logging.getLogger(__name__)


class StopRun(Exception):
    """Raised by a hook to end the run well: with a checkpoint, exit code 0 and the reason on the console.

    Raised by a method from `on_prompts` to `on_buffer`, the step is given up and made again on resume. Raised by a
    later one, or in Reward FL, which has trained by then, it is finished first. export: write the final model as well.
    """

    def __init__(self, reason: str, export: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.export = reason, export

    def settle(self, state: RunState, rewound: bool = False) -> str:
        """Leave the run as it is to be found: here with a checkpoint. Returns what is said on the console. rewound: as
        of the last finished step."""
        state.keep(rewound)
        return f"{self.reason}; a checkpoint{f' of step {state.trainer.step}' if rewound else ''} is saved"


@dataclass
class HookContext:
    """What a hook may read of its run.

    parts: everything that the run is made of (`VLParts`, `DiffusionParts`), the configuration among it. step: finished
    rollout steps, as a function. state: saves checkpoints and goes back to them.
    """

    parts: Any
    step: Callable[[], int]
    total_steps: int
    state: RunState
    recorder: Any
    console: Any
    timer: Any
    report: Any

    @property
    def config(self) -> Any:
        """The configuration of the run."""
        return self.parts.config

    def close(self) -> None:
        """Keep no more than the configuration and the number of steps: a user's hook may outlive its run, and would
        hold the models and the engine."""
        vars(self).update(parts=SimpleNamespace(config=self.config), step=partial(int, self.step()), state=None)


@dataclass
class StepData:
    """One step on this rank, from its experience to the outputs.

    batches: micro-batches with advantages, in the order of the rollouts. rollouts: what they were made of. metrics: of
    this step; every stage adds its own, and the loop reduces them over ranks. records: of the rollouts that people are
    shown, the same on every rank; their media are on rank 0. shown: further ones, for the console alone.
    """

    batches: list[Any]
    rollouts: Any = ()
    metrics: MetricsAccumulator = field(default_factory=MetricsAccumulator)
    records: list[Record] = field(default_factory=list)
    shown: list[Record] = field(default_factory=list)


class StepHook:
    """The moments of a run that a feature may follow; every method is optional, and the same on every rank.

    Methods from `on_prompts` to `on_train_batch` return their argument, or what takes its place. A class attribute
    `name` names the hook's part of a checkpoint; the default is the name of its class. `last = True` lets it
    follow all others.
    """

    context: HookContext

    def setup(self, context: HookContext) -> None:
        """Once, when the run is built. Keeps the context."""
        self.context = context

    def on_prompts(self, requests: Any) -> Any:
        """The prompts that the engine is asked to continue. A request may have variants: other media for some of its
        samples."""
        return requests

    def on_rollouts(self, rollouts: Any) -> Any:
        """Responses before they are scored."""
        return rollouts

    def on_scores(self, rollouts: Any) -> Any:
        """Responses with their rewards."""
        return rollouts

    def on_experience(self, step: StepData) -> StepData:
        """Micro-batches with log-probs and advantages; may add to the step's metrics."""
        return step

    def on_buffer(self, buffer: Any) -> Any:
        """The replay buffer, filled and not yet planned."""
        return buffer

    def on_train_batch(self, batch: Any) -> Any:
        """One optimizer step, whose samples are counted already: a `TrainBatch` of `trainer.vl.updates`, whose
        micro-batches are positions in the buffer; in diffusion runs a list of `ExperienceDiffusion` on the host."""
        return batch

    def on_update(self, result: Any) -> None:
        """After an optimizer step of the policy; `result.applied` says whether weights moved."""

    def on_sync(self) -> None:
        """After the updates of a step, before the engine gets the new weights."""

    def weights_for(self, purpose: str) -> AbstractContextManager[Any] | None:
        """Around "evaluation" and "export": a context in which the model has other weights; None where it keeps its
        own."""
        return None

    def on_metrics(self, metrics: Mapping[str, float]) -> None:
        """The metrics of the finished step, reduced over ranks."""

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation; see `Evaluated` for what else it holds."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers of this rank for the step's metrics, averaged over ranks."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What an exact resume needs, as plain containers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `load_state_dict` takes on this rank, of the states of another number of ranks."""
        return states[0]

    def missing_state(self) -> None:
        """In place of `load_state_dict` where the run that is resumed had no such hook."""

    def close(self) -> None:
        """The run has ended."""


def _through(name: str, waits: bool = False) -> Any:
    """The method `name` of `Hooks`, whose argument each hook returns or replaces. waits: for the end of the step."""

    def call_all(hooks: Hooks, value: V, waits: bool = waits) -> V:
        begun_by = next(filter(None, (getattr(hook, f"before_{name}", "") for hook in hooks)), "")
        held = tuple({*map(type, value)}) if isinstance(value, list) else ()
        for call in hooks.calls(name):
            given, before = value, _parts(value) if begun_by else []
            try:
                value = call(given)
            except StopRun as stop:
                if not waits:
                    raise
                hooks.stopping = hooks.stopping or stop
            if not isinstance(value, type(given)):
                told = f"{call.__qualname__} returned {type(value).__name__}; it returns"
                raise ConfigError(f"{told} its argument or what replaces it, a {type(given).__name__}")
            if held:
                _check_kept(call.__qualname__, name, value, held)
            if isinstance(value, Rollouts) and value is not given:
                value.follow(given)
            if begun_by and [*map(id, before)] != [*map(id, _parts(value))]:
                told = "the engine has begun on the prompts already: leave one of them out"
                raise ConfigError(f"{call.__qualname__} changes prompts, and with {begun_by} {told}")
        return value

    return call_all


def _check_kept(hook: str, moment: str, kept: Any, held: tuple[type, ...]) -> None:
    """Raise ConfigError for what a hook left of a list of `held` that the step could not go on with."""
    if not kept:
        raise ConfigError(f"{hook} keeps nothing of this rank{': use leave_out' if isinstance(kept, Rollouts) else ''}")
    wrong = next((type(each).__name__ for each in kept if not isinstance(each, held)), None)
    if wrong is not None:
        raise ConfigError(f"{hook} returned a {type(kept).__name__} with a {wrong}; it was given {held[0].__name__}")
    for each in kept if moment == "on_scores" and isinstance(kept, Rollouts) else ():
        try:
            sound = math.isfinite(each.reward)
        except (TypeError, ValueError, RuntimeError):  # of what is no number
            sound = False
        if not sound and (each.valid or each.reward is None):
            told = "it is a finite number; leave_out is for samples that teach nothing"
            raise ConfigError(f"behind {hook} a reward is {each.reward!r}; {told}")


def _parts(requests: Any) -> list[Any]:
    """Of requests for engines: each, and what it holds."""
    each = requests if isinstance(requests, list) else [requests]
    return [part for one in each for part in (one, *vars(one).values())]


def _told(name: str) -> Any:
    """The method `name` of `Hooks`, which tells each hook; a StopRun waits for the end of the step."""

    def tell_all(hooks: Hooks, *arguments: Any) -> None:
        for call in hooks.calls(name):
            try:
                call(*(dict(each) if type(each) is dict else each for each in arguments))  # a hook may write into it
            except StopRun as stop:
                hooks.stopping = hooks.stopping or stop

    return tell_all


class Hooks:
    """The hooks of a run as one; each method is the hooks' own of that name, for which see `StepHook`.

    A hook whose method is not overridden is not called. `stopping` is a StopRun that waits for the end of the step.
    """

    def __init__(self, hooks: Sequence[Any] = ()) -> None:
        self._hooks = list(hooks)
        self.stopping: StopRun | None = None

    def build(self, parts: Any, callbacks: Sequence[Any] = ()) -> None:
        """Those that the configuration of `parts` asks for, in the registry's order, a user's own, and the `last`."""
        entries = registry.hooks.present(lambda each: parts.kind in each.kinds)
        made = [(entry.shipped, make(parts)) for entry, make in entries]
        self._hooks += [each for each in (*(hook for _, hook in made), *callbacks) if each is not None]
        self._hooks.sort(key=lambda hook: getattr(hook, "last", False) is True)
        check_hooks(self._hooks)
        registered = {type(hook) for shipped, hook in made if not shipped} - {type(None), SimpleNamespace}
        for twice in (type(hook).__name__ for hook in callbacks if type(hook) in registered):
            told = "its file registers it, and it is given as a callback: leave one of them out"
            raise ConfigError(f"the hook {twice} would follow the run twice: {told}")
        of_vl = () if parts.kind == "vl" else (registry.loss_terms, registry.policy_masks)
        unused = *(each for each in registry.hooks if parts.kind not in each.kinds), *itertools.chain(*of_vl)
        others = [each.name for each in unused if not each.shipped]
        if others:
            logger.warning("of another kind of run than %s, and not built: %s", parts.kind, ", ".join(others))
        _tell_of_silent([*(hook for shipped, hook in made if not shipped), *callbacks], parts.config)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hooks)

    def setup(self, context: HookContext) -> None:
        """See `StepHook.setup`."""
        for hook in self._hooks:
            if hasattr(hook, "setup"):
                hook.setup(context)

    on_prompts = _through("on_prompts")
    on_rollouts = _through("on_rollouts")
    on_scores = _through("on_scores")
    on_experience = _through("on_experience")
    on_buffer = _through("on_buffer")
    on_train_batch = _through("on_train_batch", waits=True)
    on_update = _told("on_update")
    on_sync = _told("on_sync")
    on_metrics = _told("on_metrics")
    on_evaluation = _told("on_evaluation")

    def report(self, metrics: MetricsAccumulator) -> None:
        """Add the numbers of all hooks to a step's. Raises ConfigError for what is no number, and for taken names."""
        for call in self.calls("metrics"):
            try:
                told = call() or {}
            except StopRun as stop:
                told, self.stopping = {}, self.stopping or stop
            if not isinstance(told, Mapping):
                raise ConfigError(f"{call.__qualname__} returned a {type(told).__name__}, not numbers by name")
            for name, value in told.items():
                metrics.add_own(call.__qualname__, name, value)

    def weights_for(self, purpose: str) -> AbstractContextManager[Any] | None:
        """The contexts of all hooks as one; None where no hook has any."""
        found = [context for call in self.calls("weights_for") if (context := call(purpose)) is not None]
        return _together(found) if found else None

    def state_dict(self) -> dict[str, Any]:
        """By the name of each hook; dicts and lists of a user's are copied, as they may change until it is saved."""
        states = {name: (hook, hook.state_dict()) for name, hook in self._named() if hasattr(hook, "state_dict")}
        return {name: state if is_shipped(type(hook)) else copied(state) for name, (hook, state) in states.items()}

    def check_states(self) -> None:
        """Raise ConfigError for a hook whose state no checkpoint can keep."""
        for name, hook in self._named():
            if hasattr(hook, "state_dict"):
                check_state(hook, f"hook {name}")

    def load_state_dict(self, state: Mapping[str, Any], lending_alone: bool = False) -> None:
        """Go on from `state_dict`'s. lending_alone: only hooks that lend weights."""
        default = StepHook.weights_for
        for name, hook in self._named():
            if lending_alone and getattr(type(hook), "weights_for", default) is default:
                continue
            if state.get(name) is not None and hasattr(hook, "load_state_dict"):
                go_on(hook, state[name], f"hook {name}")
            elif hasattr(hook, "missing_state"):
                hook.missing_state()

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What `load_state_dict` takes on this rank, of the states of another number of ranks."""
        joined = dict(states[0])
        for name, hook in self._named():
            if joined.get(name) is not None and hasattr(hook, "state_of_ranks"):
                joined[name] = hook.state_of_ranks([state[name] for state in states])
        return joined

    def close(self) -> None:
        """See `StepHook.close`."""
        for call in self.calls("close"):
            call()

    def _named(self) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for hook in self._hooks:
            name = getattr(hook, "name", type(hook).__name__)
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), hook

    def calls(self, name: str) -> list[Callable[..., Any]]:
        """The methods of this name that hooks have of their own, in their order."""
        default = getattr(StepHook, name)
        found = [getattr(hook, name, default) for hook in self._hooks]
        return [each for each in found if getattr(each, "__func__", each) is not default]


def copied(state: Any) -> Any:
    """Plain containers copied through, and what they hold as it is: tensors may be as large as the model."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state


def check_state(owner: Any, told: str) -> None:
    """Raise ConfigError for a part of a user's whose state no checkpoint can keep. told: its kind and name."""
    try:
        if not is_shipped(type(owner)):  # whose states may be large
            Encoder().encode(owner.state_dict(), f"state_dict of {told}")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def go_on(owner: Any, state: Mapping[str, Any], told: str) -> None:
    """Give a part of a user's its state of a checkpoint. Raises CheckpointError for a key that the state lacks.

    Args:
        owner: has `load_state_dict`.
        state: of the checkpoint.
        told: its kind and name.
    """
    try:
        owner.load_state_dict(state)
    except KeyError as error:
        held = ", ".join(map(str, state)) or "nothing"
        said = f"load_state_dict of {told} asks for {error}; its state of the checkpoint holds {held}"
        raise CheckpointError(said) from error


def _tell_of_silent(hooks: Sequence[Any], config: Any) -> None:
    """Warn of methods of a user's hooks that a run of this configuration never calls, or no run."""
    for hook in hooks:
        strange = [name for name in dir(hook) if name.startswith("on_") and name not in MOMENTS]
        own = [name for name in strange if getattr(getattr(hook, name), "__module__", None) == type(hook).__module__]
        if strange := [name for name in own if callable(getattr(hook, name))]:  # not what it derives from
            told = "%s: a run never calls %s; its moments are %s"
            logger.warning(told, type(hook).__name__, ", ".join(strange), ", ".join(MOMENTS))
    for name in getattr(config, "silent_moments", ()):
        for hook in hooks:
            if Hooks([hook]).calls(name):
                owner = f"{type(hook).__name__}.{name}"
                logger.warning("%s is never called: this run has no %s, see docs/hooks.md", owner, name)


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
