"""Recipes: which components score a sample of each label, and with what weight.

    count:    [[rule, numeric, 1.0], [rule, format, 0.2]]
    describe: [[remote, judge, 1.0], [model, safety, 0.5]]
    "*":      [[func, my_rewards.py:score, 1.0]]

The label "*" stands for every label without a recipe of its own, and for samples without a label.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from ..config import registry
from ..config.given_files import missing_function
from ..config.recipes import SUFFIXES, load_yaml, yaml_value
from ..config.shared import RewardConfig
from ..errors import ConfigError, did_you_mean, refused_as
from ..given import unique_name
from ..runtime.files import compose_yaml
from ..runtime.masking import MASK, masked_names

TYPES = ("model", "remote", "rule", "func")
ANY_LABEL = "*"
ENTRY_KEYS = ("type", "key", "weight", "kwargs", "name", "score_key", "transport")
TRANSPORTS = ("inprocess", "ray")
ENGINE_METRICS = ("time", "invalid_share")  # reward/<name> of the engine itself: seconds, and the share without a score


@dataclass(frozen=True)
class RecipeEntry:
    """One weighted component. name: its column in metrics. score_key: which of the scorer's outputs counts, when not
    its main one. transport: where a rule or func runs; None follows the configuration."""

    type: str
    key: str
    weight: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    score_key: str | None = None
    transport: str | None = None

    @property
    def scorer(self) -> tuple[str, str, str, str | None]:
        """Equal for entries that one scorer serves, built once and run once a call."""
        return self.type, self.key, json.dumps(self.kwargs, sort_keys=True, default=str), self.transport

    @property
    def identity(self) -> tuple[str | None, ...]:
        """Equal for entries that are one component, one column of the metrics, whatever their weights."""
        return *self.scorer, self.score_key, self.name


@dataclass(frozen=True)
class Recipe:
    """Entries by label; `average` adds the weighted sum to the components under the name `avg`."""

    entries: Mapping[str, Sequence[RecipeEntry]]
    average: bool = False

    def for_label(self, label: str | None) -> Sequence[RecipeEntry]:
        """Raises ConfigError with the nearest label when there is no recipe."""
        found = self.entries.get(ANY_LABEL if label is None else str(label), self.entries.get(ANY_LABEL))
        if found is None:
            what = "a sample without a label" if label is None else f"label {label!r}"
            hint = did_you_mean(label or "", self.entries)
            raise ConfigError(
                f"there is no reward recipe for {what}{hint}; the label {ANY_LABEL!r} stands for any other"
            )
        return found

    def check_labels(
        self, labels: Iterable[str | None], cut_away: Callable[[], Collection[str | None]] = frozenset
    ) -> None:
        """Raise ConfigError for the first label without a recipe, and for the first recipe that no row's label has.

        labels: of all rows that are used; none at all when the data are not known. cut_away: those of rows that are in
        the files and not used, such as beyond max_samples; asked only where a recipe's label is in no other."""
        labels = list(dict.fromkeys(labels))
        for label in labels:
            self.for_label(label)
        known = [str(label) for label in labels if label is not None]
        absent = [label for label in self.entries if label not in (ANY_LABEL, *known)] if labels else []
        beyond = {str(label) for label in cut_away()} if absent else set()
        for label in absent:
            if label not in beyond:
                hint = did_you_mean(label, known) if known else "; no row has a label: --label_key names its column"
                raise ConfigError(f"the reward recipe has the label {label!r}, which no row of the data has{hint}")

    def components(self) -> list[RecipeEntry]:
        """Every distinct component, under a name of its own."""
        distinct: dict[tuple, RecipeEntry] = {}
        for entry in (e for entries in self.entries.values() for e in entries):
            distinct.setdefault(entry.identity, entry)
        return list(distinct.values())

    def map(self, change: Callable[[RecipeEntry], RecipeEntry]) -> Recipe:
        """The recipe with every entry changed; different components keep different names."""
        changed = {label: [change(entry) for entry in listed] for label, listed in self.entries.items()}
        return Recipe(_with_distinct_names(changed), self.average)


def parse_recipe(raw: Any) -> Recipe:
    """Check a mapping {label: [(type, key, weight), ...]} and make a Recipe of it.

    An entry is a sequence of three, of four with a mapping of scorer settings last, or a mapping with the keys of
    ENTRY_KEYS. Raises ConfigError that names the label and entry.
    """
    if isinstance(raw, Recipe):
        return raw
    if not isinstance(raw, Mapping) or not raw:
        raise ConfigError("a reward recipe is a mapping of label to a list of [type, key, weight]")
    entries = {}
    for label, listed in raw.items():
        if not isinstance(label, (str, int, float)) or isinstance(label, bool):
            raise ConfigError(f"reward recipe: the label {label!r} is a {type(label).__name__}; write it in quotes")
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise ConfigError(f"reward recipe of label {label!r}: give a list of [type, key, weight]")
        entries[str(label)] = [_parse_entry(given, f"label {label!r}, entry {i + 1}") for i, given in enumerate(listed)]
    return Recipe(_with_distinct_names(entries))


