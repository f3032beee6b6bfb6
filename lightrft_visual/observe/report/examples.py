"""The report's examples: rollouts as cards with image, prompt, response and reward; contact sheets."""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...data.media import evenly_spaced
from ...runtime.files import read_jsonl
from ..recorder import Record, best_and_worst, pick_random, score
from .curves import number
from .data import RunData, Thumbnails

EACH = 3  # best, worst and random examples of an evaluation
MAX_EVALUATIONS, MAX_STEPS = 6, 3
MAX_IMAGES = 4
MAX_OBSERVED = 8  # images of observations in one card
MAX_ALARMS = 12
MAX_CHARACTERS = 1500
THUMBNAIL, SHEET_SIDE = 320, 1100
TINY, SHOWN = 128, 150  # images up to TINY pixels are enlarged to about SHOWN, without blurring
TURN = re.compile(r"<\|im_start\|>(\w+)\n?(.*?)(?:<\|im_end\|>\n?|$)", re.DOTALL)
SPECIAL = re.compile(r"((?:<\|[\w ./-]{1,40}\|>)+)")
MEDIA_TOKENS = {"image_pad": "image", "video_pad": "video", "vision_start": None, "vision_end": None}
ONE_TOKEN = re.compile(r"<\|([\w ./-]{1,40})\|>")
Part = tuple[str, bool]  # text, and whether it is the label of special tokens


def special_tokens(text: str) -> list[Part]:
    """Labels of a row of special tokens, repeats counted."""
    names = filter(None, (MEDIA_TOKENS.get(name, name) for name in ONE_TOKEN.findall(text)))
    counted = [(name, len(list(repeats))) for name, repeats in groupby(names)]
    return [(name if count == 1 else f"{name} ×{count}", True) for name, count in counted]


def prose(text: Any) -> list[Part]:
    """Text, shortened where it is long, with its special tokens set apart."""
    text = str(text)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}… ({len(text) - MAX_CHARACTERS} more characters)"
    pieces = enumerate(SPECIAL.split(text))
    return [part for index, piece in pieces for part in (special_tokens(piece) if index % 2 else [(piece, False)])]


def turns(prompt: Any) -> list[tuple[str, list[Part]]]:
    """(role, text) of each turn of a chat prompt that says something; one turn without a role for any other prompt."""
    found = [(role, words.strip()) for role, words in TURN.findall(str(prompt))]
    return [(role, prose(words)) for role, words in found if words] if found else [("", prose(prompt))]


