"""User callables as scorers: what a function's signature names is given to it by keyword.

So TRL's `f(prompts, completions, **columns)` and LightRFT's `reward_fn(model_reward_list, labels, queries, refs,
label_map)` work as they are, sync or async; `forms.py` has the systems that call their functions in another way.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...errors import ConfigError, RewardError, StoppedBySignal, did_you_mean
from ...runtime.usercode.calls import AsRewardError, UserCodeExited, call, defined_at
from ...runtime.usercode.loading import LoadedFunction, callable_name
from ..batch import Call, RewardBatch, Scores, ScoringFailed
from . import forms
from .forms import AUTO, Form
from .results import parse_result

log = logging.getLogger(__name__)


class Signature:
    """The keyword parameters of a callable. Raises ConfigError when it has none that can be read."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the signature of reward function {name} cannot be read; wrap it in a def") from error
        fixed = [p for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
        if fixed:
            raise ConfigError(f"reward function {name} has a positional-only parameter {fixed[0].name!r}")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = [p.name for p in named]
        self.required = [p.name for p in named if p.default is p.empty]
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)


LIGHTRFT_INPUTS = ("model_reward_list", "labels", "queries", "refs", "label_map")


def aggregates(function: Callable[..., Any], beside: bool) -> bool:
    """Whether a `reward_fn` makes the reward out of the other scores, as LightRFT's do.

    It does when its signature names `model_reward_list`. Where it stands beside models, servers or functions, so does
    one that takes **kwargs, unless it names something that LightRFT gives to none: a function of TRL's form, with
    `prompts` or `completions`, is a reward of its own.
    """
    signature = Signature(function, callable_name(function))
    if "model_reward_list" in signature.names:
        return True
    foreign = [n for n in signature.names if n not in LIGHTRFT_INPUTS and (n in INPUTS or n in signature.required)]
    return beside and signature.takes_all and not foreign


def _images(batch: RewardBatch) -> list[Any]:
    """Generated: one image a sample, as diffusion rewards expect; else each sample's list of prompt images."""
    return [sample[0] if sample else None for sample in batch.images] if batch.generated else batch.images


def _videos(batch: RewardBatch) -> list[Any]:
    return [sample[0] if sample else None for sample in batch.videos] if batch.generated else batch.videos


INPUTS: dict[str, Callable[[RewardBatch], Any]] = {
    "queries": lambda batch: batch.queries,
    "prompts": lambda batch: batch.prompts,
    "completions": lambda batch: batch.responses,
    "responses": lambda batch: batch.responses,
    "completion_ids": lambda batch: [tokens.tolist() for tokens in batch.completion_tokens],
    "images": _images,
    "videos": _videos,
    "source_images": lambda batch: batch.source_images or [[] for _ in range(len(batch))],
    "frames": lambda batch: [batch.frames(i) for i in range(len(batch))],
    "labels": lambda batch: batch.labels,
    "references": lambda batch: batch.references,
    "refs": lambda batch: batch.references,
    "labels_or_references": lambda batch: batch.labels_or_references,
    "metadata": lambda batch: batch.metadata,
    "ids": lambda batch: batch.ids,
    "group_ids": lambda batch: batch.group_ids,
}
# Given to a signature that names them, not to **kwargs; source images also to **kwargs where there are some.
ON_DEMAND = ("frames", "labels_or_references", "prompt", "source_images")
# Dataset columns that the loader reads as prompt, label or reference, under the names that functions ask for.
FALLBACKS: dict[str, Callable[[RewardBatch], Any]] = {
    "prompt": lambda batch: batch.prompts,
    "label": lambda batch: batch.labels,
    **dict.fromkeys(("reference", "answer", "answers", "ground_truth", "solution"), lambda batch: batch.references),
}
RESERVED = ("model_reward_list", "label_map", "batch", "device")


def check_inputs(
    function: Callable[..., Any],
    name: str,
    settings: Mapping[str, Any],
    columns: Collection[str] | None,
    form: str = AUTO,
) -> None:
    """ConfigError for settings that the function does not take, and for a parameter that no run of this data fills.

    columns: of the data; None where they are not known yet.
    """
    signature = Signature(function, name)
    for setting in settings:
        if setting not in signature.names and not signature.takes_all:
            hint = did_you_mean(setting, signature.names)
            raise ConfigError(f"reward function {name} takes no setting {setting!r}{hint}")
    if columns is None:
        return
    own = forms.choose(form, function, signature).inputs
    known = [*INPUTS, *RESERVED, *FALLBACKS, *own, *columns, *settings]
    for parameter in signature.required:
        if parameter not in known:
            raise ConfigError(_unknown_input(name, parameter, known))


def _unknown_input(name: str, parameter: str, known: Iterable[str]) -> str:
    return (
        f"reward function {name} asks for {parameter!r}, which is neither a reward input nor a data column"
        f"{did_you_mean(parameter, known)} (columns of pictures and videos are given as images and videos)"
    )


