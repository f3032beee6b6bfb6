"""The text of ``--help``, generated from the schema."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from typing import get_type_hints

from .leaves import Leaf, Names

USAGE = """\
Settings, each under any of these spellings:
  --rollout.top_p 0.9   --rollout.top_p=0.9   rollout.top_p=0.9   --top_p 0.9   --top-p=0.9   top_p=0.9
  --bf16 turns a bool on, --no_bf16 or --bf16 false off; None or null unsets an optional value.
  --config NAME_OR_PATH   read a YAML recipe first; several are read in order, the command line wins
  /base/distributed=zero3 swap the layer of that group in the recipe
  --dry_run               print the resolved configuration and the plan of its memory and time, and exit
  --help, -h              print this and exit
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
