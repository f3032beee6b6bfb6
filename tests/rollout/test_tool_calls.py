"""Calls of tools in a response, in each of their forms."""

from __future__ import annotations

import json
import keyword
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.rollout.environments import ToolCall
from lightrft_visual.rollout.tool_calls import (
    CALL_FORMS,
    MOST_CALLS,
    parse_tool_calls,
    tool_call_format,
)

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(["</tool_call>", "<tool_call>", '"}', "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3), st.none())


def json_text(value) -> str:
    """JSON without the marks that end a call: `<\\/` in a JSON text is `</`."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<tool_call>", "\\u003ctool_call>")


def gemma_value(value) -> str:
    if isinstance(value, dict):
        names = [name if re.fullmatch(r"\w+", name) else gemma_value(name) for name in value]
        return "{" + ",".join(f"{name}:{gemma_value(each)}" for name, each in zip(names, value.values())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def rendered(call: ToolCall, form: str) -> str:
    named = {name: json_text(value) for name, value in call.arguments.items()}
    if form in ("hermes", "json"):
        text = json_text({"name": call.name, "arguments": call.arguments})
        return text if form == "json" else f"<tool_call>\n{text}\n</tool_call>"
    if form == "qwen_xml":
        given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in named.items())
        return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"
    if form == "glm":
        tags = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        return f"<tool_call>{call.name}\n{''.join(tags.format(*each) for each in named.items())}</tool_call>"
    if form == "gemma":
        return f"<|tool_call>call:{call.name}{gemma_value(call.arguments)}<tool_call|>"
    if form == "mistral":
        return f"[TOOL_CALLS]{call.name}[ARGS]{json_text(call.arguments)}"
    if form == "pythonic":
        given = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        return f"<|tool_call_start|>[{call.name}({given})]<|tool_call_end|>"
    return "<|python_tag|>" + json_text({"name": call.name, "parameters": call.arguments})


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*CALL_FORMS]), CALLS)
def test_rendered_call_is_read_as_itself(form, call):
    text = rendered(call, form)
    assert parse_tool_calls(text, form) == [call]
    if call.arguments or form != "glm":  # a name alone is no call of others
        assert parse_tool_calls(f"I look closer. {text}<|im_end|>") == [call]  # whatever the form


def test_calls_of_llama_are_read_with_and_without_the_tag_and_with_semicolons():
    one, two = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "parameters": {}}'
    expected = [ToolCall("a", {"x": 1}, None), ToolCall("b", {}, None)]
    assert parse_tool_calls(f"{one}; {two}<|eom_id|>", "llama") == expected
    assert parse_tool_calls(f"<|python_tag|>{one}; {two}", "llama") == expected
    asked = '<|python_tag|>brave_search.call(query="cats", n=2)'
    assert parse_tool_calls(asked, "llama") == [ToolCall("brave_search", {"query": "cats", "n": 2}, None)]
    assert parse_tool_calls("The answer is {3}.", "llama") == []


@pytest.mark.parametrize(
    ("text", "form", "calls"),
    [
        (
            "<think>a</think>\n<tool_call>zoom\n<arg_key>box</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
            "<arg_key>why</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>look</tool_call>",
            "glm", [("zoom", {"box": [1, 2], "why": "12"}), ("look", {})],
        ),
        (
            "<tool_call>zoom<arg_key>why</arg_key><arg_value>a <b></arg_value></tool_call>",
            "glm", [("zoom", {"why": "a <b>"})],
        ),
        (
            "<|channel>thought\nso<channel|><|tool_call>call:zoom{"
            'box:[1,2],why:<|"|>a, b:"c"<|"|>,deep:{on:true,x:null}}'
            "<tool_call|><|tool_call>call:look{}<tool_call|><|tool_response>",
            "gemma", [("zoom", {"box": [1, 2], "why": 'a, b:"c"', "deep": {"on": True, "x": None}}), ("look", {})],
        ),
        ('<|tool_call>call:zoom{"why": "a,b:c", x: 1}<tool_call|>', "gemma", [("zoom", {"why": "a,b:c", "x": 1})]),
        (
            'Let me see.[TOOL_CALLS]zoom[CALL_ID]abc[ARGS]{"box": [1, 2]}[TOOL_CALLS]look[ARGS]{}</s>',
            "mistral", [("zoom", {"box": [1, 2]}), ("look", {})],
        ),
        (
            '[TOOL_CALLS] [{"name": "zoom", "arguments": {"box": [1]}}, {"name": "look", "arguments": {}}]</s>',
            "mistral", [("zoom", {"box": [1]}), ("look", {})],
        ),
        (
            '[TOOL_CALLS] [{"name": "look"}, {"name": "zoom", "arguments": {"box": [1]}}]</s>',
            "mistral", [("look", {}), ("zoom", {"box": [1]})],
        ),
        (
            "<|tool_call_start|>[zoom(box=[1, 2], why='a', deep={'on': true, 'x': null}), look()]<|tool_call_end|>",
            "pythonic", [("zoom", {"box": [1, 2], "why": "a", "deep": {"on": True, "x": None}}), ("look", {})],
        ),
    ],
)  # fmt: skip
def test_calls_are_read_as_glm_gemma_mistral_and_lfm_write_them(text, form, calls):
    tools = [{"name": "zoom", "parameters": {"properties": {"why": {"type": "string"}}}}]
    for each in (form, "auto"):
        assert [(call.name, call.arguments) for call in parse_tool_calls(text, each, tools)] == calls
    assert all(call.error is None for call in parse_tool_calls(text, form, tools))


@pytest.mark.parametrize(
    ("hint", "written", "value"),
    [
        ({"type": "string"}, "12", "12"), ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"), ({"type": ["string", "null"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "array"]}, "[1]", [1]), ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"type": ["string", "integer"]}, "true", "true"), ({"type": "integer"}, "12", 12), ({}, "12", 12),
        ({"type": "boolean"}, "False", False), ({"type": "string", "nullable": True}, "None", None),
        ({"type": "string"}, "True", "True"), ({"type": "boolean"}, "no", "no"),
    ],
)  # fmt: skip
def test_argument_without_quotes_is_of_the_types_that_its_schema_names(hint, written, value):
    tools = [{"name": "f", "parameters": {"properties": {"x": hint}}}]
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"
    assert parse_tool_calls(text, "glm", tools) == [ToolCall("f", {"x": value}, None)]


@pytest.mark.parametrize("around", ["<tool_call>{}</tool_call>", "<|python_tag|>{}", "{}"])
def test_calls_as_servers_of_openai_write_them_are_read(around):
    form = {"<tool_call>{}</tool_call>": "hermes", "<|python_tag|>{}": "llama", "{}": "json"}[around]
    one = {"id": "call_1", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 1}'}}
    two = {"name": "crop", "arguments": {"function": {"name": "f", "arguments": {}}}}
    zoom, cut = ToolCall("zoom", {"x": 1}, None), ToolCall("crop", two["arguments"], None)
    for value, calls in (
        (one, [zoom]),
        ({"role": "assistant", "content": None, "tool_calls": [one, two, one]}, [zoom, cut, zoom]),
        ({"function": {"name": "zoom", "arguments": {"x": 1}}}, [zoom]),
    ):
        assert parse_tool_calls(around.format(json.dumps(value)), form) == calls
    assert parse_tool_calls(json.dumps([one, {"function": two}])) == [zoom, cut]
    schema = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}
    assert parse_tool_calls(json.dumps(schema)) == []
    assert parse_tool_calls(json.dumps({"tool_calls": [], "function": {"name": "zoom"}})) == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>", "<tool_call></tool_call>", '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "zoom", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "zoom"', "<|python_tag|>zoom(", "<|python_tag|>x = 1", '{"name": "zoom", "arguments": {',
        "<tool_call><function=zoom></tool_call>",
        "<tool_call><function=zoom><parameter=x>1</function></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>", "<|python_tag|>f(" + "(" * 10_000,
        "<tool_call>zoom</tool_call>", "<tool_call>null</tool_call>", "<tool_call>zoom<arg_key>x</arg_key></tool_call>",
        "<tool_call>zoom<arg_key>x</arg_key><arg_value>1</tool_call>",
        "<tool_call>zoom\n<arg_key>x</arg_key>", "<|tool_call>call:zoom{x:1}", "<|tool_call>zoom{}<tool_call|>",
        "<|tool_call>call:zoom{x:y}<tool_call|>", '<|tool_call>call:zoom{x:<|"|>y}<tool_call|>', "[TOOL_CALLS]zoom",
        "[TOOL_CALLS]zoom[ARGS]{", "[TOOL_CALLS][ARGS]{}", "<|tool_call_start|>[zoom(1)]<|tool_call_end|>",
        "<|tool_call_start|>[zoom(x=y)]<|tool_call_end|>", "<|tool_call_start|>[zoom(**{'x': 1})]<|tool_call_end|>",
        "<|tool_call_start|>[zoom(x={1, 2})]<|tool_call_end|>", "<|tool_call_start|>[zoom(x=b'y')]<|tool_call_end|>",
        "<|tool_call_start|>zoom",
    ],
)  # fmt: skip
def test_malformed_call_is_one_call_with_an_error(text):
    (call,) = parse_tool_calls(text)
    assert "malformed call" in call.error and call.arguments == {} and len(call.error) < 300


GARBAGE = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name":', '"arguments":', "{", "}", "[", "]", '"', ";",
           "<function=", "<parameter=x>", "</function>", "zoom", "\\u12", "\ud800", "\0", "1e999", "NaN", "é", "\n",
           "<|im_end|>", "None(", "=", ":", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>",
           "<tool_call|>", "call:zoom{", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>",
           "<|tool_call_end|>"]  # fmt: skip


@given(st.lists(st.sampled_from(GARBAGE), max_size=60).map("".join))
def test_garbage_is_read_without_an_exception(text):
    for form in ("auto", *CALL_FORMS):
        for call in parse_tool_calls(text, form):
            assert isinstance(call.name, str) and isinstance(call.arguments, dict)
            assert call.name or call.error


XML = "<tool_call><function=f>{}</function></tool_call>"


@pytest.mark.parametrize(
    ("around", "repeated"),
    [
        ("<|python_tag|>{}", "{ "), ("{}", '{"":x'), ("{}", '{"a":['), ('{{"a":[' * 300 + "{}", '{"b":1},'), (XML, " "),
        ("<tool_call>{}</tool_call>", "{"), (XML, "<parameter=a>"), (XML, "<parameter=a>\n</function>"),
        ("<tool_call>f{}</tool_call>", "<arg_key>"), ("<tool_call>f{}</tool_call>", "<arg_key>a</arg_key><arg_value>"),
        ("<tool_call>{}<</tool_call>", "a"), ("<tool_call>a{}<</tool_call>", " "),
        ("<|tool_call>call:f{}<tool_call|>", "{"), ("<|tool_call>{}", "call:f{"),
        ("<|tool_call>call:f{{{}}}<tool_call|>", "a,"), ("[TOOL_CALLS]f[ARGS]{}", '{"a":'),
        ("[TOOL_CALLS]{}", "[ARGS]"), ("<|tool_call_start|>{}", "f("), ("<|tool_call_start|>[{}", "f(),"), ("{}", " "),
    ],
)  # fmt: skip
def test_time_for_a_text_without_end_is_linear_in_it(around, repeated):
    started = time.process_time()
    calls = parse_tool_calls(around.format(repeated * (300_000 // len(repeated))))
    assert time.process_time() - started < 3.0  # quadratic readers took 8 to 1,000 seconds
    assert len(calls) < 2


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("I look.\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>", ["a"]),
        ("<function=a></function>\n</tool_call>\n<tool_call><function=b>\n</function></tool_call>", ["a", "b"]),
        ("<tool_call>\n<function=a>\n</function>\n<function=b>\n</function>\n</tool_call>", ["a", "b"]),
        ("<function=a>\n</function>\n<function=b>\n</function>\nI wait.", ["a", "b"]),
        ("I could ask <function=a> here, and <function=b>, or <function=c>\n<parameter=x>.", []),
    ],
)
def test_functions_without_a_mark_or_several_behind_one_are_calls_in_their_form(text, names):
    calls = parse_tool_calls(text, "qwen_xml")
    assert [(call.name, call.error) for call in calls] == [(name, None) for name in names]
    for value in ("<function=b>\n</function>", "</function>\n<function=b>"):
        inner = f"<tool_call><function=a><parameter=x>\n{value}\n</parameter></function></tool_call>"
        assert [call.arguments for call in parse_tool_calls(inner, "qwen_xml")] == [{"x": value}]


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("<function=a>\n<parameter=x>\n1\n</parameter>", []),
        ("<function=a>\n<parameter=x>\n1\n</parameter>\n</tool_call>", []),
        ("<function=a></function>\n<function=b><parameter=y>2</parameter>", ["a"]),
        ("<tool_call><function=b><parameter=x>1</function><function=a></function></tool_call>", ["a"]),
    ],
)
def test_a_function_that_is_not_complete_is_one_malformed_call(text, sound):
    calls = parse_tool_calls(text, "qwen_xml")
    assert [call.name for call in calls if call.error is None] == sound
    assert len([call for call in calls if call.error]) == 1


@pytest.mark.parametrize("begin", ["", "<think>\n"])
def test_calls_and_marks_in_thoughts_that_have_ended_are_no_calls(begin):
    call = ToolCall("write", {"text": "<think>a</think>"}, None)
    for form in ("hermes", "glm", "auto", "json"):
        asked, weighed = (rendered(own, "json" if form == "json" else "hermes") for own in (call, ToolCall("zoom")))
        assert parse_tool_calls(f"{begin}Is <tool_call> of use, or {weighed}?</think>It is red.", form) == []
        assert parse_tool_calls(f"{begin}I need it.</think>{asked}", form) == [call]
        assert parse_tool_calls(begin + asked, form) == [call]


def test_marks_of_glm_inside_json_are_text():
    call = ToolCall("write", {"text": "a <arg_key> tag"}, None)
    for form in ("hermes", "glm", "auto"):
        assert parse_tool_calls(rendered(call, "hermes"), form) == [call]


def test_call_behind_or_between_other_text_is_read_and_no_more_of_them_than_the_limit():
    call = ToolCall("zoom", {"x": 1}, None)
    for text in ('{"a": x} ' * 2_000, '{"a": {"b": [' * 5, "{ {" * 100, '{"a{"b'):
        assert parse_tool_calls(text + rendered(call, "json")) == [call]
    fenced = 'See {"a": 1}:\n```json\n{"name": "zoom", "arguments": {"x": 1}}\n```'
    assert parse_tool_calls(fenced) == [call]
    assert len(parse_tool_calls('{"name": "zoom", "arguments": {}} ' * 5_000)) == MOST_CALLS


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{...}\n</tool_call>", "hermes"), ("<tool_call>\n<function=x>", "qwen_xml"),
        ("'<tool_call>' + name }}<arg_key>", "glm"), ("'<|tool_call>call:' + name", "gemma"),
        ("[TOOL_CALLS]", "mistral"), ("'<|tool_call_start|>['", "pythonic"), ("{{ '<|python_tag|>' }}", "llama"),
        ("{{ role == 'ipython' }}", "llama"), ("{{ messages }}", "auto"),
        (None, "auto"),
    ],
)  # fmt: skip
def test_form_of_calls_is_read_from_the_chat_template(template, form):
    assert tool_call_format(template) == form
