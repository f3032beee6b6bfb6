"""User callables as scorers: what a function's signature names is given to it by keyword.

So TRL's `f(prompts, completions, **columns)` and LightRFT's `reward_fn(model_reward_list, labels, queries, refs,
label_map)` work as they are, sync or async; `registry.reward_forms` has systems that call their functions otherwise.
"""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...errors import ConfigError, RewardError, StoppedBySignal, did_you_mean
from ...experience.rollouts import Episode, Turn
from ...given import unique_name
from ...runtime.usercode.calls import POSITIONAL, SAMPLES, AsRewardError, LoadedFunction, UserCodeExited, call
from ...runtime.usercode.loading import callable_name, defined_at
from ...runtime.usercode.sandbox import signature_of
from ..batch import MAX_SCORE, Call, Failed, RewardBatch, Scores, ScoringFailed, Source, metric_name
from .forms import AUTO, NATIVE, Form, Inputs, choose_form, reads_token_ids, tells_of_messages

log = logging.getLogger(__name__)
SCORE_KEYS = ("rewards", "scores", "score", "reward", "overall")


def parse_result(result: Any, name: str, size: int, lenient: bool = False) -> Scores:
    """Read what a local callable returned.

    Raises RewardError that names the function for a wrong length or type, and for a score that is not a plain number
    within ±MAX_SCORE: that is a bug of the function and must not reach training.

    Args:
        result: a list (None = not applicable), a tensor or array, (scores, metrics), or a dict with one of SCORE_KEYS;
            metrics may be None.
        name: of the function, for the error.
        size: samples that it was given.
        lenient: a sample with such a score is failed instead.
    """
    scores, metrics = result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | None):
        one_each = not isinstance(result[0], list | tuple) and not getattr(result[0], "ndim", 0)  # of two samples
        scores, metrics = (result, {}) if result[1] is None and one_each else (result[0], result[1] or {})
    elif isinstance(result, Mapping):
        key = score_key(result, f"reward function {name} returned a dict")
        scores = result[key]
        metrics = {k: v for k, v in result.items() if k not in (key, "scores", "extra_logs") and v is not None}
        metrics |= result.get("extra_logs") or {}
    read = _read_scores(scores, name, size, lenient)
    for key, value in metrics.items():
        numbers, broken = _read_metric(value, f"{name}: metric {key!r}", size)
        unique = unique_name(metric_name(key), read.extras)
        read.extras[unique], read.broken[unique] = numbers, broken
    return read


def score_key(result: Mapping[str, Any], what: str) -> str:
    """Which of SCORE_KEYS holds the scores. Raises RewardError where none does, and where it could be two, none of them
    `rewards`. what: begins the error."""
    found = [key for key in SCORE_KEYS if key in result]
    if not found:
        raise RewardError(f"{what} without scores: give it one of {SCORE_KEYS}")
    if len(found) > 1 and found[0] != "rewards":
        raise RewardError(f"{what} with {' and '.join(found)}, any of which could be the score: rename the others")
    return found[0]


def as_list(scores: Any, name: str, what: str = "reward function") -> Sequence[Any]:
    """A flat list of scores.

    Args:
        scores: a list, tuple, tensor or array of shape (n) or (n, 1).
        name: of what returned them, for the error.
        what: that is, such as "reward model", for the error.
    """
    if isinstance(scores, torch.Tensor):
        if scores.is_complex():
            raise RewardError(f"{what} {name} returned complex numbers; one real score a sample, please")
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


def _read_scores(scores: Any, name: str, size: int, lenient: bool) -> Scores:
    """The scores that a function returned, without the numbers beside them."""
    if size == 1 and getattr(scores, "shape", None) == ():  # of one that ends in .squeeze()
        scores = scores.reshape(1)
    entries = as_list(scores, name)
    if len(entries) != size:
        raise RewardError(f"reward function {name} returned {len(entries)} scores for {size} samples")
    outcomes: list[float | Failed | None] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, torch.Tensor) and entry.numel() == 1:
            entry = entry.item()
        elif isinstance(entry, (np.ndarray, np.generic)) and entry.size == 1:
            (entry,) = entry.reshape(-1).tolist()  # None of np.ma.masked, whose item() is 0
        problem = None if isinstance(entry, Failed) else problem_of(entry)
        if problem is not None and not lenient:
            raise RewardError(f"reward function {name}: score {index} of {size} {problem}")
        outcomes.append(entry if problem is None else Failed(problem))
    return Scores.of(outcomes)


