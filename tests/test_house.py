"""The rooms of the house: who may import whom. See docs/architecture.md."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightrft_visual"
# From the ground floor up: a file imports from its own room and from rooms before it in this list.
FLOORS = (
    "errors", "masking", "usercode", "batches", "config", "strategy", "checkpoint", "data", "observe", "models",
    "embedded", "rollout", "rewards", "algorithms", "replay", "report", "trainer", "launch",
)  # fmt: skip
LARGEST_SHARE = 0.20


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """Modules of the package that a module names, at its top, in functions and for type checkers alike."""
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                whole = f"{target}.{alias.name}"
                found.add(whole if whole in MODULES else target)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in MODULES and each != name}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_room_has_its_floor():
    assert {room(name) for name in MODULES if room(name)} <= set(FLOORS)


def test_nothing_imports_upwards():
    height = {name: index for index, name in enumerate(FLOORS)}
    upwards = [
        f"{name} -> {target}"
        for name in MODULES
        for target in imports_of(name)
        if room(name) and room(target) and height[room(target)] > height[room(name)]
    ]
    assert not upwards


def test_no_two_files_import_each_other():
    graph = {name: imports_of(name) for name in MODULES if MODULES[name].name != "__init__.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_room_holds_too_much():
    lines = Counter()
    for name, path in MODULES.items():
        lines[room(name)] += len(path.read_text().splitlines())
    largest, count = lines.most_common(1)[0]
    assert count <= LARGEST_SHARE * sum(lines.values()), f"{largest}: {count} of {sum(lines.values())} lines"


def test_every_public_function_has_a_docstring():
    missing = []
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    missing.append(f"{name}.{node.name}")
    assert not missing
