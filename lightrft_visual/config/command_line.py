"""The command line: every spelling of a setting, read into a list of settings in the order given."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from ..errors import ConfigError
from .leaves import COMMAND_LINE, Names, Setting
from .spellings import BARE_VALUES, COMMA_LISTS, SWITCHES

FALSE_WORDS = ("false", "no", "off", "0")
NULL_WORDS = ("None", "null")
BOOL_WORDS = (*FALSE_WORDS, "true", "yes", "on", "1")


@dataclass
class CommandLine:
    """What was asked for: settings in order, config files in order, layers to swap, and the dry run."""

    settings: list[Setting] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    swaps: dict[str, str] = field(default_factory=dict)  # "/base/distributed" -> layer name
    dry_run: bool = False


def parse_command_line(argv: list[str], names: Names) -> CommandLine:
    """Read ``--name value``, ``--name=value``, ``name=value``, ``--name``, ``--no_name``, ``/group=layer``.

    Raises ConfigError for an unknown name, a missing value, or an argument of no such form.
    """
    line, tokens, last = CommandLine(), deque(argv), ""
    while tokens:
        token = tokens.popleft()
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals and not token.startswith("--"):
            before = f"; a value of several words, such as that of --{last}, stands in quotes" if last else ""
            raise ConfigError(f"unexpected argument {token!r}: settings are written --name value or name=value{before}")
        last = name
        if "/" in name:
            line.swaps["/" + name.strip("/")] = value
        elif name in ("dry_run", "dry-run"):
            if not equals and tokens and tokens[0].lower() in BOOL_WORDS:
                value = tokens.popleft()
            line.dry_run = value.lower() not in FALSE_WORDS
        elif name == "config":
            line.configs.append(value if equals else _value(tokens, token, "a file name"))
        else:
            line.settings.append(Setting(name, value, COMMAND_LINE) if equals else _flag(name, tokens, names))
    return line


def _flag(name: str, tokens: deque[str], names: Names) -> Setting:
    """``--name`` whose values, if it takes any, are the tokens that follow."""
    found = names.find(name)
    if not found:
        return _negated(name, names)
    leaf = found[0][0]
    bare = not tokens or _is_setting(tokens[0])
    if leaf.kind == "bool":
        value = True if bare else tokens.popleft()
        known = str(value).lower() in BOOL_WORDS or (leaf.optional and value in NULL_WORDS)
        if not known and leaf.name not in SWITCHES:  # a switch is refused with its advice
            raise ConfigError(f"--{name} takes true or false, or nothing; found {value!r}")
        return Setting(name, value, COMMAND_LINE)
    if bare and leaf.name in BARE_VALUES:
        return Setting(name, BARE_VALUES[leaf.name], COMMAND_LINE)
    values = [_value(tokens, f"--{name}", leaf.type_name)]
    if leaf.kind == "list" or len(found) > 1 or leaf.name in COMMA_LISTS:
        while tokens and not _is_setting(tokens[0]):
            values.append(tokens.popleft())
    return Setting(name, values if len(values) > 1 else values[0], COMMAND_LINE)


def _negated(name: str, names: Names) -> Setting:
    """``--no_name`` turns a bool off."""
    if name[:3] in ("no_", "no-"):
        found = names.find(name[3:])
        if found and found[0][0].kind == "bool":
            return Setting(name[3:], False, COMMAND_LINE)
    raise names.unknown(name, COMMAND_LINE)


def _value(tokens: deque[str], flag: str, wanted: str) -> str:
    if not tokens:
        raise ConfigError(f"{flag} takes a value ({wanted})")
    if tokens[0].startswith("--"):
        raise ConfigError(
            f"{flag} takes a value ({wanted}), but {tokens[0]!r} follows; "
            f"if that is the value, write {flag}={tokens[0]}"
        )
    return tokens.popleft()


def _is_setting(token: str) -> bool:
    return token.startswith("--") or re.match(r"/?[A-Za-z_][\w./-]*=", token) is not None
