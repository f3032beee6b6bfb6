"""The calls of tools in a response, in the form that the model's chat template taught it:

    hermes      <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>     Qwen, Hermes
    qwen_xml    <tool_call><function=zoom><parameter=box>[0, 0, 9, 9]</parameter></function></tool_call>    Qwen3-Coder
    glm         <tool_call>zoom<arg_key>box</arg_key><arg_value>[0, 0, 9, 9]</arg_value></tool_call>     GLM
    gemma       <|tool_call>call:zoom{box:[0,0,9,9]}<tool_call|>, texts between <|"|>   Gemma 4
    mistral     [TOOL_CALLS]zoom[ARGS]{"box": [0, 0, 9, 9]}     Mistral; earlier ones a list of JSON objects
    pythonic    <|tool_call_start|>[zoom(box=[0, 0, 9, 9])]<|tool_call_end|>    LFM2
    llama       <|python_tag|>{"name": "zoom", "parameters": {"box": [0, 0, 9, 9]}}     or without the tag; `;` between
    json        the same objects anywhere in the text, with "arguments" or "parameters"

An object may also hold calls as OpenAI's servers write them: {"function": {"name": ..., "arguments": ...}}, alone or in
a list of "tool_calls".
Nothing in a response raises: a call that cannot be read is a `ToolCall` whose `error` says why, and the model is told.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from .environments import ToolCall

THOUGHTS = re.compile(r"\A\s*+(?:<think>)?(?:(?!<think>).)*?</think>", re.DOTALL)  # the prompt may hold their beginning
GLM_BLOCK = re.compile(r"<tool_call>\s*[^\s<{]+\s*<arg_key>")
CALL_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
XML_BLOCK = re.compile(  # also where the model has left out the first mark
    r"(?:<tool_call>|(?=<function=[^<>\n]+>\s*(?:<parameter=|</function>)))(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)",
    re.DOTALL,
)
XML_NEXT = re.compile(r"(?<=</function>)\s*(?=<function=)")
GEMMA_BLOCK = re.compile(r"<\|tool_call>(.*?)(?:<tool_call\|>|(?=<\|tool_call>)|\Z)", re.DOTALL)
GEMMA_CALL = re.compile(r"\s*call:([^\s{]+)\s*(\{.*\})\s*\Z", re.DOTALL)
GEMMA_PART = re.compile(  # a text in Gemma's quotes, one in JSON's, a name without any
    r'<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|(?<=[{,])\s*([^\s"{}\[\]:,<]+)\s*:', re.DOTALL
)
OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:', re.DOTALL)  # how a JSON object with a name begins
PYTHON_TAG = "<|python_tag|>"
LIST_BEGIN, LIST_END = "<|tool_call_start|>", "<|tool_call_end|>"
MISTRAL = "[TOOL_CALLS]"
TURN_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "</s>")
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
SHOWN = 80  # characters of a malformed call in its error
MOST_CALLS = 64  # of one response; the rest of a text without end is not read
READ_AGAIN = 16  # lengths of a text that are read for objects that do not end
PIECE = 4096  # characters that the decoder counts lines in where it fails


def tool_call_format(template: str | None) -> str:
    """The form of calls that a chat template teaches; auto where it names none."""
    template = template or ""
    if "<tool_call>" in template:
        return "qwen_xml" if "<function=" in template else "glm" if "<arg_key>" in template else "hermes"
    if "ipython" in template:
        return "llama"
    return _form_by_marks(template, "auto")


def parse_tool_calls(text: str, form: str = "auto", tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """The calls in a response, in their order; those that cannot be read have an `error`.

    Args:
        text: of the response.
        form: see the module's text; auto takes the form whose marks the response has.
        tools: their schemas, which say what is a text where the form writes texts without quotes.
    """
    for end in TURN_ENDS:
        text = text.removesuffix(end)
    text = without_thoughts(text)
    if form == "auto":
        form = "glm" if GLM_BLOCK.search(text) else _form_by_marks(text, "json")
    calls, told = list(CALL_FORMS[form](text))[:MOST_CALLS], [tool.get("function", tool) for tool in tools]
    hints = {tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in told}
    return [replace(call, arguments=_values(call.arguments, hints.get(call.name, {}))) for call in calls]


def without_thoughts(text: str) -> str:
    """A response behind the thoughts that it begins with: what is weighed in them is not asked for."""
    return THOUGHTS.sub("", text, count=1)


def render_tool_call(call: ToolCall) -> str:
    """The text that `parse_tool_calls` reads as this call, in the form hermes."""
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def _form_by_marks(text: str, otherwise: str) -> str:
    found = [(text.index(mark), form) for mark, form in _MARKS.items() if mark in text]
    return min(found)[1] if found else otherwise


def _malformed(text: str, why: str) -> ToolCall:
    text = " ".join(text.split())
    return ToolCall("", {}, f"malformed call: {why}: {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:SHOWN]


# ---------------------------------------------------------------------------------------------------------------------
# JSON objects
# ---------------------------------------------------------------------------------------------------------------------


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


def _parse_llama(text: str) -> Iterator[ToolCall]:
    if PYTHON_TAG not in text:
        if text.strip().startswith("{"):
            yield from _parse_objects(text)
        return
    asked = text.partition(PYTHON_TAG)[2].replace(PYTHON_TAG, " ").strip()
    yield from _parse_objects(asked) if asked.startswith("{") else _python_calls(asked)


def _parse_mistral(text: str) -> Iterator[ToolCall]:
    for asked in text.split(MISTRAL)[1:]:
        name, found, given = asked.partition("[ARGS]")
        try:
            value, _ = json.JSONDecoder().raw_decode((given if found else asked).lstrip())
        except (ValueError, RecursionError) as error:
            yield _malformed(asked, f"not valid JSON ({_short(error)})")
            continue
        if found:
            value = {"name": name.partition("[CALL_ID]")[0].strip(), "arguments": value}
        for each in value if isinstance(value, list) else [value]:
            yield from map(_call_of, _unwrapped(each))


# ---------------------------------------------------------------------------------------------------------------------
# Tags
# ---------------------------------------------------------------------------------------------------------------------


class _Tags(NamedTuple):
    """A form of tags around each value. call: name and arguments; argument: name and value; end: of an argument."""

    call: re.Pattern[str]
    argument: re.Pattern[str]
    end: str
    shown: str


_XML = _Tags(
    re.compile(r"\s*<function=([^>\n]*)>(.*?)</function>\s*\Z", re.DOTALL),
    re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL),
    "</parameter>",
    "<function=NAME><parameter=NAME> ... </parameter></function>",
)
_GLM = _Tags(
    re.compile(r"\s*([^\s<>{}\[\]\"]+)\s*(?:(?=<arg_key>)(.*))?\Z", re.DOTALL),
    re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    "</arg_value>",
    "NAME<arg_key>NAME</arg_key><arg_value> ... </arg_value>",
)


def _parse_blocks(text: str, glm: bool = False, blocks: re.Pattern[str] = CALL_BLOCK) -> Iterator[ToolCall]:
    """What stands in <tool_call>: Qwen's tags or JSON, or GLM's tags."""
    for block in blocks.finditer(text):
        marked, inner = block[0].startswith("<tool_call>"), block[1]
        if not marked:  # then the call ends by its own mark; a mention has neither that nor an argument
            whole, end, rest = inner.rpartition("</function>")
            begun = "</parameter>" in rest or not end and block[0].endswith("</tool_call>")
            inner = inner if begun else whole + end
        inner = inner.strip()
        if "<function=" in inner:
            one = _tagged_call(inner, _XML)  # a text in it may look like the end of one and the beginning of another
            alone = one.error is None and inner.count("<parameter=") == inner.count("</parameter>")
            yield from [one] if alone else [_tagged_call(each, _XML) for each in XML_NEXT.split(inner)]
        elif not marked:
            continue
        elif not block[0].endswith("</tool_call>"):
            yield _malformed(inner, "</tool_call> is missing")
        elif glm and not inner.startswith(("{", "[")):
            yield _tagged_call(inner, _GLM)
        else:
            yield from _object_calls(inner)


def _tagged_call(text: str, tags: _Tags) -> ToolCall:
    found = tags.call.match(text)
    if found is None or not found[1].strip():
        return _malformed(text, f"{tags.shown} is not complete")
    given = found[2] or ""
    ended, end, rest = given.rpartition(tags.end)  # what begins behind the last end would be read to its own
    if tags.argument.sub("", ended + end).strip() or rest.strip():
        return _malformed(text, f"{tags.shown} is not complete")
    return ToolCall(found[1].strip(), {m[1].strip(): _Written(m[2]) for m in tags.argument.finditer(given)}, None)


class _Written(str):
    """An argument as it stands in a form that writes texts without quotes."""


def _values(arguments: dict[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """With the values of what is `_Written`."""
    return {
        name: _value(str(value), hints.get(name) or {}) if isinstance(value, _Written) else value
        for name, value in arguments.items()
    }


def _value(text: str, hint: Mapping[str, Any]) -> Any:
    """An argument's value: JSON or Python's name of one where it is, else the text; by its schema 12 may be a text
    too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    types = _types(hint)
    fits = any(type(value) in JSON_TYPES.get(each, ()) for each in types)
    return text if "string" in types and not fits else value


