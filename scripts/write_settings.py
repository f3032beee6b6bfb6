"""Write lightrft_visual/settings.pyi: every setting with its type, for editors and type checkers.

python scripts/write_settings.py          a test compares
"""

import textwrap
from pathlib import Path

from lightrft_visual.config.leaves import Leaf, names_of
from lightrft_visual.config.spellings import ROOTS

FILE = Path(__file__).resolve().parents[1] / "lightrft_visual" / "settings.pyi"
NAMES = {"vl": "VLSettings", "diffusion": "DiffusionSettings", "sft": "SFTSettings"}
HEAD = '''"""Settings of runs as keyword arguments; written by scripts/write_settings.py from the configuration."""

from typing import Any, TypedDict
'''


def main() -> None:
    FILE.write_text(text())
    print(FILE)


def text() -> str:
    """The stub."""
    return HEAD + "".join(_of(NAMES[root.kind], root.schema) for root in ROOTS)


def _of(name: str, schema: type) -> str:
    leaves = {leaf.name: leaf for leaf in names_of(schema).leaves.values()}
    return f"\nclass {name}(TypedDict, total=False):\n" + "".join(map(_entry, leaves.values()))


def _entry(leaf: Leaf) -> str:
    kind = leaf.type_name.replace("typing.", "")
    default = "" if leaf.default is None else f" Default: {leaf.default!r}."
    told = f"{leaf.help or leaf.section}.{default}".replace("\\", "\\\\").replace('"""', "'''")
    body = textwrap.fill(told, 110, initial_indent='    """', subsequent_indent="    ", break_long_words=False)
    return f'    {leaf.name}: {kind}\n{body} """\n' if body.endswith('"') else f'    {leaf.name}: {kind}\n{body}"""\n'


if __name__ == "__main__":
    main()
