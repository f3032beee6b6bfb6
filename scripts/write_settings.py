"""Write lightrft_visual/settings.pyi: every setting with its type, for editors and type checkers.

python scripts/write_settings.py          a test compares
"""

import textwrap
from pathlib import Path

from lightrft_visual.config.given_files import ROWS
from lightrft_visual.config.leaves import Leaf, names_of
from lightrft_visual.config.spellings import COMMA_LISTS, OWN, PATHS, ROOTS

FILE = Path(__file__).resolve().parents[1] / "lightrft_visual" / "settings.pyi"
NAMES = {"vl": "VLSettings", "diffusion": "DiffusionSettings", "sft": "SFTSettings"}
HEAD = '''"""Settings of runs as keyword arguments; written by scripts/write_settings.py from the configuration."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypedDict

StrPath = str | PathLike[str]
Code = StrPath | Callable[..., Any]
'''
ARGUMENTS = ("environment", "tools")  # of the trainers themselves
# What stands in the place of text.
OBJECTS = {
    "environment": "Code", "prompt_data_probs": "str | Sequence[float]",
    **dict.fromkeys(ROWS, "Any"),
}  # fmt: skip
ALIASES = (*OWN.aliases, "environment_factory")  # those of other systems are a plug-in's


def main() -> None:
    FILE.write_text(text())
    print(FILE)


def text() -> str:
    """The stub."""
    return HEAD + "".join(_of(NAMES[root.kind], root.schema) for root in ROOTS)


def _of(name: str, schema: type) -> str:
    names = names_of(schema)
    leaves = {leaf.name: leaf for leaf in names.leaves.values() if leaf.name not in ARGUMENTS}
    paths = names.aliases | {"environment_factory": ("episodes.environment",)}
    aliases = {each: names.leaves.get(paths[each][0]) for each in ALIASES if len(paths.get(each, ())) == 1}
    entries = [_entry(leaf.name, leaf, told(leaf)) for leaf in leaves.values()]
    entries += [_entry(each, leaf, f"{leaf.name}.") for each, leaf in aliases.items() if leaf and "." not in each]
    return f"\nclass {name}(TypedDict, total=False):\n" + "".join(entries)


def told(leaf: Leaf) -> str:
    """Its help and its default."""
    default = "" if leaf.default is None else f" Default: {leaf.default!r}."
    return f"{leaf.help or leaf.section}.{default}".replace("\\", "\\\\").replace('"""', "'''")


def _entry(name: str, leaf: Leaf, told: str) -> str:
    body = textwrap.fill(told, 110, initial_indent='    """', subsequent_indent="    ", break_long_words=False)
    return (
        f'    {name}: {_type(leaf)}\n{body} """\n' if body.endswith('"') else f'    {name}: {_type(leaf)}\n{body}"""\n'
    )


def _type(leaf: Leaf) -> str:
    """What a program may give: also paths, sequences, and objects where the configuration has text that names them."""
    kind = leaf.type_name.replace("typing.", "")
    text = "StrPath" if leaf.name in PATHS else "str"
    text += f" | Sequence[{text}]" if leaf.name in COMMA_LISTS else ""
    if leaf.kind == "text":
        return kind.replace("str", OBJECTS.get(leaf.name, text))
    return kind.replace("list[", "Sequence[") if leaf.kind == "list" else kind


if __name__ == "__main__":
    main()
