"""Hooks: how a feature follows a step without the trainer's knowing it.

A hook is an object with some of the methods of `StepHook`. Those of a run are built from its configuration, by the
registry's entries of the kind `hooks`, and given by the user (`callbacks`). They are called in the order of
registration, with the same calls on every rank, so a hook may use collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import registry
from ..observe.metrics import MetricsAccumulator
from ..observe.recorder import Record

if TYPE_CHECKING:
    from .run_state import RunState

V = TypeVar("V")


class StopRun(Exception):
    """Raised by a hook to end the run well: with a checkpoint, exit code 0 and the reason on the console.

    Raised by a method from `on_prompts` to `on_buffer`, the step is given up and made again on resume. Raised by a
    later one, the step is finished first. export: write the final model as well.
    """

    def __init__(self, reason: str, export: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.export = reason, export

    def settle(self, state: RunState) -> str:
        """Leave the run as it is to be found: here with a checkpoint. Returns what is said on the console."""
        state.save()
        return f"{self.reason}; a checkpoint is saved"


@dataclass
class HookContext:
    """What a hook may read of its run.

    parts: everything that the run is made of (`VLParts`, `DiffusionParts`), the configuration among it. step: finished
    rollout steps, as a function. state: saves checkpoints and goes back to them. evaluates: whether there is an
    evaluation.
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


@dataclass
class StepData:
    """One step on this rank, from its experience to the outputs.

    batches: micro-batches with advantages, in the order of the rollouts. rollouts: what they were made of. metrics: of
    this step; every stage adds its own, and the loop reduces them over ranks. records: of the rollouts that people are
    shown, the same on every rank.
    """

    batches: list[Any]
    rollouts: Any = ()
    metrics: MetricsAccumulator = field(default_factory=MetricsAccumulator)
    records: list[Record] = field(default_factory=list)


class StepHook:
    """The moments of a run that a feature may follow; every method is optional, and the same on every rank.

    Methods from `on_prompts` to `on_train_batch` return their argument, or what takes its place. A class attribute
    `name` names the hook's part of a checkpoint; the default is the name of its class.
    """

    def setup(self, context: HookContext) -> None:
        """Once, when the run is built."""

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
        """The micro-batches of one optimizer step, whose samples are counted already; those of images on the host."""
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

    def state_dict(self) -> dict[str, Any]:
        """What an exact resume needs, as plain containers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""

    def missing_state(self) -> None:
        """In place of `load_state_dict` where the run that is resumed had no such hook."""

    def close(self) -> None:
        """The run has ended."""


class Hooks:
    """The hooks of a run as one; `stopping` is a StopRun that waits for the end of the step."""

    def __init__(self, hooks: Sequence[Any] = ()) -> None:
        self._hooks = list(hooks)
        self.stopping: StopRun | None = None

    def build(self, parts: Any, callbacks: Sequence[Any] = ()) -> None:
        """Those that the configuration of `parts` asks for, in the registry's order, and then a user's own."""
        made = (entry.load()(parts) for entry in registry.hooks if parts.kind in entry.kinds)
        self._hooks += [*(each for each in made if each is not None), *callbacks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hooks)

    def setup(self, context: HookContext) -> None:
        """See `StepHook.setup`."""
        for call in self._calls("setup"):
            call(context)

    def on_prompts(self, requests: V) -> V:
        """See `StepHook.on_prompts`."""
        return self._through("on_prompts", requests)

    def on_rollouts(self, rollouts: V) -> V:
        """See `StepHook.on_rollouts`."""
        return self._through("on_rollouts", rollouts)

    def on_scores(self, rollouts: V) -> V:
        """See `StepHook.on_scores`."""
        return self._through("on_scores", rollouts)

    def on_experience(self, step: V) -> V:
        """See `StepHook.on_experience`."""
        return self._through("on_experience", step)

    def on_buffer(self, buffer: V) -> V:
        """See `StepHook.on_buffer`."""
        return self._through("on_buffer", buffer)

    def on_train_batch(self, batch: V) -> V:
        """See `StepHook.on_train_batch`; a StopRun waits for the end of the step."""
        return self._through("on_train_batch", batch, waits=True)

    def on_update(self, result: Any) -> None:
        """See `StepHook.on_update`; a StopRun waits for the end of the step."""
        self._told("on_update", result)

    def on_sync(self) -> None:
        """See `StepHook.on_sync`; a StopRun waits for the end of the step."""
        self._told("on_sync")

    def on_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `StepHook.on_metrics`; a StopRun waits for the end of the step."""
        self._told("on_metrics", metrics)

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """See `StepHook.on_evaluation`; a StopRun waits for the end of the step."""
        self._told("on_evaluation", metrics)

    def metrics(self) -> dict[str, float]:
        """Those of all hooks."""
        return {name: value for call in self._calls("metrics") for name, value in (call() or {}).items()}

    def weights_for(self, purpose: str) -> AbstractContextManager[Any] | None:
        """The contexts of all hooks as one; None where no hook has any."""
        found = [context for call in self._calls("weights_for") if (context := call(purpose)) is not None]
        return _together(found) if found else None

    def state_dict(self) -> dict[str, Any]:
        """By the name of each hook."""
        return {name: hook.state_dict() for name, hook in self._named() if hasattr(hook, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        for name, hook in self._named():
            if state.get(name) is not None and hasattr(hook, "load_state_dict"):
                hook.load_state_dict(state[name])
            elif hasattr(hook, "missing_state"):
                hook.missing_state()

    def close(self) -> None:
        """See `StepHook.close`."""
        for call in self._calls("close"):
            call()

    def _named(self) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for hook in self._hooks:
            name = getattr(hook, "name", type(hook).__name__)
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), hook

    def _calls(self, name: str) -> Iterator[Callable[..., Any]]:
        return (getattr(hook, name) for hook in self._hooks if hasattr(hook, name))

    def _through(self, name: str, value: V, waits: bool = False) -> V:
        for call in self._calls(name):
            try:
                value = call(value)
            except StopRun as stop:
                if not waits:
                    raise
                self.stopping = self.stopping or stop
            if value is None:
                raise TypeError(f"{call.__qualname__} returned None; it returns its argument or what replaces it")
        return value

    def _told(self, name: str, *arguments: Any) -> None:
        for call in self._calls(name):
            try:
                call(*arguments)
            except StopRun as stop:
                self.stopping = self.stopping or stop


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
