"""Tools of a conversation: their schemas, the calls in a response, and the environment that runs them.

A tool is a Python function with type hints and a docstring that describes its arguments. The model's own chat template
shows its schema to the model; the model asks for it in the form that the template taught it:

    hermes      <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>     Qwen, Hermes
    qwen_xml    <tool_call><function=zoom><parameter=box>[0, 0, 9, 9]</parameter></function></tool_call>    Qwen3-Coder
    llama       <|python_tag|>{"name": "zoom", "parameters": {"box": [0, 0, 9, 9]}}     or without the tag; `;` between
    json        the same objects anywhere in the text, with "arguments" or "parameters"

An object may also hold calls as OpenAI's servers write them: {"function": {"name": ..., "arguments": ...}}, alone or in
a list of "tool_calls".
Nothing in a response raises: a call that cannot be read is a `ToolCall` whose `error` says why, and the model is told.
"""

import ast
import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from PIL import Image
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic_core import to_jsonable_python

from ..errors import ConfigError
from ..runtime.usercode.calls import what_happened
from ..runtime.usercode.loading import callable_name
from .environments import Action, Environment, ToolCall, awaited_value

CALL_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
XML_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)</function>\s*\Z", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:', re.DOTALL)  # how a JSON object with a name begins
PYTHON_TAG = "<|python_tag|>"
TURN_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>")
SHOWN = 80  # characters of a malformed call in its error
SHOWN_ERROR = 200  # of a failed call's in logs and records
MOST_CALLS = 64  # of one response; the rest of a text without end is not read
READ_AGAIN = 16  # lengths of a text that are read for objects that do not end
PIECE = 4096  # characters that the decoder counts lines in where it fails
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
# Calls in a response
# ---------------------------------------------------------------------------------------------------------------------


def tool_call_format(template: str | None) -> str:
    """The form of calls that a chat template teaches; auto where it names none."""
    template = template or ""
    if "<tool_call>" in template:
        return "qwen_xml" if "<function=" in template else "hermes"
    if PYTHON_TAG in template or "ipython" in template:
        return "llama"
    return "auto"


