"""Tools of a conversation: their schemas, and the environment that runs what a model calls.

A tool is a Python function with type hints and a docstring that describes its arguments. The model's own chat template
shows its schema to the model; the model asks for it in a form that `tool_calls` reads.
"""

import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
from PIL import Image
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic_core import to_jsonable_python

from ..errors import ConfigError
from ..runtime.usercode.calls import what_happened
from ..runtime.usercode.loading import callable_name
from .environments import CALL_ERROR, Action, Environment, ToolCall, awaited_value

SHOWN_ERROR = 200  # characters of a failed call's in logs and records
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CLASSES = re.compile(r'"type": "(object|image|audio)"')
PARTS = ("text", "image", "image_url", "video", "video_url")  # kinds of content parts


# ---------------------------------------------------------------------------------------------------------------------
# Schemas
# ---------------------------------------------------------------------------------------------------------------------


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints and its docstring in Google's form, for `apply_chat_template`.

    Raises ConfigError that says what is missing.
    """
    from transformers.utils import get_json_schema  # with it comes torch, which an episode's process has no use for

    try:
        arguments = inspect.signature(function).parameters.values()
        unnamed = [each.name for each in arguments if each.kind not in NAMED or each.name == "self"]
        if unnamed:
            raise TypeError(f"a model cannot give {', '.join(unnamed)}: it names each argument")
        schema = get_json_schema(_with_plain_docstring(function))
        for name, told in schema["function"]["parameters"]["properties"].items():
            if CLASSES.search(json.dumps(told)):  # transformers says no more of a class than that it is an object
                description = told["description"]
                told.clear()
                told |= {**_schema_of_class(function, name), "description": description}
        return schema
    except Exception as error:  # transformers' and pydantic's own, and hints that name what is not there
        raise ConfigError(
            f"tool {callable_name(function)}: {str(error).splitlines()[0]}. A tool has a type hint for each argument, "
            "and a docstring in Google's form: below `Args:` a line `argument: what it is` on each"
        ) from None


def _schema_of_class(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Of an argument whose hint is an Enum, a dataclass, a model of pydantic or the like."""
    hint = get_type_hints(function, include_extras=True)[name]
    try:
        return TypeAdapter(hint).json_schema()
    except PydanticUserError:
        raise TypeError(f"a model cannot write {name}, {hint}: it writes JSON") from None


def _with_plain_docstring(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with `a: what` in its docstring in place of `a (int): what`, which transformers does not read."""

    @functools.wraps(function)
    def told(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    told.__doc__ = re.sub(r"^(\s+\w+) ?\([^)\n]*\):", r"\1:", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return told


# ---------------------------------------------------------------------------------------------------------------------
# Running them
# ---------------------------------------------------------------------------------------------------------------------


class ToolEnvironment(Environment):
    """Runs the calls of each response and answers with tool messages; an episode ends with a response that has none.

    A call that cannot be run (no such tool, wrong arguments, malformed, or the tool raises) is answered by a text that
    begins with `error:`. A tool returns text, a PIL image, a list of content parts, or a value that JSON has; it may be
    a coroutine. It gives no rewards: the run's own is of the whole episode.

    tools: functions, or methods of a subclass, whose `self.row` is then the data row of the episode.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self.row: dict[str, Any] = {}
        self._functions = [getattr(tool, "function", tool) for tool in tools]  # `--tools` are loaded ones
        self._tools = {callable_name(tool): _checked(tool) for tool in self._functions}
        if len(self._tools) < len(tools):
            raise ConfigError(f"two tools have one name; there are: {', '.join(map(callable_name, tools))}")

    def schemas(self) -> list[dict[str, Any]]:
        """Those of the tools. Raises ConfigError for one without type hints or descriptions."""
        return [tool_schema(tool) for tool in self._functions]

    def reset(self, row: dict[str, Any]) -> None:
        """Keep the row; the episode begins with its own prompt."""
        self.row = row

    def step(self, action: Action) -> tuple[list[dict[str, Any]] | None, float | None, bool, dict[str, Any]]:
        """The answers to the calls, in their order."""
        if not action.tool_calls:
            return None, None, True, {}
        answers = [(call, *self.run(call)) for call in action.tool_calls]
        messages = [{"role": "tool", "name": call.name, "content": content} for call, content, _ in answers]
        called = Counter(call.name for call, _, _ in answers if call.name in self._tools)
        errors = [str(content) for _, content, bad in answers if bad]
        told = {"tool_error": errors[0].partition("\n")[0][:SHOWN_ERROR]} if errors else {}
        return messages, None, False, {"tool_calls": dict(called), "tool_errors": len(errors), **told}

    def run(self, call: ToolCall) -> tuple[str | list[dict[str, Any]], bool]:
        """The content of the answer to one call, and whether it tells of an error."""
        if call.error is not None:
            return f"{CALL_ERROR}{call.error}", True
        if call.name not in self._tools:
            return f"{CALL_ERROR}there is no tool {call.name!r}; there is: {', '.join(self._tools)}", True
        try:
            result = self._tools[call.name](**call.arguments)
            return tool_content(awaited_value(result)), False
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return f"{CALL_ERROR}{call.name}: {told}", True
        except BaseException as error:  # whatever a tool raises, SystemExit of argparse and CancelledError included
            return f"{CALL_ERROR}{call.name} {what_happened(error)}", True


def _checked(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, which raises ValidationError for arguments that are not of its types."""
    if not inspect.isroutine(tool):
        raise ConfigError(f"tool {callable_name(tool)} is a {type(tool).__name__}; it must be a function or a method")
    try:
        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(tool)
    except Exception as error:  # pydantic's own, and hints that name what is not there
        raise ConfigError(
            f"tool {callable_name(tool)}: its arguments have no types that can be checked: {str(error).splitlines()[0]}"
        ) from None


def tool_content(result: Any) -> str | list[dict[str, Any]]:
    """What a tool returned as the content of its message. Raises TypeError for what has no place in one."""
    if isinstance(result, str):
        return result
    if _is_image(result) or (_is_part(result) and result["type"] in result):
        return [_part(result)]
    if isinstance(result, (list, tuple)) and any(map(_is_part, result)):  # texts alone are JSON values
        return [_part(each) for each in result]
    try:
        return json.dumps(to_jsonable_python(result, fallback=_numbers), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        kind = type(result).__name__
        raise TypeError(f"a {kind} is no result: text, an image, content parts or JSON values are sent back") from None


def _numbers(value: Any) -> Any:
    """Numbers of NumPy and PyTorch, and lists of them, as Python's."""
    if getattr(value, "ndim", 2) > 1:
        raise TypeError
    return value.tolist()


def _is_image(value: Any) -> bool:
    array = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3
    return array or isinstance(value, Image.Image)


def _is_part(value: Any) -> bool:
    return _is_image(value) or (isinstance(value, Mapping) and value.get("type") in PARTS)


def _part(value: Any) -> dict[str, Any]:
    if _is_image(value):
        return {"type": "image", "image": value}
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not _is_part(value):
        raise TypeError(f"a {type(value).__name__} in its result is no content part")
    return dict(value)
