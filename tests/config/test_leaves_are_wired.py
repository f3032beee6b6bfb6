"""No setting is accepted and then ignored: every leaf is read somewhere outside the configuration itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.roots import ROOTS

PROJECT = Path(__file__).resolve().parents[2]
NOT_YET: frozenset[str] = frozenset()  # stays empty: what is not built is not in the schema


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
    assert not set(unread) - NOT_YET, f"accepted but never read: {', '.join(unread)}"