def _parse_entry(given: Any, where: str) -> RecipeEntry:
    if isinstance(given, RecipeEntry):
        return given
    if isinstance(given, Mapping):
        for key in given:
            if key not in ENTRY_KEYS:
                raise ConfigError(f"reward recipe, {where}: unknown key {key!r}{did_you_mean(key, ENTRY_KEYS)}")
        fields = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) in (3, 4):
        fields = dict(zip(("type", "key", "weight", "kwargs"), given))
    else:
        raise ConfigError(f"reward recipe, {where}: write it as [type, key, weight] or [type, key, weight, settings]")
    return _checked_entry(fields, where)


def _checked_entry(fields: dict[str, Any], where: str) -> RecipeEntry:
    kind, key, weight = (fields.pop(name, None) for name in ("type", "key", "weight"))
    if kind not in TYPES:
        raise ConfigError(f"reward recipe, {where}: type {kind!r}{did_you_mean(kind, TYPES)}")
    if key is None or isinstance(key, (Mapping, list)):
        raise ConfigError(f"reward recipe, {where}: the key names a model, server, rule or function")
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise ConfigError(f"reward recipe, {where}: weight {weight!r} is not a finite number")
    settings = fields.get("kwargs") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"reward recipe, {where}: settings are a mapping of name to value")
    for name in masked_names(fields | {"key": key}):
        raise ConfigError(
            f"reward recipe, {where}: {name} is {MASK}, as the file of a run has it; give the value, or let the "
            "function read an environment variable"
        )
    if fields.get("transport") not in (None, *TRANSPORTS):
        raise ConfigError(
            f"reward recipe, {where}: transport {fields['transport']!r}{did_you_mean(fields['transport'], TRANSPORTS)}"
        )
    fields |= {"kwargs": dict(settings), "name": fields.get("name") or _short_name(kind, str(key))}
    check_name(fields["name"], f"reward recipe, {where}")
    return RecipeEntry(kind, str(key), float(weight), **fields)


def check_name(name: str, where: str) -> None:
    """Raise ConfigError for a component that has the name of a metric of the engine's own."""
    if name in ENGINE_METRICS:
        raise ConfigError(f"{where}: reward/{name} is a metric of the run; give the component another name")


def _short_name(kind: str, key: str) -> str:
    if kind == "func":
        return key.rpartition(":")[2]
    if kind == "remote" and "://" in key:
        return key.split("://", 1)[1].split("@")[-1].split("?")[0].split("|")[0].rstrip("/")
    return key


def _with_distinct_names(entries: dict[str, list[RecipeEntry]]) -> dict[str, list[RecipeEntry]]:
    """Different components never share a name in metrics: the second `exact` becomes `exact_2`."""
    names: dict[tuple, str] = {}
    for entry in (e for listed in entries.values() for e in listed):
        if entry.identity not in names:
            names[entry.identity] = unique_name(entry.name, names.values())
    return {label: [replace(e, name=names[e.identity]) for e in listed] for label, listed in entries.items()}


def load_recipe(source: str) -> Recipe:
    """A recipe from a YAML or JSON file, or from inline YAML. Raises ConfigError naming the file, with the line of what
    is not YAML."""
    source = source.strip()
    if source.endswith(SUFFIXES):
        file, where = Path(source).expanduser(), source
        if not os.path.isfile(file):
            raise ConfigError(f"reward recipe {source} does not exist")
        raw = load_yaml(file, quote_keys)[0]
    else:
        with refused_as(ConfigError, "the inline reward recipe is not valid YAML"):
            raw, where = yaml_value(quote_keys(source)), "inline"
        if isinstance(raw, str):
            raise ConfigError(
                f"reward recipe {source!r}: give a {', '.join(SUFFIXES)} file, or a mapping as inline YAML"
            )
    try:
        return parse_recipe(raw)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def wrong_names(config: RewardConfig) -> list[str]:
    """What is wrong with the recipe and the components of a run, as far as no code is loaded for them."""
    try:
        recipe = recipe_of(config)
        entries = recipe.components() if recipe else []
        for entry in entries:
            _ = registry.scorers[entry.key] if entry.type == "rule" else None
    except ConfigError as error:
        return [str(error)]
    functions = [each.key.rpartition(":") for each in entries if each.type == "func" and ".py:" in each.key]
    wrong = [f"reward recipe: {told}" for path, _, name in functions for told in missing_function(path, name)]
    models = [] if config.reward_pretrain else [each.key for each in entries if each.type == "model"]
    return wrong + [f"reward recipe: no reward_pretrain is given that the model {key!r} could name" for key in models]


