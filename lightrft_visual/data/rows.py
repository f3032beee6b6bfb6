"""One data row in normal form: chat messages with content parts, media in the order of their placeholders.

Accepted prompts: a string, in which <image> and <video> mark places; or chat messages whose content is such a string or
a list of parts in OpenAI's and Hugging Face's spelling; also such messages as JSON text. A row's `images` fill the
parts that bring no source of their own; without any placeholder they go before the text of the first user message.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np
from PIL import Image

from ..config import registry
from ..config.vl import DataConfig
from ..errors import DataError
from ..experience.rollouts import media_list
from .bad_rows import check_reference, check_values, warn_once
from .forms import (
    MEDIA,
    ROLES,
    MediaCell,
    Reading,
    are_mappings,
    are_messages,
    find_media,
    is_filled,
    json_list,
    json_mapping,
    messages_in,
    read_form,
    without_answer,
)
from .media import is_path, resolve_source

_PLACEHOLDER = re.compile(r"<(image|video)>")
# Where an answer hides when the configured column is absent; dots step into mappings.
REFERENCE_PATHS = ("reward_model.ground_truth", "ground_truth", "answer", "solution", "answers")
RESPONSE = "response"  # the usual name of the column with what a model is to answer
_MISSING = object()


@dataclass
class PromptRow:
    """One prompt with everything its rollouts and rewards need.

    prompt: chat messages [{"role", "content": [parts]}], parts {"type": "text", "text"}, {"type": "image"} or
    {"type": "video"}; or the raw string when no chat template is applied. images, videos: sources for
    media.load_image and video.load_video, in the order of the placeholders. metadata: the columns with no other role,
    and the prompt, label and reference columns under names of the user's own; no media. draw: whether the answer is to
    be an image. source: "file:row" for messages. index: place in the data set. form: in what other system's form it was
    written. answer: what its own form says that the assistant answers, for supervised training.
    """

    prompt: str | list[dict[str, Any]]
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    label: str | None = None
    reference: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    index: int = 0
    form: str | None = None
    draw: bool = False
    answer: Any = None


def parse_row(
    raw: Mapping[str, Any], config: DataConfig, *, source: str, root: str | os.PathLike | None, index: int = 0
) -> PromptRow:
    """Bring one row of a file into normal form.

    Args:
        raw: the row's columns, as its file has them.
        config: of the data, for the form and the columns' names.
        source: "file:row", with which messages begin.
        root: folder that relative media paths start from; None: the working directory.
        index: the row's place in the data set.

    Raises:
        DataError: for a missing column, a prompt of the wrong form, or media that do not match the placeholders.
    """
    try:
        check_values(raw)
        reading = read_form(raw, config)
        reading = _answer_apart(replace(reading, columns=_with_inner(reading.columns, config)), config)
        columns = reading.columns
        _check_columns(columns, config)
        if are_mappings(json_list(columns.get("tools"))):
            warn_once("column 'tools' is not shown to the model: a run has the tools that --tools names")
        prompt: Any = columns[config.input_key]
        messages = _as_messages(messages_in(prompt)) if config.apply_chat_template else None
        cells = {kind: _media_cell(columns, config, kind, messages) for kind in MEDIA}
        images, videos = (as_source_list(cells[kind].cell, kind) for kind in MEDIA)
        if messages is not None:
            prompt, images, videos = _place_media(messages, images, videos)
        elif not isinstance(prompt, str) or are_messages(json_list(prompt)):
            kind = "chat messages" if are_messages(json_list(prompt)) else type(prompt).__name__
            raise DataError(f"with apply_chat_template false the prompt must be a string, not {kind}", "prompt form")
        elif not prompt.strip():
            raise DataError("the prompt is empty", "prompt form")
        reference, used = _find_reference(columns, config)
        reference = reading.reference if reference is None else reference
        check_reference(reference)
        label = _label(columns.get(config.label_key))
        read = {used, *(column for found in cells.values() for column in found.holders)}
        return PromptRow(
            prompt=prompt,
            images=[resolve_source(image, root) for image in images],
            videos=[_resolve_video(video, root) for video in videos],
            label=reading.label if label is None else label,
            reference=reference,
            metadata=resolve_images(_metadata(columns, config, read), root),
            source=source,
            index=index,
            form=_form(reading.form, cells),
            draw=_asks_for_image(columns.get(config.draw_key)),
            answer=reading.reference,
        )
    except DataError as error:
        raise DataError(f"{source}: {error}", error.cause) from error


def response_of(row: PromptRow, key: str) -> str:
    """What the model is to answer, for supervised training: the column `key`, which is response_key; by its default
    name, where it holds nothing, what the assistant says in messages or a completion, else without it the reference.
    Raises DataError for a row without a text of these."""
    given = row.metadata.get(key)
    elsewhere = key == RESPONSE and not is_filled(given)
    found = row.answer if elsewhere else given
    way_on = _way_on(row) if elsewhere and not is_filled(found) else ""
    if found is None and key in row.metadata and not (elsewhere and is_filled(row.reference)):
        raise DataError(f"column {key!r} (response_key) is empty{way_on}", "response")
    if found is None and key != RESPONSE:
        raise DataError(f"no column {key!r} (response_key); the row has: {', '.join(row.metadata)}", "column missing")
    found = row.reference if found is None else found
    if isinstance(found, int | float) and not isinstance(found, bool):
        found = str(without_fraction(found)) if is_filled(found) else None
    if not isinstance(found, str) or not found.strip():
        kind = "nothing" if found is None else "an empty text" if isinstance(found, str) else type(found).__name__
        holder = f"column {key!r} and reference hold" if elsewhere else f"column {key!r} holds"
        raise DataError(f"the row has no response: {holder} {kind}, not a text{way_on}", "response")
    return found


def _way_on(row: PromptRow) -> str:
    """To the answer that messages beside the prompt end with."""
    messages = json_list(row.metadata.get("messages"))
    answered = are_mappings(messages) and messages[-1].get("role") == "assistant"
    return " (--data_format messages answers the last message)" if answered else ""


def _with_inner(columns: Mapping[str, Any], config: DataConfig) -> Mapping[str, Any]:
    """Also those inside others that hold prompt or response, by the name that says so: column.name."""
    keys = (config.input_key, getattr(config, "response_key", RESPONSE))
    inner = {key: _walk(columns, key) for key in keys if "." in key and key not in columns}
    return {**columns, **{key: value for key, value in inner.items() if value is not _MISSING}}


def _answer_apart(reading: Reading, config: DataConfig) -> Reading:
    """With what the assistant says last apart from the prompt, in supervised runs where the row has no other answer.
    Raises DataError for an answer that the run cannot take."""
    columns, key = reading.columns, getattr(config, "response_key", None)
    unfit = reading.content.unfit if reading.content and config.data_format != "auto" else ""
    if key is None and unfit and _find_reference(columns, config)[0] is None:
        raise DataError(unfit, "reference form")
    if key is None or is_filled(columns.get(key)):
        return reading
    content = reading.content and (reading.content.supervised or reading.content)
    if content is None or (content.reference is None and not content.unread):
        messages = messages_in(columns.get(config.input_key))
        if not are_mappings(messages) or messages[-1].get("role") != "assistant":
            return reading
        content = without_answer(messages, ())
    if content.unread:
        raise DataError(content.unread, "response")
    return replace(reading, columns={**columns, config.input_key: content.prompt}, reference=content.reference)


def _check_columns(raw: Mapping[str, Any], config: DataConfig) -> None:
    columns = ", ".join(map(str, raw))
    if config.input_key in raw and raw[config.input_key] is None:
        raise DataError(f"column {config.input_key!r} (input_key) is empty", "prompt form")
    if config.input_key not in raw:
        raise DataError(f"no column {config.input_key!r} (input_key); the row has: {columns}", "column missing")
    wanted = {"images_key": config.images_key, "videos_key": config.videos_key, "label_key": config.label_key}
    for flag, key in wanted.items():
        if key not in ("", getattr(DataConfig, flag)) and key not in raw:
            raise DataError(f"no column {key!r} ({flag}); the row has: {columns}", "column missing")


def _media_cell(
    columns: Mapping[str, Any], config: DataConfig, kind: str, messages: list[Mapping[str, Any]] | None
) -> MediaCell:
    contents = [message["content"] for message in messages or ()]
    placed = {part for content in contents for part, own in _parts(content) if part in MEDIA and own is not None}
    found = find_media(columns, config, kind, placed)
    told = "column %r holds %ss that are not read, as the rows have others: --%ss_key or --input_key chooses it"
    for column in found.unread:
        warn_once(told, column, kind, kind)
    return found


def _form(name: str | None, cells: Mapping[str, MediaCell]) -> str | None:
    """What to say about how the row was read; None for a row in this project's own form."""
    said = [name] if name else []
    said += [f"{kind}s from column {cell.taken!r}" for kind, cell in cells.items() if cell.taken is not None]
    return ", ".join(said) or None