def problem_of(entry: Any) -> str | None:
    """Why an entry is no plain finite number within ±MAX_SCORE, without the value of a non-number; None where it is
    one, or None."""
    if entry is None:
        return None
    if not isinstance(entry, (bool, int, float)):
        return f"is a {type(entry).__name__}, not a number"
    if isinstance(entry, float) and not math.isfinite(entry):
        return f"is not finite ({entry}); return None where the reward does not apply"
    if abs(entry) > MAX_SCORE:
        shown = f"{float(entry):.3g}" if abs(entry) < 1e300 else "a number of more than 300 digits"
        return f"is {shown}, beyond ±{MAX_SCORE:.0e}"
    return None


def _read_metric(value: Any, what: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(size) float64 from one number a sample or one for all; None and NaN mean no value. (size) bool: which are a NaN
    that was given, and so no score."""
    one_for_all = isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ()
    entries = [value] * size if one_for_all else as_list(value, what)
    if len(entries) != size:
        raise RewardError(f"reward function {what} has {len(entries)} values for {size} samples")
    try:
        numbers = [math.nan if entry is None else float(entry) for entry in entries]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"reward function {what} holds something that is not a number") from error
    broken = [entry is not None and number != number for entry, number in zip(entries, numbers)]
    return torch.tensor(numbers, dtype=torch.float64), torch.tensor(broken, dtype=torch.bool)


class Signature:
    """The keyword parameters of a callable. Raises ConfigError when it has none that can be read.

    by_position: it has *args, and is called with queries, prompts and labels or references, as LightRFT's functions
    are; names and required are then of what else it takes.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            parameters = signature_of(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the signature of reward function {name} cannot be read; wrap it in a def") from error
        fixed = [p for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
        if fixed:
            raise ConfigError(f"reward function {name} has a positional-only parameter {fixed[0].name!r}")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = [p.name for p in named]
        self.required = [p.name for p in named if p.default is p.empty]
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        first = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD]
        spread = any(p.kind == p.VAR_POSITIONAL for p in parameters) and not self.takes_all
        self.by_position = spread and at_own_positions(first)
        if self.by_position:
            self.names, self.required = ([n for n in own if n not in first] for own in (self.names, self.required))


LIGHTRFT_INPUTS = ("model_reward_list", "labels", "queries", "refs", "label_map")


def aggregates(function: Callable[..., Any], beside: bool) -> bool:
    """Whether a `reward_fn` makes the reward out of the other scores, as LightRFT's do.

    It does when its signature names `model_reward_list`. Where it stands beside models, servers or functions, so does
    one whose only parameter is no input of rewards, which LightRFT gives the scores of several servers, and one that
    takes **kwargs, unless it names something that LightRFT gives to none: a function of TRL's form, with `prompts` or
    `completions`, is a reward of its own, and so is a torch module that reads token ids.
    """
    if isinstance(function, LoadedFunction) and reads_token_ids(function.function):
        return False
    signature = Signature(function, callable_name(function))
    if "model_reward_list" in signature.names:
        return True
    if beside and len(signature.required) == 1 and not signature.takes_all and not known_input(signature.required[0]):
        return True
    foreign = [n for n in signature.names if n not in LIGHTRFT_INPUTS and (n in INPUTS or n in signature.required)]
    return beside and signature.takes_all and not foreign


OWN_POSITIONS = (("queries",), ("prompts", "prompt"), ("labels", "label", "references", "reference", "refs", "answers"))


def at_own_positions(names: Sequence[str]) -> bool:
    """Whether parameters may be (queries, prompts, labels or references): by names of their own, or by these."""
    fitting = (name in own or not known_input(name) for name, own in zip(names, OWN_POSITIONS))
    return len(names) <= len(OWN_POSITIONS) and all(fitting)


def scores_parameter(signature: Signature) -> str:
    """Where a function that aggregates gets the list of the other scores."""
    by_name = "model_reward_list" in signature.names or signature.takes_all
    return "model_reward_list" if by_name else signature.required[0]


def known_input(name: str) -> bool:
    """Whether a parameter of this name is a reward input, whatever the data's columns are."""
    return name in (*INPUTS, *FALLBACKS, *RESERVED)


def _shown(batch: RewardBatch, media: list[list[Any]]) -> list[Any]:
    """Generated: one image or video a sample, as diffusion rewards expect; else each sample's list of the prompt's."""
    return [sample[0] if sample else None for sample in media] if batch.generated else media


def _single(media: list[list[Any]]) -> list[Any]:
    """The one image or video of each sample; None where it has none, a list where it has several."""
    return [sample[0] if len(sample) == 1 else sample or None for sample in media]


def turns_of(episode: Episode | None) -> list[dict[str, Any]]:
    """The turns of an episode in plain values, without its media; an empty one where it failed before its first."""
    told = ("text", "reward", "observation", "calls")
    return [{name: getattr(turn, name) for name in told} for turn in episode.turns or [Turn("")]] if episode else []


INPUTS: dict[str, Callable[[RewardBatch], Any]] = {
    "queries": lambda batch: batch.queries,
    "prompts": lambda batch: batch.prompts,
    "completions": lambda batch: batch.responses,
    "responses": lambda batch: batch.responses,
    "completion_ids": lambda batch: [tokens.tolist() for tokens in batch.completion_tokens],
    "images": lambda batch: _shown(batch, batch.images),
    "videos": lambda batch: _shown(batch, batch.videos),
    "source_images": lambda batch: batch.source_images or [[] for _ in range(len(batch))],
    "frames": lambda batch: [batch.frames(i) for i in range(len(batch))],
    "labels": lambda batch: batch.labels,
    "references": lambda batch: batch.references,
    "refs": lambda batch: batch.references,
    "labels_or_references": lambda batch: batch.labels_or_references,
    "metadata": lambda batch: batch.metadata,
    "ids": lambda batch: batch.ids,
    "group_ids": lambda batch: batch.group_ids,
    "turns": lambda batch: [turns_of(episode) for episode in batch.episodes] or [[] for _ in range(len(batch))],
    "environment_rewards": lambda batch: [e.reward if e else 0.0 for e in batch.episodes] or [0.0] * len(batch),
}
# Given to a signature that names them, and to **kwargs only what is of tokens, edits and episodes, where there are any;
# else **kwargs get columns of these names.
OF_EPISODES = ("turns", "environment_rewards")
OF_MEDIA = ("frames", "image", "video", "source_images")
ON_DEMAND = (*OF_MEDIA, *OF_EPISODES, "labels_or_references", "prompt", "batch", "completion_ids")
# Dataset columns that the loader reads as prompt, media, label or reference, under the names that functions ask for.
ANSWERS = ("reference", "answer", "answers", "ground_truth", "solution")
REFERENCES = frozenset((*ANSWERS, "references", "refs"))  # what functions of one's own call them
FALLBACKS: dict[str, Callable[[RewardBatch], Any]] = {
    "prompt": lambda batch: batch.prompts,
    "image": lambda batch: _single(batch.images),
    "video": lambda batch: _single(batch.videos),
    "label": lambda batch: batch.labels,
    **dict.fromkeys(ANSWERS, lambda batch: batch.references),
}
ROLES = ("prompts", "labels", "references", "refs")  # a column of such a name may be the one that is read as that
RESERVED = ("model_reward_list", "label_map", "batch", "device")


def check_inputs(
    function: Callable[..., Any],
    name: str,
    settings: Mapping[str, Any],
    columns: Collection[str] | None,
    form: str = AUTO,
) -> None:
    """ConfigError for settings that the function does not take, and for a parameter that no run of this data fills. A
    warning for one that is filled by the run's own input in place of a column, also of **kwargs.

    Args:
        function: a reward function.
        name: of it, for the error.
        settings: by parameter, such as those of a recipe.
        columns: of the data; None where they are not known yet.
        form: `reward_form`.
    """
    signature = Signature(function, name)
    for setting in settings:
        if setting not in signature.names and not signature.takes_all:
            hint = did_you_mean(setting, signature.names)
            raise ConfigError(f"reward function {name} takes no setting {setting!r}{hint}")
    if columns is None:
        return
    chosen = choose_form(form, function, signature)
    own = {*INPUTS, *RESERVED} - {*OF_EPISODES, *ROLES, *settings, *(chosen.inputs if chosen.positions else ())}
    every = [key for key in INPUTS if key not in ON_DEMAND] if signature.takes_all and not chosen.closed else []
    if taken := [key for key in dict.fromkeys([*signature.names, *every]) if key in own.intersection(columns)]:
        tell_once(f"{name} gets the run's own {', '.join(taken)}; the columns of these names are in metadata")
    known = [*INPUTS, *RESERVED, *FALLBACKS, *chosen.inputs, *columns, *settings]
    for parameter in signature.required:
        if parameter not in known:
            raise ConfigError(_unknown_input(name, parameter, known))


def _unknown_input(name: str, parameter: str, known: Iterable[str]) -> str:
    if parameter == "environments":  # as TRL gives them
        told = "which have ended by now: leave it out where it reads their `reward` or `get_reward`, which are added"
        return f"reward function {name} asks for environments, {told}; environment_rewards and turns say what they gave"
    return (
        f"reward function {name} asks for {parameter!r}, which is neither a reward input nor a data column"
        f"{did_you_mean(parameter, known)} (columns of pictures and videos are given as images and videos; a setting "
        f"of its own is reward.kwargs.NAME.{parameter}=VALUE, beside reward.components.NAME=1 "
        "reward.kwargs.NAME.scorer=path.py:function)"
    )


def _columns(names: Iterable[str]) -> Inputs:
    """Inputs that are columns of the data."""
    return {name: lambda batch, name=name: [sample.get(name) for sample in batch.metadata] for name in names}


def _bind(
    signature: Signature, name: str, batch: RewardBatch, given: Mapping[str, Any], form: Form = NATIVE
) -> dict[str, Any]:
    """Keyword arguments for one call. `form` may give inputs of its own.

    Raises RewardError when a required parameter is neither input nor column.
    """
    columns = batch.columns
    wanted = dict.fromkeys(signature.names)
    more = ["source_images"] if any(batch.source_images) else []
    more += OF_EPISODES if batch.episodes else []
    more += ["completion_ids"] if batch.completion_tokens else []
    if signature.takes_all and not form.closed:
        usual = [*INPUTS, *FALLBACKS, *(form.inputs if form.told else ())]
        wanted |= dict.fromkeys([*(key for key in usual if key not in ON_DEMAND), *more, *sorted(columns)])
    if signature.takes_all:
        ours = {"label_map", "model_reward_list"} if form.closed else set()  # which no other system gives
        wanted |= dict.fromkeys([*(form.inputs if form.by_name else ()), *(key for key in given if key not in ours)])
    read: dict[str, Callable[[RewardBatch], Any]] = {
        **FALLBACKS,
        **_columns(columns),
        **INPUTS,
        "batch": lambda batch: batch.select(range(len(batch))),
        **_columns(columns.intersection(ON_DEMAND).difference(more, {*signature.names} - {*OF_EPISODES})),
        **form.inputs,
        **{key: lambda batch, value=value: value for key, value in given.items()},
    }
    for parameter in signature.required:
        if parameter not in read:
            raise RewardError(_unknown_input(name, parameter, [*read, *RESERVED]))
    return {key: read[key](batch) for key in wanted if key in read}


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


@cache
def tell_once(told: str, level: int = logging.WARNING) -> None:
    """Once in a process: a function is checked more often, and asked before the run as well."""
    log.log(level, "reward function %s", told)


class CallableSource(Source):
    """A callable as a scorer of batches. `given`: fixed arguments such as label_map, passed when the signature asks.
    form: the system whose functions are called like this one, of `registry.reward_forms`; 'auto' goes by the signature.

    lenient: what the function cannot score is invalid, see `score`. copies: whether it gets tensors of its own, as it
    may change them.

    A class of a file, and a function there that takes nothing but settings and `device` (flow_grpo's factories), make
    the scorer and are called now.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        given: Mapping[str, Any] | None = None,
        form: str = AUTO,
        device: Any = "cpu",
        lenient: bool = False,
        copies: bool = True,
    ) -> None:
        self.lenient, self.copies = lenient, copies
        if not callable(function):
            raise ConfigError(f"reward function {name or function!r} is not callable")
        self.name, self.given = name or callable_name(function), dict(given or {})
        self.function = self._made(function, device)
        self.signature = Signature(self.function, self.name)
        self.uses_device = "device" in {*Signature(function, self.name).names, *self.signature.names}
        self.form = choose_form(form, self.function, self.signature)
        bound = self.function.keywords if isinstance(self.function, partial) else {}
        self._bound = {*bound}.difference(self.given)  # no column takes its place
        if self.form.told:
            tell_once(f"{self.name}: {self.form.told}; reward_form chooses another", logging.INFO)

    def _made(self, function: Callable[..., Any], device: Any) -> Callable[..., Any]:
        """The function, or what it makes; then the settings that it takes are no longer in `given`."""
        if not isinstance(function, LoadedFunction):
            return function
        signature, settings = Signature(function, self.name), {*self.given}.difference(RESERVED)
        if "device" in signature.names:  # then other defaults are of settings too, as in flow_grpo's `multi_score`
            settings |= {n for n in {*signature.names}.difference(signature.required) if not known_input(n)}
        reads = signature.by_position or signature.takes_all or {*signature.names}.difference(settings, ["device"])
        if reads and not inspect.isclass(function.function):
            return function
        own = {*self.given} & ({*signature.names} | (settings if signature.takes_all else set()))
        arguments = {name: self.given.pop(name) for name in own}
        arguments |= {"device": torch.device(device)} if "device" in signature.names else {}
        made = call(function, self.name, arguments)
        if not callable(made):
            raise ConfigError(f"reward function {self.name} names no input, such as completions, and makes no function")
        return made

    def score(self, batch: RewardBatch, how: Call | None = None, told: bool = False) -> Scores:
        """Scores of every sample of the batch, in one call. Raises RewardError as `parse_result` and `call` do.

        A lenient one never fails for what the function raises or returns: of a batch that it cannot score it is asked
        for halves, until the samples are found that it fails on; these are invalid.

        Args:
            batch: of samples that the function has not scored.
            how: for its device, where the function has a parameter of that name; None: the CPU.
            told: whether it is logged already that samples are left out.
        """
        try:
            return self._score(batch, how)
        except (UserCodeExited, StoppedBySignal):
            raise
        except RewardError as error:
            if not self.lenient:
                raise
            if not told:
                log.warning("%s\nsamples that it fails on are left out (on_reward_error skip)", error)
            if len(batch) == 1:
                return Scores.all_failed(1, str(error).partition("\n")[0])
        middle = len(batch) // 2
        halves = batch.select(range(middle)), batch.select(range(middle, len(batch)))
        return Scores.join([self.score(half, how, told=True) for half in halves])

    def _score(self, batch: RewardBatch, how: Call | None) -> Scores:
        form = self.form
        if form.media and not batch.generated:
            form = NATIVE  # such a batch is not what the form is meant for
        if form.positions:
            form = replace(form, inputs={**form.inputs, **_columns(batch.columns & form.inputs.keys())})
        reads, media = {*self.signature.names}, {"images", "videos", "frames", "image", "video", "batch"}
        if batch.generated and reads & {"completions", "responses"} and not (reads & media or self.signature.takes_all):
            blind = "reads responses, which are empty for what a model draws, and no images or videos"
            tell_once(f"{self.name} {blind}")
        given = dict(self.given)
        if "device" in self.signature.names:
            given["device"] = how.device if how else "cpu"
        arguments = _bind(self.signature, self.name, batch, given, form)
        arguments = {name: value for name, value in arguments.items() if name not in self._bound}
        if self.copies:
            arguments = own(arguments, {})
        if self.signature.by_position:
            arguments[POSITIONAL] = own([batch.queries, batch.prompts, batch.labels_or_references], {})
        elif form.each:  # what is given is the same for every sample
            columns, size = arguments, len(batch)
            arguments = {SAMPLES: [{k: v if k in given else v[i] for k, v in columns.items()} for i in range(size)]}
        try:
            with tells_of_messages(arguments, form):
                result = call(self.function, self.name, arguments)
        except ScoringFailed as failure:
            return Scores.all_failed(len(batch), str(failure))
        returned = f"reward function {self.name} returned a {type(result).__name__} that cannot be read: it"
        try:
            with AsRewardError(returned):
                result = form.read(result, self.name) if form.read else result
                return parse_result(result, self.name, len(batch), self.lenient)
        except RewardError as error:
            raise RewardError(f"{error}{defined_at(self.function)}") from error
