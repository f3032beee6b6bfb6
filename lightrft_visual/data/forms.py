"""Rows as other systems write them: recognised by their columns, and read as rows of this one.

A form says where the prompt stands, and what its reference and label are where no column of ours holds them. Media
columns under other names are found here as well. docs/coming_from.md has a table of all systems.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.vl import DataConfig
from ..errors import DataError
from .media import looks_like_media

QUESTION_COLUMNS = ("problem", "question", "query", "instruction")
MEDIA_COLUMNS = {
    kind: (kind, *(f"{kind}_{end}" for end in ("path", "url", "file", "paths", "urls", "files")), *more)
    for kind, more in (("image", ("img", "img_path")), ("video", ()))
}
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    "system": "system",
}
_LOOKS_LIKE_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")


@dataclass(frozen=True)
class Reading:
    """How a row is read. columns: under this project's names. reference, label: where no column of ours holds them."""

    columns: Mapping[str, Any]
    reference: Any = None
    label: str | None = None
    form: str | None = None


@dataclass(frozen=True)
class _Content:
    """What a form finds in a row. consumed: columns that go into the prompt with all they hold."""

    prompt: Any
    reference: Any = None
    label: str | None = None
    consumed: tuple[str, ...] = ()


def read_form(raw: Mapping[str, Any], config: DataConfig) -> Reading:
    """The row under this project's column names, by `data_format`: the form that it names, or with auto the form that
    the columns show. A row with a prompt column, or one that `input_key` names, is taken as it is.

    Raises DataError for a row that is not of the form named.
    """
    if config.data_format == "plain":
        return Reading(raw)
    if config.data_format != "auto":
        content = FORMS[config.data_format](raw)
        if content is None:
            columns = ", ".join(map(str, raw))
            raise DataError(f"not a row of data_format {config.data_format}; it has: {columns}", "column missing")
        return _apply(raw, config, config.data_format, content)
    if config.input_key != DataConfig.input_key:
        return Reading(raw)
    for name, find in FORMS.items():
        content = find(raw) if (raw.get("prompt") is None or name == "verl") else None
        if content is not None:
            return _apply(raw, config, name, content)
    return Reading(raw)


def _apply(raw: Mapping[str, Any], config: DataConfig, name: str, content: _Content) -> Reading:
    columns = {key: value for key, value in raw.items() if key not in content.consumed}
    columns[config.input_key] = content.prompt
    return Reading(columns, content.reference, content.label, name)


def _verl(raw: Mapping[str, Any]) -> _Content | None:
    """verl: chat messages in `prompt`, the answer in `reward_model`, which set it comes from in `data_source`."""
    if raw.get("prompt") is None or not isinstance(raw.get("reward_model"), Mapping):
        return None
    source = raw.get("data_source")
    return _Content(raw["prompt"], label=source if isinstance(source, str) else None)


def _conversations(raw: Mapping[str, Any]) -> _Content | None:
    """LLaVA and ShareGPT: `conversations` of {"from", "value"}; the last answer is the reference."""
    turns = json_list(raw.get("conversations"))
    if not _are_mappings(turns):
        return None
    messages = []
    for place, turn in enumerate(turns):
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise DataError(f"turn {place} of conversations is from {speaker!r}; known: {known}", "prompt form")
        messages.append({"role": _SPEAKERS[speaker], "content": text})
    if isinstance(raw.get("system"), str) and raw["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": raw["system"]})
    return _without_answer(messages, ("conversations", "system"))


def _messages(raw: Mapping[str, Any]) -> _Content | None:
    """OpenAI's chat form: `messages` of {"role", "content"}; a last answer of the assistant is the reference."""
    messages = json_list(raw.get("messages"))
    return _without_answer(messages, ("messages",)) if _are_mappings(messages) else None