def _metadata(raw: Mapping[str, Any], config: DataConfig, read: set[str | None]) -> dict[str, Any]:
    """The row's metadata. A column that was chosen as prompt, label or reference is in it, since reward functions ask
    for it by that name; the default names they get anyway. So is one with what is to be answered."""
    roles = {config.input_key, config.images_key, config.videos_key, config.label_key, config.reference_key, *read}
    named = {config.input_key, config.label_key, config.reference_key}
    named -= {DataConfig.input_key, DataConfig.label_key, DataConfig.reference_key}
    named.add(getattr(config, "response_key", RESPONSE))
    columns = {key: value for key, value in raw.items() if key not in roles or key in named}
    prompt = columns.get(config.input_key, "")
    if not isinstance(prompt, str):  # without the images and videos that its content parts bring along
        columns[config.input_key] = [{**each, "content": _text_content(each["content"])} for each in prompt]
    return columns


def resolve_images(metadata: dict[str, Any], root: str | os.PathLike | None) -> dict[str, Any]:
    """The metadata, in which paths of images that registered rewards look for (`image_columns`) start at root, where
    there is such a file; other texts may be of a reward that reads the column in its own way."""
    rewards = (*registry.scorers, *registry.differentiable_rewards)
    columns = {column for reward in rewards for column in reward.image_columns} & metadata.keys()
    found = {column: resolve_source(metadata[column], root) for column in columns}
    return metadata | {
        column: os.path.abspath(source) if is_path(source) else source
        for column, source in found.items()
        if not is_path(source) or os.path.isfile(source)
    }


