"""No setting is accepted and then ignored: every leaf is read somewhere outside the configuration itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import load_config
from lightrft_visual.config.roots import ROOTS
from lightrft_visual.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[2]
REFUSED = {"distributed.sp_size": "2"}  # known to users, not built: any value but the default is an error


def attributes_read() -> set[str]:
    """Names that stand behind a dot where they are read, in the package and the examples, comments left out."""
    files = [
        *(file for file in (PROJECT / "lightrft_visual").rglob("*.py") if "config" not in file.parts),
        *(PROJECT / "examples").rglob("*.py"),
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(), str(file))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_every_leaf_is_read_somewhere(root) -> None:
    read = attributes_read()
    unread = sorted(leaf.path for leaf in names_of(root.schema).leaves.values() if leaf.name not in read)
    assert not set(unread) - set(REFUSED), f"accepted but never read: {', '.join(unread)}"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
@pytest.mark.parametrize("path,value", REFUSED.items())
def test_what_is_not_built_is_refused(root, path: str, value: str) -> None:
    with pytest.raises(ConfigError, match="not built"):
        load_config(root.schema, [f"{path}={value}"], preset=None)