def parse_tool_calls(text: str, form: str = "auto", tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """The calls in a response, in their order; those that cannot be read have an `error`.

    Args:
        text: of the response.
        form: see the module's text; auto takes the form whose marks the response has.
        tools: their schemas, which say what is a text where the form writes texts without quotes.
    """
    for end in TURN_ENDS:
        text = text.removesuffix(end)
    if form == "auto":
        form = "hermes" if "<tool_call>" in text else "llama" if PYTHON_TAG in text else "json"
    calls, told = list(_FORMS[form].parse(text))[:MOST_CALLS], [tool.get("function", tool) for tool in tools]
    hints = {tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in told}
    return [replace(call, arguments=_values(call.arguments, hints.get(call.name, {}))) for call in calls]


def render_tool_call(call: ToolCall, form: str = "hermes") -> str:
    """The text that `parse_tool_calls` reads as this call."""
    return _FORMS[form].render(call)


def _object_calls(text: str) -> Iterator[ToolCall]:
    """The call that a JSON text is, or those that it holds."""
    try:
        yield from map(_call_of, _unwrapped(json.loads(text)))
    except (ValueError, RecursionError) as error:
        yield _malformed(text, f"not valid JSON ({_short(error)})")


def _unwrapped(value: Any) -> list[Any]:
    """What the `tool_calls` or the `function` of an object hold; the value itself where it has neither."""
    listed = value.get("tool_calls") if isinstance(value, dict) else None
    return [
        each["function"] if isinstance(each, dict) and "name" not in each and _is_call(each.get("function")) else each
        for each in (listed if isinstance(listed, list) and listed else [value])
    ]


def _is_call(value: Any, keys: Sequence[str] = ("arguments",)) -> bool:
    """Whether it looks like one; with `parameters` the function of an object would be the schema of a tool."""
    return isinstance(value, dict) and "name" in value and any(key in value for key in keys)


def _call_of(value: Any, shown: str | None = None) -> ToolCall:
    """The call that JSON values say: a name, and arguments as an object or as the JSON text of one."""
    shown = shown or json.dumps(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed(shown, 'a call is an object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's servers give them as text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, 'malformed call: "arguments" is an object of names and values')
    return ToolCall(value["name"], arguments, None)


def _malformed(text: str, why: str) -> ToolCall:
    text = " ".join(text.split())
    return ToolCall("", {}, f"malformed call: {why}: {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:SHOWN]


def _parse_hermes(text: str) -> Iterator[ToolCall]:
    for block in CALL_BLOCK.finditer(text):
        inner = block[1].strip()
        if "<function=" in inner:
            yield _xml_call(inner)
        elif not block[0].endswith("</tool_call>"):
            yield _malformed(inner, "</tool_call> is missing")
        else:
            yield from _object_calls(inner)


def _xml_call(text: str) -> ToolCall:
    found = XML_FUNCTION.match(text)
    if found is None or not found[1].strip():
        return _malformed(text, "<function=NAME> ... </function> is not complete")
    ended, end, rest = found[2].rpartition("</parameter>")  # what begins behind the last end would be read to its own
    if XML_PARAMETER.sub("", ended + end).strip() or rest.strip():
        return _malformed(text, "<parameter=NAME> ... </parameter> is not complete")
    return ToolCall(found[1].strip(), {m[1].strip(): _Written(m[2]) for m in XML_PARAMETER.finditer(found[2])}, None)


class _Written(str):
    """A parameter as it stands in the form that writes texts without quotes."""


def _values(arguments: dict[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """With the values of what is `_Written`."""
    return {
        name: _value(str(value), hints.get(name) or {}) if isinstance(value, _Written) else value
        for name, value in arguments.items()
    }


def _value(text: str, hint: Mapping[str, Any]) -> Any:
    """A parameter's value: JSON where it is, else the text; by its schema 12 may be a text too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_text = hint.get("type") == "string" and not (value is None and hint.get("nullable"))
    return text if is_text and not isinstance(value, str) else value


def _parse_llama(text: str) -> Iterator[ToolCall]:
    if PYTHON_TAG not in text:
        if text.strip().startswith("{"):
            yield from _parse_objects(text)
        return
    asked = text.partition(PYTHON_TAG)[2].replace(PYTHON_TAG, " ").strip()
    if asked.startswith("{"):
        yield from _parse_objects(asked)
    else:
        yield _python_call(asked)


def _python_call(text: str) -> ToolCall:
    """Llama's calls of built-in tools: `brave_search.call(query="...")`."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return _malformed(text, "no call with named arguments")
        arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return ToolCall(ast.unparse(call.func).removesuffix(".call"), arguments, None)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return _malformed(text, f"what follows {PYTHON_TAG} is no call")


def _parse_objects(text: str) -> Iterator[ToolCall]:
    """Every outermost JSON object that is a call or holds some; one that begins as a call and cannot be read is
    malformed. Objects that do not end, one in another, are given up after some: the time is linear in the text."""
    decoder, position, left = json.JSONDecoder(), 0, READ_AGAIN * len(text)
    while left > 0 and (found := OBJECT.search(text, position)) is not None:
        position = found.start()
        if position > PIECE:
            text, position = text[position:], 0
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            if re.match(r'\{\s*"(name|arguments|parameters)"\s*:', text[position : position + SHOWN]):
                yield _malformed(text[position:], f"not valid JSON ({_short(error)})")
                return
            left -= error.pos - position if isinstance(error, json.JSONDecodeError) else left  # nested beyond reading
            end = position + 1
        else:
            called = [each for each in _unwrapped(value) if _is_call(each, ("arguments", "parameters"))]
            yield from (_call_of(each, text[position:end]) for each in called)
        position = end


class _Form(NamedTuple):
    """One form of calls. parse: of a response; render: of a call."""

    parse: Callable[[str], Iterator[ToolCall]]
    render: Callable[[ToolCall], str]


def _json_text(value: Any) -> str:
    """JSON without the marks that end a call: `<\\/` in a JSON text is `</`."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<tool_call>", "\\u003ctool_call>")


def _object_text(call: ToolCall, arguments: str = "arguments") -> str:
    return _json_text({"name": call.name, arguments: call.arguments})


def _xml_text(call: ToolCall) -> str:
    given = "".join(f"<parameter={k}>\n{_json_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"


_FORMS = {
    "hermes": _Form(_parse_hermes, lambda call: f"<tool_call>\n{_object_text(call)}\n</tool_call>"),
    "qwen_xml": _Form(_parse_hermes, _xml_text),
    "llama": _Form(_parse_llama, lambda call: f"{PYTHON_TAG}{_object_text(call, 'parameters')}"),
    "json": _Form(_parse_objects, _object_text),
}
CALL_FORMS = tuple(_FORMS)


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
            return f"error: {call.error}", True
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there is: {', '.join(self._tools)}", True
        try:
            result = self._tools[call.name](**call.arguments)
            return tool_content(awaited_value(result)), False
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return f"error: {call.name}: {told}", True
        except Exception as error:
            return f"error: {call.name} {what_happened(error)}", True


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
