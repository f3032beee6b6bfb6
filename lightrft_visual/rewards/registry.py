"""Scorers by name, from config/registry.py: built-in ones, imported on first use, and those a user registers."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..config import registry
from ..config.placement import ResourcesConfig
from ..config.shared import RewardConfig
from ..errors import ConfigError, did_you_mean
from ..given import given, is_given, unique_name
from ..runtime.packages import is_shipped
from ..runtime.usercode.calls import LoadedFunction
from ..runtime.usercode.loading import callable_name, load_reward_fn
from ..runtime.usercode.sandbox import SandboxedCallable
from .batch import Source
from .local.callables import LIGHTRFT_INPUTS, CallableSource
from .local.forms import reads_token_ids
from .recipe import RecipeEntry, check_name
from .remote.wire import wires_of

OTHER_NAMES = {"model_name": "model", "model_path": "model"}  # of a scorer's settings in VRL
Code = TypeVar("Code", bound=Callable[..., Any])


def register_scorer(name: str, about: str = "") -> Callable[[Code], Code]:
    """Decorator: make a function or class known to recipes as `name`.

    A class is built with the recipe's keyword settings and its instances are called; a function is called itself, its
    settings bound by keyword. Raises ConfigError when the name is taken by something else.
    """
    return registry.scorers.register(name, about)


def scorer_names() -> list[str]:
    """All names, sorted."""
    return sorted(registry.scorers.names())


def find_scorer(name: str) -> Callable[..., Any]:
    """The class or function behind a name. Raises ConfigError with the nearest name when there is none."""
    return registry.scorers.load(name)


def check_scorer(name: str, settings: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class or function behind a name, and the settings under its own names; builds nothing.

    Raises ConfigError when the name is unknown or takes no such setting, and for a built-in scorer's setting of another
    type."""
    target = find_scorer(name)
    parameters = inspect.signature(target).parameters
    settings = own_settings(target, settings)
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for key in settings:
        if key not in parameters and not takes_all:
            raise ConfigError(f"scorer {name!r} has no setting {key!r}{did_you_mean(key, parameters)}")
    return target, _typed(name, target, settings) if settings and is_shipped(target) else settings