def _types(hint: Mapping[str, Any]) -> set[str]:
    """Those that a JSON schema names: one, a list, or those of its choices."""
    named = hint.get("type") or []
    found = {named} if isinstance(named, str) else set(named)
    choices = [each for key in ("anyOf", "oneOf") for each in hint.get(key) or []]
    return found.union({"null"} if hint.get("nullable") else (), *map(_types, choices))


def _parse_gemma(text: str) -> Iterator[ToolCall]:
    for block in GEMMA_BLOCK.finditer(text):
        found = GEMMA_CALL.match(block[1])
        if found is None or not block[0].endswith("<tool_call|>"):
            yield _malformed(block[1], "call:NAME{...}<tool_call|> is not complete")
            continue
        try:
            yield _call_of({"name": found[1], "arguments": json.loads(GEMMA_PART.sub(_as_json, found[2]))})
        except (ValueError, RecursionError) as error:
            yield _malformed(found[2], f"arguments that cannot be read ({_short(error)})")


def _as_json(part: re.Match[str]) -> str:
    return json.dumps(part[1]) if part[1] is not None else part[2] or f'"{part[3]}":'


# ---------------------------------------------------------------------------------------------------------------------
# Python
# ---------------------------------------------------------------------------------------------------------------------


class _JsonNames(ast.NodeTransformer):
    """JSON's true, false and null inside Python's literals."""

    values = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(self.values[node.id]), node) if node.id in self.values else node