def _without_answer(messages: Sequence[Mapping[str, Any]], consumed: tuple[str, ...]) -> _Content:
    """The messages up to where the model's answer begins."""
    if messages[-1].get("role") != "assistant":
        return _Content(messages, consumed=consumed)
    answer = messages[-1].get("content")
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        texts = (part.get("text") for part in answer if isinstance(part, Mapping))
        answer = "".join(text for text in texts if isinstance(text, str))
    return _Content(messages[:-1], answer, consumed=consumed)


def _input_label(raw: Mapping[str, Any]) -> _Content | None:
    """OpenRLHF: `input`, and the answer in `label`."""
    if raw.get("input") is None or raw.get("instruction") is not None:
        return None
    return _Content(raw["input"], raw.get("label"), consumed=("label", *_unless_text(raw, "input")))


def _question(raw: Mapping[str, Any]) -> _Content | None:
    """EasyR1 and many others: `problem` or `question`; the answer is found as anywhere else."""
    column = next((name for name in QUESTION_COLUMNS if raw.get(name) is not None), None)
    return None if column is None else _Content(raw[column], consumed=_unless_text(raw, column))


def _unless_text(raw: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """A prompt column of text stays a column that rewards can ask for; messages may hold images."""
    return () if isinstance(raw[column], str) else (column,)


# By name, in the order in which they are tried; the names are the values of data_format.
FORMS: dict[str, Callable[[Mapping[str, Any]], _Content | None]] = {
    "verl": _verl,
    "conversations": _conversations,
    "messages": _messages,
    "question": _question,
    "input_label": _input_label,
}


def _are_mappings(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and len(value) > 0
        and all(isinstance(each, Mapping) for each in value)
    )


def json_list(cell: Any) -> Any:
    """The list that a cell holds as JSON text, as in a CSV file; any other cell as it is."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("[") or not cell.rstrip().endswith("]"):
        return cell
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):  # a text that only looks like it
        return cell
    return value if isinstance(value, list) else cell


def messages_in(prompt: Any) -> Any:
    """The chat messages that a prompt holds as JSON text, else the prompt as it is.

    Raises DataError for text that looks like messages and is not JSON: as plain text it would lose its images.
    """
    value = json_list(prompt)
    if _are_mappings(value) and all("role" in message and "content" in message for message in value):
        return value
    if isinstance(prompt, str) and _LOOKS_LIKE_MESSAGES.match(prompt):
        raise DataError("the prompt looks like a list of chat messages, but is not valid JSON", "prompt form")
    return prompt


@dataclass(frozen=True)
class MediaCell:
    """Where a row's images or videos stand. taken: a column that no setting names. holders: all columns of such."""

    cell: Any = None
    taken: str | None = None
    holders: tuple[str, ...] = ()


def find_media(columns: Mapping[str, Any], config: DataConfig, kind: str, placed: bool) -> MediaCell:
    """The cell with a row's images or videos (kind).

    It is in the column that `images_key` or `videos_key` names; without it, in the one column under a usual name,
    unless the messages bring their own media (placed). Raises DataError for media that nothing would read, since a
    model would be trained blind; an empty key says that a run is on text alone.
    """
    flag = f"{kind}s_key"
    key = getattr(config, flag)
    if key == "":
        return MediaCell()
    cell = json_list(columns.get(key))
    usual = tuple(name for name in MEDIA_COLUMNS[kind] if name != key and _filled(columns.get(name)))
    if _filled(cell) or placed or key != getattr(DataConfig, flag):
        return MediaCell(cell, None, (key, *usual))
    if len(usual) == 1 and config.data_format != "plain":
        return MediaCell(json_list(columns[usual[0]]), usual[0], (key, *usual))
    unread = usual or tuple(name for name, value in columns.items() if looks_like_media(str(name), value, kind))
    if unread:
        named = " and ".join(map(repr, unread))
        raise DataError(
            f"column {named} holds {kind}s that are not read: set --{flag} {unread[0]}, or rename the column "
            f"(--{flag} '' for a run without {kind}s)",
            "column not read",
        )
    return MediaCell(cell, None, (key,))


def _filled(cell: Any) -> bool:
    return cell is not None and (not isinstance(cell, (str, bytes, list, tuple)) or len(cell) > 0)