def _thumbnail(thumbnails: Thumbnails, folder: Path, name: Any) -> dict[str, Any] | None:
    """Data URI of an image with the width that it is enlarged to, if it is tiny; None where it cannot be shown."""
    found = thumbnails.uri(folder, str(name), THUMBNAIL)
    if found is None:
        return None
    uri, size = found
    return {"uri": uri, "width": size[0] * max(1, SHOWN // max(size)) if max(size) <= TINY else None}


def conversation(record: Record, images: Sequence[Any]) -> list[dict[str, Any]]:
    """What was said in turn: (who, text, images, note) of each answer and of each message that followed it.

    images: thumbnails of the observations' images, in the order of their parts.
    """
    listed = record.get("turns")
    if not isinstance(listed, list):
        return []
    said: list[dict[str, Any]] = []
    left = iter(images)
    for turn in listed:
        calls = [f"{name}: {error}" if error else str(name) for name, error in turn.get("calls", ())]
        note = [f"reward {number(turn['reward'])}"] if turn.get("reward") else []
        said.append({"who": "answer", "text": prose(turn.get("text", "")), "images": [], "notes": [*note, *calls]})
        for message in turn.get("observation", ()):
            parts = message["content"]
            words = "".join(part["text"] for part in parts if part["type"] == "text")
            shown = [next(left, None) for part in parts if part["type"] == "image"]
            said.append({"who": message["role"], "text": prose(words), "images": shown, "notes": []})
    return said


def card(record: Record, thumbnails: Thumbnails, folder: Path, low: float, high: float) -> dict[str, Any]:
    """What the page shows of a rollout.

    Args:
        record: as its rollout file holds it, with images and videos as names of files.
        thumbnails: of the whole page, which has a budget.
        folder: that the names are relative to.
        low: reward at which the bar is empty.
        high: reward at which the bar is full.
    """
    value = score(record)
    filled = 100 if value is None or high <= low else 100 * (value - low) / (high - low)
    names = [name for key in ("images", "videos") if isinstance(own := record.get(key), list) for name in own]
    components = record.get("components")
    facts = [
        f"{name} {number(each)}"
        for name, each in (components.items() if isinstance(components, dict) else ())
        if isinstance(each, int | float)
    ]
    if isinstance(length := record.get("response_length"), int):
        facts.append(f"{length} tokens" + (", cut off" if record.get("truncated") else ""))
    texts = {name: record.get(name) for name in ("response", "reference")}
    observed = _observed_images(record)
    names, later = names[: len(names) - observed], names[len(names) - observed :][:MAX_OBSERVED]
    talk = conversation(record, [_thumbnail(thumbnails, folder, name) for name in later])
    if talk:
        texts["response"] = None
        facts += [f"{len(record['turns'])} turns"] + ([record["failure"]] if record.get("failure") else [])
    return {
        "score": value,
        "filled": max(0.0, min(100.0, filled)),
        "images": [_thumbnail(thumbnails, folder, name) for name in names[:MAX_IMAGES]],
        "more_images": max(0, len(names) - MAX_IMAGES),
        "conversation": talk,
        "turns": turns(record.get("prompt", "")),
        "facts": facts,
        **{name: None if text in (None, "") else prose(text) for name, text in texts.items()},
    }


def _observed_images(record: Record) -> int:
    """How many of a record's images came behind the prompt; videos stand behind them all."""
    listed = record.get("turns") if isinstance(record.get("turns"), list) else []
    parts = [part for turn in listed for message in turn.get("observation", ()) for part in message["content"]]
    return 0 if record.get("videos") else sum(part["type"] == "image" for part in parts)


def _cards(records: Sequence[Record], thumbnails: Thumbnails, folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Best, worst and random examples of one file, by title; answers and drawn images apart where there are both."""
    drawn = [record for record in records if record.get("kind") == "drawing"]
    if not drawn or len(drawn) == len(records):
        return _cards_of_kind(records, thumbnails, folder)
    answers = [record for record in records if record.get("kind") != "drawing"]
    return [
        (f"{title}, {kind}", chosen)
        for kind, own in (("answers", answers), ("drawn images", drawn))
        for title, chosen in _cards_of_kind(own, thumbnails, folder)
    ]


def _cards_of_kind(
    records: Sequence[Record], thumbnails: Thumbnails, folder: Path
) -> list[tuple[str, list[dict[str, Any]]]]:
    values = [value for record in records if (value := score(record)) is not None]
    low, high = (min([0.0, *values]), max(values)) if values else (0.0, 1.0)
    best, worst = best_and_worst(records, EACH)
    taken = {id(record) for record in (*best, *worst)}
    drawn = pick_random([record for record in records if id(record) not in taken], EACH)
    return [
        (title, [card(record, thumbnails, folder, low, high) for record in chosen])
        for title, chosen in (("Best", best), ("Worst", worst), ("At random", drawn))
        if chosen
    ]


def rollout_blocks(run: RunData, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Examples of each evaluation, newest first, then of training steps."""
    evaluations = reversed(evenly_spaced(run.eval_rollouts, MAX_EVALUATIONS))
    steps = reversed(evenly_spaced(run.train_rollouts, MAX_STEPS))
    titled = [(f"Evaluation at step {step}", path) for step, path in evaluations]
    titled += [(f"Training step {step}", path) for step, path in steps]
    return [
        {"title": title, "count": len(records), "groups": _cards(records, thumbnails, path.parent)}
        for title, path in titled
        if (records := read_jsonl(path))
    ]


def guard_section(run: RunData, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """The guard's alarms, each with those samples kept of its step that please the reward most."""
    of_steps, of_evaluations = dict(run.train_rollouts), dict(run.eval_rollouts)
    blocks = []
    for alarm in run.alarms[:MAX_ALARMS]:
        step = alarm.get("step")
        evaluated = str(alarm.get("signal")).startswith("eval_")
        kept = of_steps | of_evaluations if evaluated else of_evaluations | of_steps
        path = kept.get(step) if isinstance(step, int) else None
        groups = dict(_cards(read_jsonl(path), thumbnails, path.parent)) if path is not None else {}
        best = [each for title, chosen in groups.items() if title.startswith("Best") for each in chosen]
        blocks.append({"step": alarm.get("step"), "text": str(alarm.get("text")), "cards": best})
    return blocks


def sheet_blocks(run: RunData, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Contact sheets of generated images, newest first."""
    blocks = []
    for epoch, path in reversed(evenly_spaced(run.sheets, MAX_EVALUATIONS)):
        found = thumbnails.uri(path.parent, path.name, SHEET_SIDE, quality=80)
        blocks.append({"epoch": epoch, "uri": found[0] if found else None})
    return blocks


def examples_section(run: RunData, thumbnails: Thumbnails, is_open: bool = True) -> dict[str, Any] | None:
    """Sheets and rollouts of a run; None without any.

    Args:
        run: whose files are read.
        thumbnails: as of `card`.
        is_open: whether the newest of each are unfolded at first.
    """
    sheets, blocks = sheet_blocks(run, thumbnails), rollout_blocks(run, thumbnails)
    return {"sheets": sheets, "blocks": blocks, "is_open": is_open} if sheets or blocks else None
