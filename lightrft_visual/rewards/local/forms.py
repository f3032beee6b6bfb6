"""How reward functions are called: in this project's form, or as other systems call theirs.

A form is an entry of the registry (`reward_forms`). It says which inputs its functions know beside ours, whether they
are called once or for each sample, and how what they return is read. It is recognised by the parameters' names.
docs/coming_from.md has the forms in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from ...config import registry
from ...errors import ConfigError, did_you_mean
from ...runtime.usercode.calls import LOG_EXTRA, LOG_METRIC, SAMPLES
from ..batch import RewardBatch

AUTO = "auto"
Inputs = Mapping[str, Callable[[RewardBatch], Any]]


def _as_is(result: Any, name: str) -> Any:
    return result


@dataclass(frozen=True)
class Form:
    """told: what the line at the start of a run says. positions: what the parameters are given in their order, whatever
    their names, unless one is a column of the data. inputs: by parameter, each a list with one entry a sample (or
    one value for all, when not each). each: called for each sample, with its entry of every input. closed: **kwargs
    get settings only. read: turns a result into one of ours. media: only for media that the policy made. fits: whether
    a function with parameters of these names, which takes any other one or not, is of this form."""

    told: str = ""
    inputs: Inputs = field(default_factory=dict)
    positions: Sequence[Callable[[RewardBatch], Any]] = ()
    each: bool = False
    closed: bool = False
    media: bool = False
    read: Callable[[Any, str], Any] = _as_is
    fits: Callable[[Sequence[str], bool, Callable[..., Any]], bool] = lambda names, takes_all, function: False

    def for_batch(self, batch: RewardBatch) -> Form:
        """This form, or ours where it is not meant for such a batch."""
        named = self.positions and batch.columns.intersection(self.inputs)
        return NATIVE if named or (self.media and not batch.generated) else self

    def calls(self, arguments: dict[str, Any], fixed: Mapping[str, Any], size: int) -> dict[str, Any]:
        """The arguments of the one call, or ROWS of them; `fixed` ones are the same for every sample."""
        if not self.each:
            return arguments
        return {SAMPLES: [{k: v if k in fixed else v[i] for k, v in arguments.items()} for i in range(size)]}


# Beside the batch: the step, and functions that log columns and numbers.
LOGGING: Inputs = {
    "trainer_state": lambda batch: SimpleNamespace(global_step=batch.step),
    "log_extra": lambda batch: LOG_EXTRA,
    "log_metric": lambda batch: LOG_METRIC,
}
NATIVE = Form(inputs=LOGGING)  # of functions that no other form fits
LIGHTRFT = Form("LightRFT's form", fits=lambda names, takes_all, function: "model_reward_list" in names)
OPENRLHF = Form(
    "OpenRLHF's form, labels are the references",
    {"labels": lambda batch: batch.labels_or_references},
    fits=lambda names, takes_all, function: (
        list(names[:3]) == ["queries", "prompts", "labels"] and not {"refs", "references", "completions"} & set(names)
    ),
)


def choose(form: str, function: Callable[..., Any], signature: Any) -> Form:
    """The form of that name, or the first one that the signature fits. Raises ConfigError as `check` does."""
    check(form)
    if form == AUTO:
        form = recognise(signature.names, signature.takes_all, function)
    chosen = registry.reward_forms.load(form)
    return replace(chosen, inputs=dict(zip(signature.names, chosen.positions))) if chosen.positions else chosen


def check(form: str) -> None:
    """Raise ConfigError for a form that does not exist, with the nearest name, or whose plug-in is not there."""
    known = [AUTO, *registry.reward_forms.names()]
    if form not in known:
        raise ConfigError(f"there is no reward_form {form!r}{did_you_mean(form, known)}")
    if form != AUTO:
        registry.reward_forms.load(form)


def recognise(names: Sequence[str], takes_all: bool, function: Callable[..., Any]) -> str:
    """The name of the form of a function with parameters of these names."""
    forms = registry.reward_forms.present()
    return next((entry.name for entry, form in forms if form.fits(names, takes_all, function)), "native")