def _typed(name: str, target: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the types that the target's annotations ask for, so that "0.5" is a number and a list a tuple."""
    from pydantic import TypeAdapter, ValidationError  # seconds into a start, and few recipes have settings

    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    typed = {key: os.fspath(each) if isinstance(each, os.PathLike) else each for key, each in settings.items()}
    for key in settings.keys() & hints.keys():
        try:
            typed[key] = TypeAdapter(hints[key]).validate_python(typed[key])
        except ValidationError as error:
            told = error.errors()[0]["msg"].lower()
            raise ConfigError(f"scorer {name!r}: {key} is {settings[key]!r}: {told}") from None
    return typed


def own_settings(target: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that the scorer has for them: what other systems call `model_name` may be `model`."""
    parameters = inspect.signature(target).parameters
    renamed = {there: here for there, here in OTHER_NAMES.items() if here in parameters and there not in parameters}
    return {renamed.get(key, key): value for key, value in settings.items()}


def build_scorer(
    name: str, settings: Mapping[str, Any] | None = None, reward_config: RewardConfig | None = None
) -> Callable[..., Any]:
    """A ready callable: a class instance, or the function with its settings bound.

    Raises ConfigError for an unknown name or setting, and when a scorer lacks a package, program or checkpoint.

    Args:
        name: of the scorer.
        settings: by its parameters.
        reward_config: of the run, which a class with a parameter of this name gets, and a built-in one's `offload` by
            default; None: their own defaults.
    """
    target, settings = check_scorer(name, settings or {})
    parameters = inspect.signature(target).parameters if inspect.isclass(target) else {}
    settings = of_run(target, reward_config) | settings
    if reward_config is not None and is_shipped(target) and "offload" in parameters:
        settings = {"offload": reward_config.reward_cpu_offload} | settings
    for each in parameters.values():
        named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if named and each.default is each.empty and each.name not in settings:
            raise ConfigError(f"scorer {name!r} needs the setting {each.name!r}")
    return instantiate(target, settings)


def of_run(target: Callable[..., Any], reward_config: RewardConfig | None) -> dict[str, Any]:
    """The setting that a run gives a class which asks for it by a parameter of this name: its reward settings."""
    asks = inspect.isclass(target) and "reward_config" in inspect.signature(target).parameters
    return {"reward_config": reward_config} if asks and reward_config is not None else {}


def instantiate(target: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A class built with its settings, or a function with them bound."""
    if inspect.isclass(target):
        return target(**settings)
    return partial(target, **settings) if settings else target


_NAMED = re.compile(r"^([A-Za-z_][\w-]*)=(.+)$")


def split_list(value: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Entries of a comma-separated string or of a list, without empty ones."""
    entries = str(value).split(",") if isinstance(value, str | Path) else list(value or ())
    return [name for entry in entries if (name := str(entry).strip())]


def named_entries(value: str | Path | Sequence[str | Path] | None) -> dict[str, str]:
    """{name: entry} of `name=entry` items; an unnamed one is called by its place, '0', '1', ..."""
    return _by_name("rewards", split_list(value), str)


def _by_name(what: str, entries: Sequence[Any], usual: Callable[[int], str]) -> dict[str, Any]:
    """{name: entry} of entries that may be `name=entry`; usual: the name of another one, by its number."""
    named: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        match = _NAMED.match(entry) if isinstance(entry, str) else None
        name, target = match.groups() if match else (usual(index), entry)
        if name in named:
            raise ConfigError(f"two {what} are named {name!r}")
        named[name] = target
    return named


class Catalogue:
    """Builds sources from a configuration and closes them again."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: Any = None,
        packing_samples: bool = False,
        device: Any = "cpu",
        strategy: Any = None,
        resources: ResourcesConfig | None = None,
    ) -> None:
        self.strategy, self.resources = strategy, resources or ResourcesConfig()
        self.config, self.tokenizer, self.packing_samples, self.device = config, tokenizer, packing_samples, device
        self.lenient = config.on_reward_error == "skip"  # whether samples that a function fails on are left out
        self._closing = ExitStack()
        self._client: Any = None
        self._models: list[str] = []
        self.functions: list[str] = []  # names of those given
        self.on_ray = False  # whether a source is in Ray actors
        self._remotes: dict[str, str] = {}  # {name: entry}
        self._wires: dict[str, str] = {}  # {entry: wire}
        self._built: dict[tuple, Source] = {}  # what recipe entries asked for

    def given_sources(
        self, reward_model: Any, remote_rm_url: Any, custom: Sequence[Any], given: Mapping[str, Any]
    ) -> dict[str, Source]:
        """{name: source} in the order models, remotes, callables, which is the order of `model_reward_list`.

        Args:
            reward_model: as of `RewardComputationEngine`.
            remote_rm_url: likewise.
            custom: functions.
            given: arguments for functions that ask for them; by its `label_map` models in a list have names.
        """
        sources: dict[str, Source] = {}
        for name, model in self._named_models(reward_model, given.get("label_map")).items():
            self._models.append(self._add(sources, name, self._model(name, model)))
        remotes = named_entries(remote_rm_url)
        if remote_rm_url not in (None, [], ()) and not remotes:
            told = "leave it out, or see that the variable which it comes from is set"
            raise ConfigError(f"remote_rm_url is {remote_rm_url!r} and names no server: {told}")
        self._wires = wires_of(self.config.reward_wire, remotes)
        for name, entry in remotes.items():
            known = self._add(sources, "remote" + name if name.isdigit() else name, self._remote(entry))
            self._remotes[known] = entry
        self.functions = [self.add_function(sources, function, given) for function in custom]
        return sources

    def add_function(self, sources: dict[str, Source], function: Any, given: Mapping[str, Any]) -> str:
        """One source more, under the function's name, which is returned; the second `score` is score_2.

        Args:
            sources: which get it.
            function: a callable, or one that was loaded by its path.
            given: arguments for it, where it asks for them.
        """
        return self._add(sources, callable_name(function), self._callable(function, given))

    def canonical(self, entry: RecipeEntry, sources: Mapping[str, Source]) -> RecipeEntry:
        """The entry with its key spelled in the one way that stands for its source, so that a model named both by name
        and by place is one. Raises ConfigError with the nearest name when there is none."""
        kind, key, transport = entry.type, entry.key, None
        if kind == "model":
            key = self._key_among(key, self._models, "reward model")
        elif kind == "remote":
            key = next((name for name, listed in self._remotes.items() if listed == key), key)
            key = key if "://" in key else self._key_among(key, list(self._remotes), "remote reward")
        elif kind == "rule" or key not in sources:
            transport = entry.transport or self.config.reward_transport
            if kind == "func" and ".py:" not in key:  # a registered scorer named as a function is a rule
                if key not in scorer_names():
                    known = did_you_mean(key, [*sources, *scorer_names()])
                    raise ConfigError(f"the reward recipe names the function {key!r}{known}")
                kind = "rule"
        elif entry.kwargs:
            raise ConfigError(f"reward function {key} takes no settings in a recipe: it is given as a callable")
        name = key if entry.name == entry.key else entry.name
        return replace(entry, type=kind, key=key, transport=transport, name=name)

    def resolve(self, entry: RecipeEntry, sources: Mapping[str, Source]) -> Source:
        """The source of a canonical entry; the same one for entries that differ in name, weight or score_key."""
        if entry.key in sources and entry.type != "rule":
            return sources[entry.key]
        if entry.scorer not in self._built:
            if entry.type == "remote":
                self._built[entry.scorer] = self._remote(entry.key)
            else:
                self._built[entry.scorer] = (self._func if entry.type == "func" else self._scorer)(entry)
        return self._built[entry.scorer]

    def close(self) -> None:
        """End what was started: processes, connections, actors."""
        self._closing.close()

    @staticmethod
    def _add(sources: dict[str, Source], name: str, source: Source) -> str:
        check_name(name, f"the reward {name!r}")
        unique = unique_name(name, sources)
        sources[unique] = source
        return unique

    @staticmethod
    def _key_among(key: str, names: Sequence[str], what: str) -> str:
        if key in names:
            return key
        if key.isdigit() and int(key) < len(names):
            return names[int(key)]
        raise ConfigError(f"the reward recipe names the {what} {key!r}{did_you_mean(key, names)}")

    @staticmethod
    def _named_models(reward_model: Any, label_map: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """{name: model}; label_map: {name: index} of models in a list, as LightRFT names them for its recipes."""
        if reward_model is None:
            return {}
        if isinstance(reward_model, Mapping):
            return dict(reward_model)
        if isinstance(reward_model, str):
            reward_model = split_list(reward_model)
        models = reward_model if isinstance(reward_model, (list, tuple)) else [reward_model]
        names = {position: name for name, position in (label_map or {}).items()}
        usual = "model{}" if len(models) > 1 else "model"
        return _by_name("reward models", models, lambda index: names.get(index, usual.format(index)))

    def _model(self, name: str, model: Any) -> Source:
        model = given(model) if is_given(model) else model
        if isinstance(model, Source):
            return model
        from .local.models import local_model_source

        if self.resources.rewards_placed and isinstance(model, (str, Path)):
            ray, needed_for = registry.services.load("ray_rewards"), "distributed.resources.reward"
            placed = ray.RayRewardModel(name, str(model), needed_for=needed_for, **self._pool())
            self._closing.callback(placed.close)
            return placed
        return local_model_source(name, model, self.config, self.tokenizer, self.packing_samples, self.strategy)

    def _remote(self, entry: str) -> Source:
        if entry.endswith(".py"):
            return self._loaded(load_reward_fn(f"{entry}:reward_func"), Path(entry).stem, {})
        from .remote.client import RemoteClient, RemoteReward

        if self._client is None:
            self._client = RemoteClient(self.config)
            self._closing.callback(self._client.close)
        return RemoteReward(entry, self._client, self._wires.get(entry, self._wires.get("")))

    def _callable(self, function: Any, given: Mapping[str, Any]) -> Source:
        if isinstance(function, LoadedFunction):
            return self._loaded(function, callable_name(function), given)
        if self.config.reward_fn_timeout is not None:
            raise ConfigError(
                f"reward_fn_timeout runs {callable_name(function)} in a process of its own: give it as path.py:function"
            )
        return self._source(function, callable_name(function), given)

    def _loaded(self, function: LoadedFunction, name: str, given: Mapping[str, Any]) -> Source:
        if self.config.reward_transport == "ray":
            return self._ray_actors(name, function.spec, given)
        return self._user_function(function, name, given)

    def aggregator(self, function: Any, given: Mapping[str, Any]) -> Source:
        """The function that makes the reward of the scores; never on Ray, where the scores are not."""
        loaded = isinstance(function, LoadedFunction)
        source = (
            self._user_function(function, callable_name(function), given) if loaded else self._callable(function, given)
        )
        if not source.signature.names:  # an object that hands on what LightRFT gives
            source.signature.names, source.signature.takes_all = list(LIGHTRFT_INPUTS), False
        source.lenient = False  # its other scores are of all samples: it cannot be asked for halves
        return source

    def _user_function(self, function: LoadedFunction, name: str, given: Mapping[str, Any]) -> Source:
        """A function by path: in this process, or with a time limit in one of its own. A torch module that reads token
        ids is a model, as one that a program gives."""
        if reads_token_ids(function.function):
            if inspect.isclass(function.function):
                raise ConfigError(f"{function.spec} is the class of a reward model: name an object that the file makes")
            return self._model(name, function.function)
        if self.config.reward_fn_timeout is None:
            return self._source(function, name, given)
        moved = SandboxedCallable(function, self.config.reward_fn_timeout, given)
        self._closing.callback(moved.close)
        return self._source(moved, name, given)

    def _source(self, function: Any, name: str, given: Mapping[str, Any]) -> Source:
        return CallableSource(function, name, given, self.config.reward_form, self.device, self.lenient)

    def _func(self, entry: RecipeEntry) -> Source:
        if entry.transport == "ray":
            return self._ray_actors(entry.name, entry.key, entry.kwargs)
        return self._user_function(load_reward_fn(entry.key), entry.name, entry.kwargs)

    def _scorer(self, entry: RecipeEntry) -> Source:
        check_scorer(entry.key, entry.kwargs)
        if entry.transport == "ray":
            return self._ray_actors(entry.name, entry.key, entry.kwargs)
        scorer = build_scorer(entry.key, entry.kwargs, self.config)
        if hasattr(scorer, "close"):  # it holds processes or connections
            self._closing.callback(scorer.close)
        if isinstance(scorer, Source):
            return scorer
        copies = not is_shipped(find_scorer(entry.key))  # built-in ones only read
        return CallableSource(scorer, entry.name, lenient=self.lenient, copies=copies)

    def _ray_actors(self, name: str, key: str, kwargs: Mapping[str, Any]) -> Source:
        if self.config.reward_fn_timeout is not None and ".py:" in key:
            raise ConfigError("reward_fn_timeout is for functions in this process; calls of Ray have reward_timeout")
        ray = registry.services.load("ray_rewards")
        source = ray.RaySource(name, key, kwargs, config=self.config, lenient=self.lenient, **self._pool())
        self._closing.callback(source.close)
        return source

    def _pool(self) -> dict[str, Any]:
        self.on_ray, actor_pool = True, registry.services.load("ray_rewards").actor_pool
        return {"timeout": self.config.reward_timeout} | actor_pool(self.resources)
