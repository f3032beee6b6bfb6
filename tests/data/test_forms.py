"""The forms of rows that need no plug-in, each in a file."""

import base64
import json

import pytest
import row_files
from row_files import parts, roles

from lightrft_visual.config import registry
from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.bad_rows import TOLD
from lightrft_visual.data.forms import _forms
from lightrft_visual.errors import ConfigError, DataError

png, read = row_files.png, row_files.read
TWO = {"prompt": "q", "images": ["a.png"], "image": "a.png"}


@pytest.mark.parametrize(
    ("row", "settings", "unread"),
    [
        (TWO, {}, ["image"]),
        (TWO, {"data_format": "plain"}, ["image"]),
        (TWO, {"images_key": "image"}, []),  # chosen by the user
        (TWO | {"image": None}, {}, []),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "img": "a.png"}, {}, ["img"]),
    ],
)
def test_a_column_of_images_that_is_not_read_beside_others_is_said_once(read, png, caplog, row, settings, unread):
    TOLD.clear()
    rows = read("two.jsonl", [row] * 3, **settings)
    assert [len(each.images) for each in rows] == [1, 1, 1]
    told = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert [text.split("'")[1] for text in told] == unread


def test_openai_messages(read, png):
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which colour?"},
                                     {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]},
        {"role": "assistant", "content": ["R", {"type": "text", "text": "ed."}]},
    ]  # fmt: skip
    (row,) = read("chat.jsonl", [{"messages": messages}])
    assert roles(row) == ["system", "user"] and parts(row) == "Which colour?[image]"
    assert (row.reference, row.images[0].size, row.metadata) == ("Red.", (30, 20), {})
    (row,) = read("chat.jsonl", [{"messages": json.dumps(messages[:2]), "ground_truth": "red"}])
    assert (row.reference, row.images[0].size) == ("red", (30, 20))


@pytest.mark.parametrize("answer", [[1.0, 2.0, 3.0, 4.0], ["a", "b"], 12.5])
def test_answer_that_is_no_list_of_parts_stays_as_it_is(read, answer):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    assert [row.reference for row in read("chat.jsonl", [{"messages": messages}])] == [answer]


@pytest.mark.parametrize("settings", [{}, {"data_format": "own"}])
@pytest.mark.parametrize("found", ["a red cube", {"prompt": "a red cube"}])
def test_a_form_that_gives_something_else_than_content_is_named(read, monkeypatch, found, settings):
    monkeypatch.setattr(registry.row_forms, "_entries", {})
    _forms.cache_clear()
    registry.row_forms.register("own")(lambda raw: found)
    with pytest.raises(ConfigError, match=f"the form of data rows 'own' gave a {type(found).__name__}, not a Content"):
        read("a.jsonl", [{"asked": "a red cube"}], **settings)


def test_a_form_that_is_named_is_required_of_every_row(read):
    with pytest.raises(DataError, match="not a row of data_format messages; it has: prompt"):
        read("a.jsonl", [{"prompt": "a red cube"}], data_format="messages")
    with pytest.raises(ConfigError, match="data_format is 'llama'; it must be one of: auto, plain, verl, "):
        DataConfig(data_format="llama")