def _text_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [part if isinstance(part, str) or part["type"] == "text" else {"type": part["type"]} for part in content]


def as_source_list(cell: Any, kind: str) -> list[Any]:
    """The sources in a media cell, which holds nothing, one, or several; PIL images are the frames of one video. Raises
    DataError for empty ones."""
    items = media_list(cell) if is_filled(cell) else []
    if kind == "video" and items and all(isinstance(item, Image.Image) for item in items):
        return [items]
    for place, item in enumerate(items):
        if not is_filled(item):
            raise DataError(f"{kind} {place} of {len(items)} is empty", "media missing")
    return items


def _as_messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("the prompt is empty", "prompt form")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise DataError(
            f"the prompt must be a string or a list of chat messages, not {type(prompt).__name__}", "prompt form"
        )
    if not prompt:
        raise DataError("the prompt is empty: no message stands before the model's answer", "prompt form")
    for place, message in enumerate(prompt):
        if isinstance(message, Mapping) and message.get("tool_calls"):
            text = f"message {place} has tool_calls, which are not read: write the calls into its content"
            raise DataError(text, "prompt form")
        if not isinstance(message, Mapping) or message.get("role") not in ROLES or message.get("content") is None:
            raise DataError(f"message {place} needs a role of {', '.join(ROLES)} and a content", "prompt form")
    if prompt[-1]["role"] == "assistant":
        text = "the last message is the assistant's: the prompt must end where the model's answer begins"
        raise DataError(text, "prompt form")
    return list(prompt)


