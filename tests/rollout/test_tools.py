"""Schemas, calls in a response in each of their forms, and the environment that runs them."""

from __future__ import annotations

import asyncio
import enum
import functools

import numpy as np
import pytest
from PIL import Image

from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.environments import Action, ToolCall
from lightrft_visual.rollout.tool_calls import parse_tool_calls
from lightrft_visual.rollout.tools import ToolEnvironment, tool_content, tool_schema


def crop(box: list[int], scale: float = 2.0) -> str:
    """Cut a part out.

    Args:
        box: left, top, right, bottom
        scale: by how much
    """
    return f"{box} {scale}"


# --- schemas ---------------------------------------------------------------------------------------------------------


def test_schema_of_function_has_types_descriptions_and_what_is_required():
    assert tool_schema(crop)["function"] == {
        "name": "crop",
        "description": "Cut a part out.",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {"type": "array", "items": {"type": "integer"}, "description": "left, top, right, bottom"},
                "scale": {"type": "number", "description": "by how much"},
            },
            "required": ["box"],
        },
        "return": {"type": "string"},
    }


def _without_hint(where) -> str: ...
def _in_an_order(*where: int) -> str: ...
def _of_an_image(where: Image.Image) -> str: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_without_hint, "where"), (_in_an_order, "cannot give where"), (_of_an_image, "cannot write where"),
        (ToolEnvironment.run, "cannot give self"),
    ],
)  # fmt: skip
def test_schema_of_function_that_a_model_cannot_call_is_refused(function, told, monkeypatch):
    if function.__doc__ is None:
        monkeypatch.setattr(function, "__doc__", "Cut.\n\nArgs:\n    where: which part")
    with pytest.raises(ConfigError, match=f"{function.__name__}: .*{told}"):
        tool_schema(function)


class Side(enum.Enum):
    LEFT, RIGHT = "left", "right"


def _typed(side: Side, far: bool = False) -> str:
    """Turn.

    Args:
        side (Side): where to
        far (bool, optional): how far
    """
    return f"{side.name} {far}"


def test_schema_of_class_is_what_its_values_are_written_as_and_types_in_docstrings_are_left_out():
    properties = tool_schema(_typed)["function"]["parameters"]["properties"]
    assert properties["side"] == {
        "enum": ["left", "right"], "title": "Side", "type": "string", "description": "where to"
    }  # fmt: skip
    assert properties["far"] == {"type": "boolean", "description": "how far"}
    assert ToolEnvironment([_typed]).run(ToolCall("_typed", {"side": "left"})) == ("LEFT False", False)


@pytest.mark.parametrize("tool", [functools.partial(crop, scale=1.0), Side, "crop"])
def test_tool_that_is_no_function_or_has_the_name_of_another_is_refused(tool):
    with pytest.raises(ConfigError, match="it must be a function or a method"):
        ToolEnvironment([tool])
    with pytest.raises(ConfigError, match="two tools have one name"):
        ToolEnvironment([crop, crop])


# --- calls -----------------------------------------------------------------------------------------------------------


def find(text: str, kind: str | None = None, most: int = 1) -> str:
    """Find it.

    Args:
        text: what to look for
        kind: of what
        most: how many
    """
    return f"{text!r} {kind!r} {most!r}"


async def later(text: str) -> str:
    """Wait.

    Args:
        text: what to say
    """
    await asyncio.sleep(0.001)
    return text


def parts() -> list:
    """A text and an image."""
    return ["seen", {"type": "text", "text": "here"}, Image.new("RGB", (2, 2))]


def fails() -> str:
    """Fail."""
    raise KeyError("no such thing")


def exits() -> str:
    """Leave."""
    raise SystemExit(2)


async def cancelled() -> str:
    """Be given up."""
    raise asyncio.CancelledError


def step_of(*calls: ToolCall, text: str = ""):
    environment = ToolEnvironment([crop, later, parts, fails, find, exits, cancelled])
    environment.reset({"prompt": "what is it?"})
    return environment.step(Action(text, [1], list(calls)))


def answer_of(call: ToolCall) -> str | list:
    messages, reward, done, _ = step_of(call)
    assert (reward, done, [message["role"] for message in messages]) == (None, False, ["tool"])
    return messages[0]["content"]


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ({"text": "2024", "kind": "true", "most": "3"}, "'2024' 'true' 3"),
        ({"text": '{"a": 1}', "kind": "null"}, "'{\"a\": 1}' None 1"),
        ({"text": "null"}, "'null' None 1"),
    ],
)
def test_text_without_quotes_is_a_text_where_the_schema_says_so(written, answer):
    told = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())
    text = f"<tool_call>\n<function=find>\n{told}</function>\n</tool_call>"
    (call,) = parse_tool_calls(text, "qwen_xml", ToolEnvironment([find]).schemas())
    assert answer_of(call) == answer


# --- running them ----------------------------------------------------------------------------------------------------


def test_results_become_the_content_of_a_tool_message():
    assert answer_of(ToolCall("crop", {"box": [1, 2, 3, 4]})) == "[1, 2, 3, 4] 2.0"
    *texts, image = answer_of(ToolCall("parts"))
    assert [each["type"] for each in texts] == ["text", "text"]
    assert image["type"] == "image" and image["image"].size == (2, 2)


def test_calls_are_answered_in_their_order_and_counted_by_tool_and_a_response_without_one_ends_the_episode():
    one = ToolCall("later", {"text": "1"})
    messages, _, _, info = step_of(one, ToolCall("fails"), one)
    assert [message["name"] for message in messages] == ["later", "fails", "later"]
    assert messages[0]["content"] == "1"
    assert info == {
        "tool_calls": {"later": 2, "fails": 1},
        "tool_errors": 1,
        "tool_error": "error: fails raised KeyError: 'no such thing'",
    }
    assert step_of(text="It is red.") == (None, None, True, {})


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (np.float32(0.5), "0.5"), (np.arange(2), "[0, 1]"), ({"seen": {np.int64(1)}}, '{"seen": [1]}'),
        ([2.5, None], "[2.5, null]"), (Side.LEFT, '"left"'), (np.zeros((2, 2, 3), np.uint8), ["image"]),
        ({"type": "circle"}, '{"type": "circle"}'), ({"type": "text", "text": "here"}, ["text"]),
    ],
)  # fmt: skip
def test_result_is_said_as_json_says_it_and_arrays_of_pixels_are_images(result, content):
    found = tool_content(result)
    assert (found if isinstance(content, str) else [part["type"] for part in found]) == content
    with pytest.raises(TypeError, match="a object is no result"):
        tool_content(object())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ToolCall("zoom", {}, None), "there is no tool 'zoom'; there is: crop, later"),
        (ToolCall("crop", {}, None), "crop: box: Missing required argument"),
        (ToolCall("crop", {"box": [1], "colour": 1}, None), "crop: colour: Unexpected keyword argument"),
        (ToolCall("fails", {}, None), "fails raised KeyError: 'no such thing'"),
        (ToolCall("exits"), "exits called sys.exit(2)"),
        (ToolCall("cancelled"), "cancelled raised CancelledError"),
        (ToolCall("", {}, "malformed call: {"), "malformed call: {"),
    ],
)
def test_call_that_cannot_run_is_answered_by_an_error_text(call, told):
    messages, _, done, info = step_of(call)
    assert messages[0]["content"].startswith("error: ") and told in messages[0]["content"]
    assert not done and info["tool_errors"] == 1
