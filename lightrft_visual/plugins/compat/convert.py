"""What a file of another system means here: a command, and what of it has no counterpart."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...config.leaves import Names, Setting, names_of
from ...config.load import merge
from ...config.vl import RunConfig
from ...errors import ConfigError

SYSTEMS = {
    "trl": "TRL: the keywords of its configuration and trainer in a Python file, a shell script, or YAML",
    "verl": "verl: YAML, or a shell script with its overrides",
    "openrlhf": "OpenRLHF: a shell script",
    "easyr1": "EasyR1: YAML, or a shell script with its overrides",
}
OTHER_NAMES = {("trl", "model"): "pretrain"}  # too short to be understood anywhere else
NO_COUNTERPART = "nothing here has this name or is like it"
VARIABLE = re.compile(r"\$\{?(\w+)(?::?-[^}]*)?\}?")


@dataclass
class Converted:
    """command: for a shell. left_out: what has no counterpart, and why."""

    command: str
    left_out: dict[str, str] = field(default_factory=dict)


def convert(system: str, file: Path) -> Converted:
    """Raises ConfigError for another system, and for a file that cannot be read."""
    if system not in SYSTEMS:
        raise ConfigError(f"there is no converter for {system!r}; there are: {', '.join(SYSTEMS)}")
    names = names_of(RunConfig)
    taken: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in _settings(file):
        name = OTHER_NAMES.get((system, name), name)
        try:
            taken |= _ours(names, Setting(name, value, file.name))
        except ConfigError as error:
            left_out[name] = _why(names, name, error)
    words = [f"--{name} {_shell(value)}" for name, value in taken.items()]
    return Converted(" \\\n    ".join(["lightrft-visual train grpo", *words]), left_out)


def _ours(names: Names, setting: Setting) -> dict[str, Any]:
    """{our name: value}. Raises ConfigError for a name or a value that means nothing here."""
    found: dict[str, Any] = {}
    for each in names.translated(setting):
        reached = names.find(each.name)
        if not reached:
            raise ConfigError(NO_COUNTERPART)
        merge(names, [each])  # whether the value suits
        values = each.value if len(reached) > 1 else [each.value]
        for (leaf, inside), value in zip(reached, values):
            found[".".join(filter(None, (leaf.path if inside else leaf.name, inside)))] = value
    return found


def _why(names: Names, name: str, error: ConfigError) -> str:
    return names.hint(name.replace("-", "_")) or str(error).partition("\n")[0]


def _shell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value).replace(" ", "") if isinstance(value, list) else str(value)
    return f'"{text}"' if "$" in text else shlex.quote(text)  # a variable of the shell stays one


# -- reading ---------------------------------------------------------------------------------------------------------


def _settings(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = file.read_text()
        if file.suffix in (".yaml", ".yml", ".json"):
            yield from _flat(yaml.safe_load(text) or {})
        elif file.suffix == ".py":
            yield from _keywords(ast.parse(text))
        else:
            yield from _words(text)
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _keywords(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The keywords of calls such as GRPOConfig(...), as far as they are written out."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if not name.endswith(("Config", "Trainer", "Arguments")):
            continue
        for keyword in node.keywords:  # type: ignore[attr-defined]
            if keyword.arg not in (None, "args", "peft_config"):
                try:
                    yield keyword.arg, ast.literal_eval(keyword.value)
                except ValueError:
                    yield keyword.arg, ast.unparse(keyword.value)


def _words(text: str) -> Iterator[tuple[str, Any]]:
    """`--name value`, `--name=value` and `name=value` of a shell script; variables that it sets are put in."""
    text = re.sub(r"\\\s*\n", " ", text)
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"']*)[\"']?\s*$", text, re.M))
    text = VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        for number, word in enumerate(words):
            name, equals, value = word.lstrip("+-").partition("=")
            if word.startswith("--") and not equals:
                after = words[number + 1] if number + 1 < len(words) else "--"
                yield name, True if after.startswith("--") else _value(after)
            elif equals and number and ("." in name or word.startswith("--")):
                yield name, _value(value)


def _value(text: str) -> Any:
    found = yaml.safe_load(text) if re.fullmatch(r"true|false|null|[-+0-9.]+|\[.*\]", text, re.IGNORECASE) else text
    return text if isinstance(found, list) and found and isinstance(found[0], Mapping) else found
