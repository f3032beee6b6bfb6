"""User callables as scorers: keyword adaptation, loading from `path.py:name`, strict reading of what they return.

One function is given, by keyword, what its signature names, so TRL's `f(prompts, completions, **columns)`, LightRFT's
`reward_fn(model_reward_list, labels, queries, refs, label_map)` and OpenRLHF's `reward_func(queries, prompts, labels)`
work as they are, sync or async.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError, RewardError, did_you_mean
from ..background import shared_loop
from ..batch import Call, Failed, RewardBatch, Scores, ScoringFailed

SCORE_KEYS = ("rewards", "scores", "score", "reward")
MAX_SCORE = 1e6  # no sane reward is larger; beyond it a server or function is broken


def load_reward_fn(spec: str) -> Callable[..., Any]:
    """The callable of `path.py:name`. Raises ConfigError for a missing file, a failing import, or a missing name."""
    path_text, _, name = spec.rpartition(":")
    if not path_text or not name.isidentifier():
        raise ConfigError(f"reward function {spec!r}: write it as path.py:function")
    namespace = vars(load_module(path_text))
    if not callable(namespace.get(name)):
        functions = [k for k, v in namespace.items() if inspect.isroutine(v) and not k.startswith("_")]
        raise ConfigError(f"{path_text} has no function {name!r}{did_you_mean(name, functions)}")
    return LoadedFunction(namespace[name], spec)


class LoadedFunction:
    """A callable that remembers the `path.py:name` it came from, so that a process of its own can load it again."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.spec = function, spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def load_module(path_text: str) -> Any:
    """Import a Python file by path, under a name of its own, so that two `rewards.py` do not hide each other."""
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"reward file {path_text} does not exist")
    if path.suffix != ".py":
        raise ConfigError(f"reward file {path_text} is not a Python file (.py)")
    module_name = f"_lightrft_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    specification = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module  # dataclasses and pickling look the module up by name
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"reward file {path_text} fails on import: {type(error).__name__}: {error}") from error
    return module


def callable_name(function: Callable[..., Any]) -> str:
    """A short name for messages and metrics: the function's own, or its class's."""
    while isinstance(function, (functools.partial, LoadedFunction)):
        function = function.func if isinstance(function, functools.partial) else function.function
    return function.__name__ if inspect.isroutine(function) or inspect.isclass(function) else type(function).__name__


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


def labels_or_references(batch: RewardBatch) -> list[Any]:
    """References where the data has any, else labels (OpenRLHF's `labels` are reference answers)."""
    return batch.references if any(r is not None for r in batch.references) else batch.labels


def _images(batch: RewardBatch) -> list[Any]:
    """Generated: one picture a sample, as diffusion rewards expect; else each sample's list of prompt pictures."""
    return [row[0] if row else None for row in batch.images] if batch.generated else batch.images


def _videos(batch: RewardBatch) -> list[Any]:
    return [row[0] if row else None for row in batch.videos] if batch.generated else batch.videos


INPUTS: dict[str, Callable[[RewardBatch], Any]] = {
    "queries": lambda batch: batch.queries,
    "prompts": lambda batch: batch.prompts,
    "completions": lambda batch: batch.responses,
    "responses": lambda batch: batch.responses,
    "completion_ids": lambda batch: [tokens.tolist() for tokens in batch.completion_tokens],
    "images": _images,
    "videos": _videos,
    "frames": lambda batch: [batch.frames(i) for i in range(len(batch))],
    "labels": lambda batch: batch.labels,
    "references": lambda batch: batch.references,
    "refs": lambda batch: batch.references,
    "labels_or_references": labels_or_references,
    "metadata": lambda batch: batch.metadata,
    "ids": lambda batch: batch.ids,
    "group_ids": lambda batch: batch.group_ids,
}
ON_DEMAND = ("frames", "labels_or_references", "prompt")  # given to a signature that names them, not to **kwargs
# Dataset columns that the loader reads as prompt, label or reference, under the names that functions ask for.
FALLBACKS: dict[str, Callable[[RewardBatch], Any]] = {
    "prompt": lambda batch: batch.prompts,
    "label": lambda batch: batch.labels,
    **dict.fromkeys(("reference", "answer", "answers", "ground_truth", "solution"), lambda batch: batch.references),
}
RESERVED = ("model_reward_list", "label_map", "batch", "device")


def check_inputs(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], columns: Collection[str] | None
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
    known = [*INPUTS, *RESERVED, *FALLBACKS, *columns, *settings]
    for parameter in signature.required:
        if parameter not in known:
            raise ConfigError(_unknown_input(name, parameter, known))


def _unknown_input(name: str, parameter: str, known: Iterable[str]) -> str:
    return (
        f"reward function {name} asks for {parameter!r}, which is neither a reward input nor a data column"
        f"{did_you_mean(parameter, known)} (columns of pictures and videos are given as images and videos)"
    )


