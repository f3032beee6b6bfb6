"""Arithmetic by a list of what is allowed: the child's side of `python.py`, without imports of the package."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 2000  # characters of an expression
LARGEST_BITS = 4096  # of an integer
SHOWN = 400  # characters of a result

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def evaluate(expression: str) -> tuple[str, str]:
    """(the value as text, what was wrong with the expression), one of them empty."""
    try:
        if len(expression) > LONGEST:
            raise ValueError(f"an expression has at most {LONGEST} characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return repr(value)[:SHOWN], ""
    except SyntaxError as error:
        return "", f"it is no expression: {error.msg}"
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return "", f"{type(error).__name__}: {error}"


def _value(node: ast.expr) -> Any:
    """The value of a node. Raises ValueError for what is not on the lists."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_number(node.operand))
    if isinstance(node, ast.BinOp):
        return _binary(node)
    if isinstance(node, ast.Compare):
        return _compared(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ValueError(f"{node.func.id} takes no named arguments here")
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not allowed: this is a calculator")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if isinstance(value, list):
        raise ValueError("a list is no number")
    return value


def _binary(node: ast.BinOp) -> Any:
    left, right = _number(node.left), _number(node.right)
    if isinstance(node.op, ast.Pow):
        return _bounded(_power(left, right))
    if type(node.op) not in _BINARY:
        raise ValueError("of operators there are + - * / // % **")
    return _bounded(_BINARY[type(node.op)](left, right))


def _compared(node: ast.Compare) -> bool:
    values = [_number(each) for each in (node.left, *node.comparators)]
    if not all(type(each) in _COMPARE for each in node.ops):
        raise ValueError("of comparisons there are < <= > >= == !=")
    return all(_COMPARE[type(each)](a, b) for each, a, b in zip(node.ops, values, values[1:]))


def _power(base: Any, exponent: Any) -> Any:
    """Checked before it is worked out: 9**9**9 would fill the memory."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > LARGEST_BITS:
        raise ValueError("the power is too large")
    return base**exponent


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError("the number is too large")
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    return value


def _limited(function: Callable[..., Any], largest: int, first: int = 0) -> Callable[..., Any]:
    """The function for integers up to a limit, of the arguments from `first` on: larger ones would take long."""

    def call(*arguments: int) -> Any:
        if any(abs(each) > largest for each in arguments[first:]):
            raise ValueError(f"{function.__name__} takes {'digits' if first else 'numbers'} up to {largest}")
        return function(*arguments)

    return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "comb": _limited(math.comb, 1000), "cos": math.cos, "exp": math.exp,
    "factorial": _limited(math.factorial, 400), "floor": math.floor, "gcd": math.gcd, "log": math.log,
    "log10": math.log10, "max": max, "min": min, "pow": _power, "round": _limited(round, 400, 1),
    "sin": math.sin, "sqrt": math.sqrt, "sum": sum, "tan": math.tan,
}  # fmt: skip
