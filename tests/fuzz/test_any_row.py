"""Rows of any shape: read, or refused by an error that names file and row and can be printed."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.config import registry
from lightrft_visual.config.vl import DataConfig
from lightrft_visual.data.forms import ROLES
from lightrft_visual.data.rows import parse_row
from lightrft_visual.data.video import check_video
from lightrft_visual.errors import DataError

COLUMNS = (
    "prompt", "images", "image", "image_path", "videos", "video", "reference", "label", "conversations", "messages",
    "input", "problem", "answer", "reward_model", "data_source", "extra",
)  # fmt: skip
KEYS = (*COLUMNS, "role", "content", "type", "text", "url", "bytes", "path", "from", "value", "fps", "ground_truth")
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=8) | st.text(max_size=8)
    | st.sampled_from(("<image>", "<video>", "a.png", "\ud800", "[", '[{"role": "user", "content": "q"}]', *ROLES))
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(("text", "image", "image_url", "video", "audio"))},
    optional={key: VALUES for key in ("text", "image", "image_url", "video", "url", "path", "fps")},
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.lists(PARTS, max_size=3) | st.text()}),
    max_size=3,
)
SPEAKERS = st.sampled_from(("human", "gpt", "system", ["human"]))
TURNS = st.lists(st.fixed_dictionaries({"from": SPEAKERS, "value": st.text(max_size=9) | VALUES}), max_size=3)
PROMPTS = MESSAGES | st.text(min_size=1)
ROWS = (
    st.fixed_dictionaries({"conversations": TURNS}, optional={"image": VALUES})
    | st.fixed_dictionaries({"messages": MESSAGES}, optional={"image": VALUES})
    | st.dictionaries(st.sampled_from(COLUMNS), VALUES | MESSAGES, max_size=6)
    | st.fixed_dictionaries({"prompt": PROMPTS}, optional=dict.fromkeys(("images", "videos", "extra"), VALUES))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(row=ROWS, form=st.sampled_from(("auto", "plain", *registry.row_forms.names())), template=st.booleans())
def test_any_row_is_read_or_refused(row, form, template):
    config = DataConfig(data_format=form, apply_chat_template=template)
    try:
        found = parse_row(row, config, source="rows.jsonl:3", root="/data")
    except DataError as error:
        assert str(error).startswith("rows.jsonl:3: ")
        str(error).encode("utf-8")
        return
    json.dumps([found.prompt, found.label]).encode("utf-8")
    if template:
        parts = [part["type"] for message in found.prompt for part in message["content"]]
        assert (parts.count("image"), parts.count("video")) == (len(found.images), len(found.videos))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(source=VALUES, options=st.dictionaries(st.sampled_from(("fps", "nframes", "max_pixels", "speed")), VALUES))
def test_any_video_is_checked_or_refused(source, options):
    try:
        check_video({"video": source, **options})
    except DataError as error:
        str(error).encode("utf-8")
