"""The command line: every spelling of a setting, read into a list of settings in the order given."""

import inspect
import re
import shutil
import textwrap
from collections import deque
from dataclasses import dataclass, field
from typing import get_type_hints

from ..errors import ConfigError, writable
from .leaves import COMMAND_LINE, Leaf, Names, Setting
from .spellings import BARE_VALUES, COMMA_LISTS, SWITCHES

FALSE_WORDS = ("false", "no", "off", "0")
NULL_WORDS = ("None", "null")
HELP_WORDS = ("-h", "--help", "--help-all", "--help_all")
BOOL_WORDS = (*FALSE_WORDS, "true", "yes", "on", "1")


@dataclass
class CommandLine:
    """What was asked for: settings in order, config files in order, layers to swap, and the dry run.

    wrong: what could not be read, one error for each; what stands beside it was read.
    """

    settings: list[Setting] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    swaps: dict[str, str] = field(default_factory=dict)  # "/base/distributed" -> layer name
    dry_run: bool = False
    wrong: list[ConfigError] = field(default_factory=list)


def parse_command_line(argv: list[str], names: Names) -> CommandLine:
    """Read ``--name value``, ``--name=value``, ``name=value``, ``--name``, ``--no_name``, ``/group=layer``.

    An unknown name, a missing value and an argument of no such form are in `wrong`; what follows is read all the same.
    """
    _check_text(argv)
    line, tokens, last = CommandLine(), deque(argv), ""
    while tokens:
        token = tokens.popleft()
        try:
            last = _read_argument(line, token, last, tokens, names)
        except ConfigError as error:
            line.wrong.append(error)
            while tokens and not _is_setting(tokens[0]):
                tokens.popleft()
    return line


def _check_text(argv: list[str]) -> None:
    for token in argv:
        if writable(token) != token or "\0" in token:
            raise ConfigError(f"the argument {writable(token)!r} is not text in UTF-8, as settings and paths are")


def _read_argument(line: CommandLine, token: str, last: str, tokens: deque[str], names: Names) -> str:
    """One argument, and the values that follow it, into `line`; returns the setting's name. last: the one before."""
    if token in HELP_WORDS:
        raise ConfigError(f"{token} is of the command: `lightrft-visual train NAME {token}` lists settings")
    name, equals, value = token.removeprefix("--").lstrip("+").partition("=")  # Hydra's +name=value adds one
    if not equals and not token.startswith("--"):
        before = f"; a value of several words, such as that of --{last}, stands in quotes" if last else ""
        raise ConfigError(f"unexpected argument {token!r}: settings are written --name value or name=value{before}")
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
    return name


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
    """``--no_name`` turns a bool off, or what may stand alone as one."""
    if name[:3] in ("no_", "no-"):
        found = names.find(name[3:])
        if found and (found[0][0].kind == "bool" or found[0][0].name in BARE_VALUES):
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
    return token.startswith("--") or re.match(r"\+{0,2}/?[A-Za-z_][\w./-]*=", token) is not None


USAGE = """\
Settings, each under any of these spellings:
  --rollout.top_p 0.9   --rollout.top_p=0.9   rollout.top_p=0.9   --top_p 0.9   --top-p=0.9   top_p=0.9
  --bf16 turns a bool on, --no_bf16 or --bf16 false off; None or null unsets an optional value.
  --config NAME_OR_PATH   read a YAML recipe first; several are read in order, the command line wins
  /base/distributed=zero3 swap the layer of that group in the recipe
  --dry_run               print the resolved configuration and the plan of its memory and time, and exit
  --help-all              print this and exit; --help: what is set first, --help SECTION: one section
"""


def help_text(names: Names) -> str:
    """Usage, then every leaf by section: name, type, default, comment; then the aliases."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    parts, hints, section = [USAGE], get_type_hints(names.schema), None
    for leaf in names.leaves.values():
        if leaf.section != section:
            section = leaf.section
            parts.append(_heading(section, hints))
        parts.append(_entry(leaf, width))
    aliases = {name: paths for name, paths in names.aliases.items() if "." not in name}
    parts.append("\nNames of other systems that are understood:")
    parts += [f"  {alias} -> {', '.join(paths)}" for alias, paths in aliases.items()]
    parts += [f"  {name}: {translation.about}" for name, translation in names.translations.items()]
    hints = {name: names.hint(name) for name in names.advice if not names.find(name)}
    parts.append("\nNames of other systems that are refused with advice:")
    parts += [f"  {name}: {hint}" for name, hint in hints.items() if hint]
    return "\n".join(parts)


def _heading(section: str, hints: dict[str, type]) -> str:
    if not section:
        return "\nthe run itself:"
    summary = (inspect.getdoc(hints[section]) or "").partition("\n")[0] if section in hints else ""
    return f"\n{section}: {summary}"


def _entry(leaf: Leaf, width: int) -> str:
    default = "none" if leaf.default is None else repr(leaf.default) if leaf.default == "" else str(leaf.default)
    first = f"  --{leaf.name} {leaf.type_name.replace(' | None', '')} ({default})"
    if not leaf.help:
        return first
    if len(first) + 2 + len(leaf.help) <= width:
        return f"{first}  {leaf.help}"
    margin = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
    body = textwrap.fill(leaf.help, width, **margin, break_on_hyphens=False, break_long_words=False)
    return f"{first}\n{body}"