def bind(
    signature: Signature, name: str, batch: RewardBatch, given: Mapping[str, Any], form: Form = forms.NATIVE
) -> dict[str, Any]:
    """Keyword arguments for one call, the function's own copies. `form` may give inputs of its own.

    Raises RewardError when a required parameter is neither input nor column.
    """
    columns, special = batch.columns, form.inputs
    wanted = dict.fromkeys(signature.names)
    if signature.takes_all:
        mine = special if form.told else ()
        known = () if form.closed else [k for k in (*INPUTS, *FALLBACKS, *mine) if k not in ON_DEMAND]
        known = [*known, "source_images"] if any(batch.source_images) and not form.closed else known
        wanted |= dict.fromkeys([*known, *(() if form.closed else sorted(columns)), *given])
    arguments: dict[str, Any] = {}
    for parameter in wanted:
        if parameter in given:
            arguments[parameter] = given[parameter]
        elif parameter in special:
            arguments[parameter] = special[parameter](batch)
        elif parameter == "batch":
            arguments[parameter] = batch.select(range(len(batch)))
        elif parameter in INPUTS:
            arguments[parameter] = INPUTS[parameter](batch)
        elif parameter in columns:
            arguments[parameter] = [sample.get(parameter) for sample in batch.metadata]
        elif parameter in FALLBACKS:
            arguments[parameter] = FALLBACKS[parameter](batch)
        elif parameter in signature.required:
            raise RewardError(_unknown_input(name, parameter, [*INPUTS, *RESERVED, *FALLBACKS, *special, *columns]))
    return own(arguments, {})


def own(value: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    """A copy that its receiver may change without anyone else seeing it. Images are shared until they are changed,
    arrays cannot be changed. `copies`: of tensors, made once; with the original, so that its id stays its own."""
    if isinstance(value, Image.Image):
        value.load()
        view = value._new(value.im)
        view.readonly = 1  # PIL copies the pixels before the first change
        return view
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), (value, value.clone()))[1]
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    if type(value) is dict:
        return {key: own(entry, copies) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)([own(entry, copies) for entry in value])
    if isinstance(value, RewardBatch):
        return RewardBatch(**{name: own(entry, copies) for name, entry in vars(value).items()})
    return value


class CallableSource:
    """A callable as a scorer of batches. `given`: fixed arguments such as label_map, passed when the signature asks.
    form: the system whose functions are called like this one, see `forms.FORMS`; 'auto' goes by the signature.

    lenient: what the function cannot score is invalid, see `score`.

    A function that takes nothing, or nothing but `device`, makes the scorer and is called now (flow_grpo's factories).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        given: Mapping[str, Any] | None = None,
        form: str = AUTO,
        device: Any = "cpu",
        lenient: bool = False,
    ) -> None:
        self.lenient = lenient
        if not callable(function):
            raise ConfigError(f"reward function {name or function!r} is not callable")
        self.name = name or callable_name(function)
        self.function = self._made(function, device)
        self.signature = Signature(self.function, self.name)
        self.form = forms.choose(form, self.function, self.signature)
        self.given = dict(given or {})
        if self.form.told:
            log.info("reward function %s: %s; reward_form chooses another", self.name, self.form.told)

    def _made(self, function: Callable[..., Any], device: Any) -> Callable[..., Any]:
        signature = Signature(function, self.name)
        if not isinstance(function, LoadedFunction) or signature.takes_all or set(signature.names) - {"device"}:
            return function
        made = call(function, self.name, {"device": torch.device(device)} if signature.names else {})
        if not callable(made):
            raise ConfigError(
                f"reward function {self.name} names no input: name what it reads, such as completions and references"
            )
        return made

    def score(self, batch: RewardBatch, how: Call | None = None) -> Scores:
        """Scores of every sample of the batch, in one call. Raises RewardError as `parse_result` and `call` do.

        A lenient one never fails for what the function raises or returns: of a batch that it cannot score it is asked
        for halves, until the samples are found that it fails on; these are invalid.
        """
        try:
            return self._score(batch, how)
        except (UserCodeExited, StoppedBySignal):
            raise
        except RewardError as error:
            if not self.lenient:
                raise
            log.warning("%s\nsamples that it fails on are left out (on_reward_error skip)", error)
            return self._in_halves(batch, how, error)

    def _in_halves(self, batch: RewardBatch, how: Call | None, error: RewardError) -> Scores:
        """Scores of a batch that the function raised `error` on as a whole."""
        if len(batch) == 1:
            return Scores.all_failed(1, str(error).partition("\n")[0])
        middle, scores = len(batch) // 2, []
        for part in (range(middle), range(middle, len(batch))):
            half = batch.select(part)
            try:
                scores.append(self._score(half, how))
            except (UserCodeExited, StoppedBySignal):
                raise
            except RewardError as again:
                scores.append(self._in_halves(half, how, again))
        return Scores.join(scores)

    def _score(self, batch: RewardBatch, how: Call | None) -> Scores:
        form = self.form.for_batch(batch)
        given = dict(self.given)
        if "device" in self.signature.names:
            given["device"] = how.device if how else "cpu"
        arguments = bind(self.signature, self.name, batch, given, form)
        try:
            result = call(self.function, self.name, form.calls(arguments, given, len(batch)))
        except ScoringFailed as failure:
            return Scores.all_failed(len(batch), str(failure))
        returned = f"reward function {self.name} returned a {type(result).__name__} that cannot be read: it"
        try:
            with AsRewardError(returned):
                return parse_result(form.read(result, self.name), self.name, len(batch), self.lenient)
        except RewardError as error:
            raise RewardError(f"{error}{defined_at(self.function)}") from error
