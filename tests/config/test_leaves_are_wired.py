"""No setting is accepted and then ignored: every leaf is read somewhere outside the configuration itself."""

import ast
import functools
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import ROOTS

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "lightrft_visual"
SCHEMA = [PACKAGE / "config" / f"{name}.py" for name in ("vl", "diffusion", "algorithm", "shared", "placement")]
FOLDED = {  # other ways to say what another leaf says, into which they are worked at once
    "train.groups_per_update": ("train.train_batch_size", "2"),
    "train.gradient_accumulation_steps": ("train.train_batch_size", "2"),
}
LOADER = {"plugins"}  # read by the loader itself, before there is a configuration: tests/config/test_plugins.py


def reads(tree: ast.AST) -> set[str]:
    """Names that stand behind a dot where they are read."""
    nodes = ast.walk(tree)
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@functools.cache
def attributes_read() -> frozenset[str]:
    """What the package and the examples read, comments left out.

    Of the schema's own functions those count that others use: a property or function that hands a setting on under
    another name. Its checks do not: what is only checked is not used.
    """
    files = [
        *(file for file in PACKAGE.rglob("*.py") if "config" not in file.parts),
        *(PROJECT / "examples").rglob("*.py"),
    ]
    trees = [ast.parse(file.read_text(), str(file)) for file in files]
    outside = {name for tree in trees for name in reads(tree)}
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    handed_on = {
        name
        for file in SCHEMA
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in outside | names and "check" not in node.name
        for name in reads(node)
    }
    return frozenset(outside | handed_on)


@pytest.mark.plugin("embedded")  # each of these three alone reads some settings
@pytest.mark.plugin("memory_plan")
@pytest.mark.plugin("ray")
@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_every_leaf_is_read_somewhere(root) -> None:
    read = attributes_read()
    unread = {leaf.path for leaf in names_of(root.schema).leaves.values() if leaf.name not in read}
    wrong = sorted(unread - FOLDED.keys() - LOADER)
    assert not wrong, f"accepted but never read: {', '.join(wrong)}"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.kind)
def test_what_is_worked_into_another_leaf_changes_it(root) -> None:
    for path in FOLDED.keys() & names_of(root.schema).leaves:
        target, value = FOLDED[path]
        usual, changed = (
            OmegaConf.select(OmegaConf.create(asdict(load_config(root.schema, argv, preset=None))), target)
            for argv in ([], [f"{path}={value}"])
        )
        assert usual != changed, path