def _parse_pythonic(text: str) -> Iterator[ToolCall]:
    for asked in text.split(LIST_BEGIN)[1:]:
        yield from _python_calls(asked.partition(LIST_END)[0].strip())


def _python_calls(text: str) -> Iterator[ToolCall]:
    """Python's calls with named arguments, one or a list: `[zoom(box=[0, 9])]`, `brave_search.call(query="x")`."""
    try:
        asked = ast.parse(text, mode="eval").body
        for call in asked.elts if isinstance(asked, ast.List) else [asked]:
            if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
                yield _malformed(text, "no call with named arguments")
                return
            named = {each.arg: each.value for each in call.keywords}
            arguments = {str(arg): ast.literal_eval(_JsonNames().visit(value)) for arg, value in named.items()}
            json.dumps(arguments)  # TypeError for a set, for bytes and the like
            yield ToolCall(ast.unparse(call.func).removesuffix(".call"), arguments, None)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        yield _malformed(text, "no call as Python writes one")


CALL_FORMS: dict[str, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _parse_blocks,
    "qwen_xml": partial(_parse_blocks, blocks=XML_BLOCK),
    "glm": partial(_parse_blocks, glm=True),
    "gemma": _parse_gemma,
    "mistral": _parse_mistral,
    "pythonic": _parse_pythonic,
    "llama": _parse_llama,
    "json": _parse_objects,
}
_MARKS = {
    "<tool_call>": "hermes", "<|tool_call>": "gemma", MISTRAL: "mistral", LIST_BEGIN: "pythonic", PYTHON_TAG: "llama"
}  # fmt: skip
