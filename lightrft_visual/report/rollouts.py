"""The report's examples: rollouts as cards with picture, prompt, response and reward; contact sheets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..observe.rollouts import Record, best_and_worst, pick_random, score
from .charts import number
from .data import Pictures, RunData, load_records, spread
from .markup import Markup, join, tag

EACH = 3  # best, worst and random examples of an evaluation
MAX_EVALUATIONS = 6
MAX_PICTURES = 4
MAX_CHARACTERS = 1500
THUMBNAIL, SHEET_SIDE = 320, 1100
TINY = 128  # pictures up to this size are enlarged without blurring
TURN = re.compile(r"<\|im_start\|>(\w+)\n?(.*?)(?:<\|im_end\|>\n?|$)", re.DOTALL)
SPECIAL = re.compile(r"((?:<\|[\w ./-]{1,40}\|>)+)")
MEDIA_TOKENS = {"image_pad": "image", "video_pad": "video", "vision_start": None, "vision_end": None}
ONE_TOKEN = re.compile(r"<\|([\w ./-]{1,40})\|>")


def shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… ({len(text) - MAX_CHARACTERS} more characters)"


def special_tokens(run: str) -> Markup:
    """A run of special tokens as small labels, repeats counted."""
    names = [MEDIA_TOKENS.get(name, name) for name in ONE_TOKEN.findall(run)]
    counted: list[list] = []
    for name in filter(None, names):
        if counted and counted[-1][0] == name:
            counted[-1][1] += 1
        else:
            counted.append([name, 1])
    labels = [name if count == 1 else f"{name} ×{count}" for name, count in counted]
    return join([tag("span", label, class_="special") for label in labels])


def prose(text: str) -> Markup:
    """Text with its special tokens set apart."""
    return join(
        [special_tokens(part) if index % 2 else part for index, part in enumerate(SPECIAL.split(shorten(text)))]
    )


def prompt_markup(prompt: Any) -> Markup:
    """A prompt after the chat template: its turns with their roles, the empty answer turn left out."""
    text = prompt if isinstance(prompt, str) else str(prompt)
    turns = [(role, words.strip()) for role, words in TURN.findall(text)]
    if not turns:
        return tag("div", prose(text), class_="text")
    shown = [(role, words) for role, words in turns if words]
    return join([tag("div", tag("span", role, class_="role"), prose(words), class_="text") for role, words in shown])


def picture(pictures: Pictures, folder: Path, name: Any) -> Markup:
    found = pictures.uri(folder, str(name), THUMBNAIL)
    if found is None:
        return tag("span", "picture not shown", class_="missing")
    uri, size = found
    tiny = max(size) <= TINY
    width = size[0] * max(1, 150 // max(size)) if tiny else None
    return tag("img", src=uri, alt="", class_="tiny" if tiny else None, width=width)


def score_line(record: Record, low: float, high: float) -> Markup:
    value = score(record)
    if value is None:
        return tag("div", "no valid reward", class_="score")
    filled = 100 if high <= low else 100 * (value - low) / (high - low)
    bar = tag("div", tag("i", style=f"width:{max(0.0, min(100.0, filled)):.1f}%"), class_="bar")
    return tag("div", f"{value:.3f}", bar, class_="score")


def field(name: str, content: Any, class_: str = "text") -> Markup | None:
    if content is None or content == "":
        return None
    text = content if isinstance(content, str) else str(content)
    return tag("div", tag("span", name, class_="k"), tag("div", prose(text), class_=class_))


def card(record: Record, pictures: Pictures, folder: Path, low: float, high: float) -> Markup:
    """One rollout. `low` and `high` scale the bar of the reward."""
    names = [name for key in ("images", "videos") for name in record.get(key) or []]
    shown = [picture(pictures, folder, name) for name in names[:MAX_PICTURES]]
    if len(names) > MAX_PICTURES:
        shown.append(tag("span", f"and {len(names) - MAX_PICTURES} more", class_="missing"))
    components = record.get("components")
    parts = [
        tag("span", f"{name} {number(value)}")
        for name, value in (components.items() if isinstance(components, dict) else ())
        if isinstance(value, int | float)
    ]
    length = record.get("response_length")
    if isinstance(length, int):
        parts.append(tag("span", f"{length} tokens" + (", cut off" if record.get("truncated") else "")))
    words = [
        score_line(record, low, high),
        tag("div", tag("span", "prompt", class_="k"), prompt_markup(record.get("prompt", ""))),
        field("response", record.get("response"), "text answer"),
        field("reference", record.get("reference")),
        tag("div", parts, class_="parts") if parts else None,
    ]
    top = tag("div", shown, class_="pictures") if shown else None
    return tag("div", top, tag("div", words, class_="words"), class_="rollout")


def cards(records: Sequence[Record], pictures: Pictures, folder: Path) -> Markup:
    """Best, worst and random examples of one file."""
    values = [value for record in records if (value := score(record)) is not None]
    low, high = (min([0.0, *values]), max(values)) if values else (0.0, 1.0)
    best, worst = best_and_worst(records, EACH)
    taken = {id(record) for record in (*best, *worst)}
    drawn = pick_random([record for record in records if id(record) not in taken], EACH)
    parts = []
    for title, chosen in (("Best", best), ("Worst", worst), ("At random", drawn)):
        if chosen:
            shown = [card(record, pictures, folder, low, high) for record in chosen]
            parts.append(join([tag("h3", title), tag("div", shown, class_="rollouts")]))
    return join(parts)


def rollout_block(title: str, path: Path, pictures: Pictures, is_open: bool) -> Markup | None:
    records = load_records(path)
    if not records:
        return None
    note = f" {len(records)} samples kept"
    content = cards(records, pictures, path.parent)
    return tag("details", tag("summary", title, tag("span", note)), content, open=is_open)


def rollouts(run: RunData, pictures: Pictures, is_open: bool = True) -> Markup | None:
    """Examples of each evaluation, newest first and open, then of training steps."""
    blocks = []
    for index, (step, path) in enumerate(reversed(spread(run.eval_rollouts, MAX_EVALUATIONS))):
        blocks.append(rollout_block(f"Evaluation at step {step}", path, pictures, is_open and index == 0))
    for index, (step, path) in enumerate(reversed(spread(run.train_rollouts, 3))):
        opened = is_open and index == 0 and not run.eval_rollouts
        blocks.append(rollout_block(f"Training step {step}", path, pictures, opened))
    shown = [block for block in blocks if block is not None]
    return join(shown) if shown else None


def sheets(run: RunData, pictures: Pictures, is_open: bool = True) -> Markup | None:
    """Contact sheets of generated pictures, newest first."""
    blocks = []
    for index, (epoch, path) in enumerate(reversed(spread(run.sheets, MAX_EVALUATIONS))):
        found = pictures.uri(path.parent, path.name, SHEET_SIDE, quality=80)
        image = tag("img", src=found[0], alt=f"pictures at {epoch}", class_="sheet") if found else "picture not shown"
        shown = is_open and index == 0
        blocks.append(tag("details", tag("summary", f"Contact sheet at {epoch}"), image, open=shown))
    return join(blocks) if blocks else None
