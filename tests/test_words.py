"""The core's names are the field's own words, and its larger functions say what their arguments are."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightrft_visual"
FREE = ("data", "plugins")  # a row is a row of a data set there, a place one in a drawing
NEVER = re.compile(r"(^|_)(rows?|places?|pictures?|spread|guest|blueprint|parcels?)(_|$)")
NEVER_CLASSES = {
    "Look", "Parted", "Gains", "Making", "Cut", "KindShare", "Guest", "HostStay", "Blueprint", "Order", "Left",
    "Elsewhere", "Borrowed",
}  # fmt: skip
# An argument of the contract: `reset(row)`, which is one of the data.
CONTRACT = {
    "rollout/environments.py": "row", "rollout/tools.py": "row", "rollout/builtin/click.py": "row",
    "rollout/environment_pool.py": "row", "rollout/environment_threads.py": "row",
    "rollout/environment_process.py": "row",
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef
SILENT_BASES = {"ABC", "Protocol", "NamedTuple", "nn.Module"}  # they explain no arguments of a class of ours


def core_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in FREE]


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, class and argument."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def forbidden(source: str) -> list[str]:
    """'LINE NAME' of the names that have a forbidden word."""
    found = names_of(ast.parse(source))
    return [f"{line} {name}" for line, name in found if NEVER.search(name) or name in NEVER_CLASSES]


def parameters(function: Function) -> list[str]:
    """Names of its parameters, without self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.Module | ast.ClassDef, Function]]:
    """Functions of the module and methods of its public classes whose names have no underscore in front, each with
    what holds it."""
    holders = [tree, *(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name[0] != "_")]
    for holder in holders:
        for each in holder.body:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name[0] != "_":
                yield holder, each


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Those of the package, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def methods_above(name: str, holder: ast.ClassDef, own: dict[str, list[ast.ClassDef]]) -> Iterator[Function | None]:
    """Methods of this name of a class's bases; None for a base that is another library's and may have it."""
    for base in holder.bases:
        called = ast.unparse(base).partition("[")[0]
        if called not in own:
            yield from [] if called in SILENT_BASES else [None]
        for each in own.get(called, []):
            yield from (each for each in each.body if isinstance(each, Function) and each.name == name)
            yield from methods_above(name, each, own)


def left_to_base(function: Function, holder: ast.Module | ast.ClassDef, own: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a base explains it: of a method with one line of docstring or none, without decorators."""
    if not isinstance(holder, ast.ClassDef) or function.decorator_list or "\n" in (ast.get_docstring(function) or ""):
        return False
    return any(above is None or explains(above) for above in methods_above(function.name, holder, own))


def explains(function: Function) -> bool:
    """Whether `Args:` of its docstring name every parameter, or say that they are as of another function."""
    _, found, told = (ast.get_docstring(function) or "").partition("Args:")
    named = all(re.search(rf"\b{each}\b", told) for each in parameters(function))
    return bool(found) and (named or told.startswith(" as of `"))


def unexplained(source: str) -> list[str]:
    """Public functions of three parameters or more that neither their docstring nor a base explains."""
    tree = ast.parse(source)
    own = classes() | {node.name: [node] for node in tree.body if isinstance(node, ast.ClassDef)}
    return [
        each.name
        for holder, each in public_functions(tree)
        if len(parameters(each)) >= 3 and not explains(each) and not left_to_base(each, holder, own)
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def row_mean(x): pass", ["1 row_mean"]),
        ("def f(\n    place): pass", ["2 place"]),
        ("class Look: pass", ["1 Look"]),
        ("def arrow(placement, throwing): pass", []),
    ],
)
def test_forbidden_names_are_found(source: str, found: list[str]) -> None:
    assert forbidden(source) == found


def test_names_of_the_core_have_no_forbidden_word() -> None:
    found = {str(path.relative_to(PACKAGE)): forbidden(path.read_text(encoding="utf-8")) for path in core_files()}
    for name, allowed in CONTRACT.items():
        found[name] = [each for each in found[name] if each.split()[1] != allowed]
    assert {name: names for name, names in found.items() if names} == {}


def test_functions_without_args_are_found() -> None:
    source = (
        'def f(a, b, c):\n    """Adds."""\n\n\ndef g(a, b, c):\n    """Adds.\n\n    Args:\n        a: one{}\n    """'
    )
    assert unexplained(source.format("")) == ["f", "g"]
    assert unexplained(source.format(", as b and c are")) == ["f"]
    assert unexplained("class _A:\n    def f(self, a, b, c): pass\n\n\nclass B:\n    def g(self, a, b): pass") == []


@pytest.mark.parametrize(
    ("head", "body", "explained"),
    [
        ("class A(Above):", "def f(self, a, b, c): pass", True),
        ("class A(Above):", "def g(self, a, b, c): pass", False),
        ("class A(Further):", 'def f(self, a, b, c):\n        """Adds."""', True),
        ("class A(Above):", 'def f(self, a, b, c):\n        """Adds.\n\n        Numbers.\n        """', False),
        ("class A(Above):", "@classmethod\n    def f(cls, a, b, c): pass", False),
        ("class A(another.Library):", "def f(self, a, b, c): pass", True),
        ("class A:", "def f(self, a, b, c): pass", False),
        ("class A(Protocol):", "def f(self, a, b, c): pass", False),
        ("class A(nn.Module):", "def f(self, a, b, c): pass", False),
    ],
)
def test_a_base_that_explains_a_method_explains_those_that_say_little(head: str, body: str, explained: bool) -> None:
    above = (
        'class Above:\n    def f(self, a, b, c):\n        """Adds.\n\n        Args:\n            a: b, c\n        """\n'
    )
    found = unexplained(f"{above}\n\nclass Further(Above):\n    pass\n\n\n{head}\n    {body}")
    assert bool(found) is not explained


def test_larger_public_functions_explain_their_arguments() -> None:
    every = sorted(PACKAGE.rglob("*.py"))
    found = {str(path.relative_to(PACKAGE)): unexplained(path.read_text(encoding="utf-8")) for path in every}
    assert {name: functions for name, functions in found.items() if functions} == {}