def _parts(content: Any) -> Iterator[tuple[str, Any]]:
    """(kind, value) of a message's content: ("text", text), ("image" | "video", source or None)."""
    if isinstance(content, str):
        for place, piece in enumerate(_PLACEHOLDER.split(content)):
            if place % 2:
                yield piece, None
            elif piece:
                yield "text", piece
        return
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise DataError(f"a message's content must be a string or a list of parts, not {kind}", "prompt form")
    for part in content:
        if isinstance(part, str):
            yield from _parts(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield from _parts(part["text"])
        elif kind in ("image", "image_url", "video", "video_url"):
            yield kind.removesuffix("_url"), _own_source(part, kind.removesuffix("_url"))
        elif kind == "text":
            raise DataError("a content part 'text' has no text: give it a string under the key text", "prompt form")
        else:
            known = "text, image, image_url, video, video_url"
            raise DataError(f"unknown content part {kind!r}; known: {known}", "prompt form")


def _own_source(part: Mapping[str, Any], kind: str) -> Any:
    """The source a media part brings along, or None when it takes the next one of the row's list."""
    for key in (kind, f"{kind}_url", "url", "path", "base64", "bytes"):
        value = part.get(key)
        if isinstance(value, Mapping) and set(value) <= {"url", "detail"}:
            value = value.get("url")
        if not is_filled(value):
            continue
        others = part.keys() - {"type", key, "detail"}
        options = {name: part[name] for name in part if name in others and part[name] and is_filled(part[name])}
        if options and kind == "image":
            text = f"image part with unknown key(s) {', '.join(map(str, options))}; sizes are set by --max_pixels"
            raise DataError(text, "prompt form")
        return {"video": value, **options} if options else value
    return None


def _place_media(
    messages: Sequence[Mapping[str, Any]], images: list[Any], videos: list[Any]
) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Messages with every media part explicit, and the images and videos in the order of these parts.

    Raises DataError when the parts without a source of their own are not as many as the list holds, and without any
    text or media.
    """
    parsed = [(message["role"], list(_parts(message["content"]))) for message in messages]
    listed = {"image": images, "video": videos}
    ordered: dict[str, list[Any]] = {kind: [] for kind in MEDIA}
    for kind in MEDIA:
        if listed[kind] and not any(part == kind for _, parts in parsed for part, _ in parts):
            _put_before_text(parsed, kind, len(listed[kind]))
        open_places = sum(part == kind and own is None for _, parts in parsed for part, own in parts)
        if open_places != (given := len(listed[kind])):
            text = f"the prompt has {open_places} {kind} placeholder(s), the row has {given} {kind}(s)"
            raise DataError(text, "placeholders")
        supply = iter(listed[kind])
        for _, parts in parsed:
            ordered[kind] += [next(supply) if own is None else own for part, own in parts if part == kind]
    if not any(kind != "text" or own.strip() for _, parts in parsed for kind, own in parts):
        raise DataError("the prompt is empty", "prompt form")
    normal = []
    for role, parts in parsed:
        content = [{"type": "text", "text": own} if kind == "text" else {"type": kind} for kind, own in parts]
        normal.append({"role": role, "content": content})
    return normal, ordered["image"], ordered["video"]


def _put_before_text(parsed: list[tuple[str, list]], kind: str, count: int) -> None:
    for role, parts in parsed:
        if role == "user":
            start = next((place for place, (part, _) in enumerate(parts) if part == "text"), len(parts))
            parts[start:start] = [(kind, None)] * count
            return
    raise DataError(f"no user message to put the {kind}s into", "prompt form")


def _find_reference(raw: Mapping[str, Any], config: DataConfig) -> tuple[Any, str | None]:
    """The reference answer and the top-level column it fills, if that column holds nothing else."""
    key = config.reference_key
    if key in raw and raw[key] is not None:
        return raw[key], key
    if key != DataConfig.reference_key:
        value = _walk(raw, key)
        if value is _MISSING:
            columns = ", ".join(map(str, raw))
            raise DataError(f"no column {key!r} (reference_key); the row has: {columns}", "column missing")
        return value, None
    for path in REFERENCE_PATHS:
        value = _walk(raw, path)
        if value is not _MISSING and value is not None:
            return value, path if path in raw else None
    return None, None


def _walk(raw: Mapping[str, Any], path: str) -> Any:
    if path in raw:  # as tables write what was nested
        return raw[path]
    value: Any = raw
    for key in path.split("."):
        value = json_mapping(value)
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def without_fraction(value: Any) -> Any:
    """A whole number that is a float, as in a table whose column has gaps, as an integer; else the value."""
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else value


def _label(value: Any) -> str | None:
    if not is_filled(value):
        return None
    value = without_fraction(value)
    if isinstance(value, (str, np.bool_, Integral)):
        return str(value)
    raise DataError(f"a label is a short name, not {type(value).__name__}", "label form")


def _asks_for_image(value: Any) -> bool:
    """A cell that is true or false, also as 0 or 1 and as words, as files without types (CSV) hold it; empty: false."""
    word = str(value).strip().lower() if is_filled(value) else ""
    if word not in ("", "false", "0", "0.0", "true", "1", "1.0"):
        raise DataError(f"the column that asks for an image (draw_key) holds true or false, not {value!r}", "drawing")
    return word in ("true", "1", "1.0")


def _resolve_video(source: Any, root: Any) -> Any:
    if isinstance(source, Mapping) and "video" in source:
        return {**source, "video": _resolve_video(source["video"], root)}
    if isinstance(source, (list, tuple)):
        return [resolve_source(frame, root) for frame in source]
    return resolve_source(source, root)
