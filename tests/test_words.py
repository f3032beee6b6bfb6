"""The core's names are the field's own words, and its larger functions say what their arguments are."""

import ast
import re
from collections.abc import Iterator
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
EXPLAINED = ("experience", "algorithms", "trainer", "rollout")
Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_METHODS = {"ABC", "Protocol", "NamedTuple"}  # bases that say nothing of a class's methods


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


def left_to_base(function: Function, holder: ast.Module | ast.ClassDef) -> bool:
    """Whether a base may explain it: a method with one line of docstring or none, without decorators, of a class with a
    base. Whether that base has the method is not looked up; where it has, its own docstring needs `Args:`."""
    bases = {ast.unparse(base) for base in holder.bases} - NO_METHODS if isinstance(holder, ast.ClassDef) else set()
    return bool(bases) and not function.decorator_list and "\n" not in (ast.get_docstring(function) or "")


def explains(function: Function) -> bool:
    """Whether `Args:` of its docstring name every parameter, or say that they are as of another function."""
    _, found, told = (ast.get_docstring(function) or "").partition("Args:")
    named = all(re.search(rf"\b{each}\b", told) for each in parameters(function))
    return bool(found) and (named or told.startswith(" as of `"))


def unexplained(source: str) -> list[str]:
    """Public functions of three parameters or more that neither their docstring explains nor a base may."""
    return [
        each.name
        for holder, each in public_functions(ast.parse(source))
        if len(parameters(each)) >= 3 and not explains(each) and not left_to_base(each, holder)
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
        ("class A(Base):", "def f(self, a, b, c): pass", True),
        ("class A(Base):", 'def f(self, a, b, c):\n        """Adds."""', True),
        ("class A(Base):", 'def f(self, a, b, c):\n        """Adds.\n\n        Numbers.\n        """', False),
        ("class A(Base):", "@classmethod\n    def f(cls, a, b, c): pass", False),
        ("class A:", "def f(self, a, b, c): pass", False),
        ("class A(Protocol):", "def f(self, a, b, c): pass", False),
    ],
)
def test_a_base_explains_methods_that_say_little(head: str, body: str, explained: bool) -> None:
    assert unexplained(f"{head}\n    {body}") == ([] if explained else ["f"])


def test_larger_public_functions_explain_their_arguments() -> None:
    rooms = [path for path in core_files() if path.relative_to(PACKAGE).parts[0] in EXPLAINED]
    found = {str(path.relative_to(PACKAGE)): unexplained(path.read_text(encoding="utf-8")) for path in rooms}
    assert {name: functions for name, functions in found.items() if functions} == {}