def bind(signature: Signature, name: str, batch: RewardBatch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for one call. Raises RewardError when a required parameter is neither input nor column."""
    columns = batch.columns
    wanted = dict.fromkeys(signature.names)
    if signature.takes_all:
        known = [k for k in (*INPUTS, *FALLBACKS) if k not in ON_DEMAND]
        wanted |= dict.fromkeys([*known, *sorted(columns), *given])
    arguments: dict[str, Any] = {}
    for parameter in wanted:
        if parameter in given:
            arguments[parameter] = given[parameter]
        elif parameter == "batch":
            arguments[parameter] = batch
        elif parameter in INPUTS:
            arguments[parameter] = INPUTS[parameter](batch)
        elif parameter in columns:
            arguments[parameter] = [row.get(parameter) for row in batch.metadata]
        elif parameter in FALLBACKS:
            arguments[parameter] = FALLBACKS[parameter](batch)
        elif parameter in signature.required:
            raise RewardError(_unknown_input(name, parameter, [*INPUTS, *RESERVED, *FALLBACKS, *columns]))
    return arguments


def call(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
    """Call, and await when the result asks for it. Whatever it raises is chained to a RewardError with its name."""
    try:
        result = function(**arguments)
        return shared_loop().run(_wait(result)) if inspect.isawaitable(result) else result
    except (RewardError, ScoringFailed):
        raise
    except Exception as error:
        raise RewardError(f"reward function {name} raised {type(error).__name__}") from error


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def parse_result(result: Any, name: str, size: int) -> Scores:
    """Read what a local callable returned for `size` samples.

    Forms: a list (None = not applicable), a tensor or array, (scores, metrics), or a dict with one of SCORE_KEYS.
    Raises RewardError that names the function for a wrong length or type, and for a score that is not a plain number
    within ±MAX_SCORE: that is a bug of the function and must not reach training.
    """
    scores, metrics = split_result(result, name)
    values, failed, reasons = read_scores(scores, name, size)
    extras = {key: read_metric(value, f"{name}: metric {key!r}", size) for key, value in metrics.items()}
    return Scores(values, failed, extras, reasons)


def split_result(result: Any, name: str) -> tuple[Any, Mapping[str, Any]]:
    """Scores and metrics of any accepted form."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    if not isinstance(result, Mapping):
        return result, {}
    key = next((k for k in SCORE_KEYS if k in result), None)
    if key is None:
        raise RewardError(f"reward function {name} returned a dict without scores: give it one of {SCORE_KEYS}")
    metrics = {k: v for k, v in result.items() if k not in SCORE_KEYS and k != "extra_logs" and v is not None}
    return result[key], {**metrics, **(result.get("extra_logs") or {})}


def as_list(scores: Any, name: str, what: str = "reward function") -> Sequence[Any]:
    """A flat list from a list, tuple, tensor or array of shape (n) or (n, 1). `what` and `name` are for the error."""
    if isinstance(scores, torch.Tensor):
        scores = scores.detach().cpu().double().numpy()
    if isinstance(scores, np.ndarray):
        if scores.ndim == 2 and scores.shape[1] == 1:
            scores = scores[:, 0]
        if scores.ndim != 1:
            raise RewardError(f"{what} {name} returned shape {tuple(scores.shape)}; one score a sample, please")
        return scores.tolist()
    if isinstance(scores, (list, tuple)):
        return scores
    raise RewardError(f"{what} {name} returned {type(scores).__name__}; give a list or tensor of scores")


def read_scores(scores: Any, name: str, size: int) -> tuple[torch.Tensor, torch.Tensor, Counter[str]]:
    """values (size) float64, failed (size) bool and the reasons of the failures."""
    entries = as_list(scores, name)
    if len(entries) != size:
        raise RewardError(f"reward function {name} returned {len(entries)} scores for {size} samples")
    values = torch.full((size,), float("nan"), dtype=torch.float64)
    failed = torch.zeros(size, dtype=torch.bool)
    reasons: Counter[str] = Counter()
    for index, entry in enumerate(entries):
        if isinstance(entry, Failed):
            failed[index] = True
            reasons[entry.reason] += 1
        elif entry is not None:
            values[index] = to_number(entry, f"reward function {name}: score {index} of {size}")
    return values, failed, reasons


def to_number(entry: Any, what: str) -> float:
    """A plain finite float within ±MAX_SCORE, or a RewardError that does not repeat the value of a non-number."""
    if isinstance(entry, (torch.Tensor, np.ndarray, np.generic)) and entry.size == 1:
        entry = entry.item()
    if isinstance(entry, torch.Tensor) and entry.numel() == 1:
        entry = entry.item()
    if not isinstance(entry, (bool, int, float)):
        raise RewardError(f"{what} is a {type(entry).__name__}, not a number")
    if not math.isfinite(entry):
        raise RewardError(f"{what} is not finite ({float(entry)}); return None where the reward does not apply")
    if abs(entry) > MAX_SCORE:
        raise RewardError(f"{what} is {float(entry):.3g}, beyond ±{MAX_SCORE:.0e}")
    return float(entry)


def read_metric(value: Any, what: str, size: int) -> torch.Tensor:
    """(size) float64 from one number a sample or one for all; None and NaN mean no value."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, (torch.Tensor, np.generic)) and value.ndim == 0):
        return torch.full((size,), float(value), dtype=torch.float64)
    entries = [float("nan") if entry is None else entry for entry in as_list(value, what)]
    if len(entries) != size:
        raise RewardError(f"reward function {what} has {len(entries)} values for {size} samples")
    try:
        return torch.tensor([float(entry) for entry in entries], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {what} holds something that is not a number") from error


class CallableSource:
    """A callable as a scorer of batches. `given`: fixed arguments such as label_map, passed when the signature asks."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, given: Mapping[str, Any] | None = None):
        if not callable(function):
            raise ConfigError(f"reward function {name or function!r} is not callable")
        self.function = function
        self.name = name or callable_name(function)
        self.signature = Signature(function, self.name)
        self.given = dict(given or {})

    def score(self, batch: RewardBatch, how: Call | None = None) -> Scores:
        """Scores of every sample of the batch, in one call. Raises RewardError as `parse_result` and `call` do."""
        given = dict(self.given)
        if "device" in self.signature.names:
            given["device"] = how.device if how else "cpu"
        arguments = bind(self.signature, self.name, batch, given)
        try:
            return parse_result(call(self.function, self.name, arguments), self.name, len(batch))
        except ScoringFailed as failure:
            return Scores.all_failed(len(batch), str(failure))