def quote_keys(text: str) -> str:
    """The YAML text with the keys of its outermost mapping in quotes: without them yes, on, 010 and 1.10 are no texts.
    Raises yaml.YAMLError."""
    root = compose_yaml(text)
    for key, _ in reversed(root.value) if isinstance(root, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode) and key.style is None:
            text = text[: key.start_mark.index] + json.dumps(key.value) + text[key.end_mark.index :]
    return text


def recipe_from_components(components: Mapping[str, float], kwargs: Mapping[str, Mapping] | None = None) -> Recipe:
    """VRL's form, `reward.components.ocr=1.0` with `reward.kwargs.ocr.*`: one recipe for every sample.

    A component is an objective: its name is the metric's. Of its settings, `scorer` (default: the name; path.py:name is
    a user function), `score_key`, `transport` (inprocess | http | ray) and `url` (for http) are read here; the rest
    goes to the scorer. The weighted sum is reported as `avg`. Raises ConfigError.
    """
    recipe = compose_recipe(None, components, kwargs)
    if recipe is None:
        raise ConfigError("reward.components is empty: name at least one scorer with its weight")
    return recipe


def recipe_of(config: RewardConfig) -> Recipe | None:
    """The recipe of a run with its components laid over it; None without either. Raises ConfigError."""
    recipe = load_recipe(config.reward_recipe) if config.reward_recipe else None
    return compose_recipe(recipe, config.components, config.kwargs)


def compose_recipe(
    recipe: Recipe | None, components: Mapping[str, float], kwargs: Mapping[str, Mapping] | None = None
) -> Recipe | None:
    """A recipe with the components of a run laid over it; None when there is neither.

    Raises ConfigError for settings of nothing.

    Args:
        recipe: `reward_recipe` of the run; None without one.
        components: `reward.components`, {name: weight}. One that the recipe has by that name gets the weight in every
            label where it stands; any other is added to every label.
        kwargs: `reward.kwargs`, {name: settings}, laid over those that the recipe gives.
    """
    if recipe is None and not components:
        return None
    recipe = recipe or Recipe({ANY_LABEL: []})
    present = {entry.name for entry in recipe.components()}
    settings = _checked_settings(kwargs, [*present, *components])
    added = [
        _entry_of_component(str(n), weight, settings.get(str(n), {}))
        for n, weight in components.items()
        if str(n) not in present
    ]
    entries = {
        label: [_laid_over(own, components.get(own.name, own.weight), settings.get(own.name, {})) for own in listed]
        + added
        for label, listed in recipe.entries.items()
    }
    return Recipe(_with_distinct_names(entries), average=recipe.average or bool(components))


def _checked_settings(kwargs: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`reward.kwargs` as {component: {setting: value}}."""
    known = [str(name) for name in names]
    for name, settings in (kwargs or {}).items():
        if str(name) not in known:
            raise ConfigError(f"reward.kwargs.{name} has no component of that name{did_you_mean(str(name), known)}")
        if not isinstance(settings, Mapping | None):
            raise ConfigError(f"reward.kwargs.{name}: settings are a mapping, reward.kwargs.{name}.SETTING=VALUE")
    return {str(name): dict(settings or {}) for name, settings in (kwargs or {}).items()}


def _laid_over(entry: RecipeEntry, weight: float, settings: Mapping[str, Any]) -> RecipeEntry:
    """An entry with another weight and with more settings; another `scorer` starts without those of the old one."""
    if entry.type in ("model", "remote"):
        for key in settings:
            if key != "score_key":
                raise ConfigError(f"reward.kwargs.{entry.name} is a {entry.type} and has no setting {key!r} here")
        return _checked_entry({**vars(entry), "weight": weight, **settings}, f"component {entry.name!r}")
    kept = entry.kwargs if settings.get("scorer", entry.key) == entry.key else {}
    own = {"scorer": entry.key, "score_key": entry.score_key, "transport": entry.transport}
    changed = _entry_of_component(entry.name, weight, {**own, **kept, **settings})
    return replace(changed, type=entry.type) if changed.key == entry.key else changed


def _entry_of_component(name: str, weight: float, settings: Mapping[str, Any]) -> RecipeEntry:
    settings = dict(settings)
    scorer, score_key = str(settings.pop("scorer", name)), settings.pop("score_key", None)
    transport = settings.pop("transport", None)
    fields = {"weight": weight, "name": name, "score_key": score_key, "kwargs": settings}
    if transport == "http":
        url = settings.pop("url", None)
        if url is None:
            raise ConfigError(f"reward.kwargs.{name}: transport=http needs url=...")
        if settings:
            raise ConfigError(
                f"reward.kwargs.{name}: {next(iter(settings))!r} is the server's own setting, set it there"
            )
        return _checked_entry({**fields, "type": "remote", "key": url}, f"component {name!r}")
    kind = "func" if ".py:" in scorer else "rule"
    return _checked_entry({**fields, "type": kind, "key": scorer, "transport": transport}, f"component {name!r}")
