#!/usr/bin/env python
"""Bring a data set that no form fits into this project's own: jsonl, images beside it.

    python scripts/convert_data.py theirs.parquet ours.jsonl --map caption=prompt --map meta.target=reference
    python scripts/convert_data.py folder_of_a_data_set ours.jsonl --split test --map shot=images --on_bad_row skip

--map THEIRS=OURS renames a column; dots step into objects. OURS: prompt, images, videos, reference, label, or any name
that a reward function asks for. What --data_format recognises needs no --map. Images that are stored inside the file
are written into the folder TARGET_images; paths become absolute. Each row is read as a run would read it; the exit code
is 1 when one cannot be, unless --on_bad_row skip leaves such rows out.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightrft_visual.config.vl import DATA_FORMATS, DataConfig
from lightrft_visual.data.bad_rows import BadRow, BadRows
from lightrft_visual.data.media import read_source
from lightrft_visual.data.rows import PromptRow, parse_row
from lightrft_visual.data.sources import open_source
from lightrft_visual.errors import DataError, LightRFTVisualError

SUFFIXES = ((b"\x89PNG", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"GIF8", ".gif"), (b"BM", ".bmp"), (b"RIFF", ".webp"))


def renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The row with columns under their new names. names: theirs to ours. Raises DataError for a missing one."""
    if not isinstance(raw, Mapping):
        raise DataError(f"a row must be a mapping of columns, not {type(raw).__name__}", "row form")
    row = {key: value for key, value in raw.items() if key not in names}
    for theirs, ours in names.items():
        value: Any = raw
        for key in [theirs] if theirs in raw else theirs.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise DataError(f"no column {theirs!r} (--map); the row has: {', '.join(map(str, raw))}")
            value = value[key]
        row[ours] = value
    return row


def own_form(row: PromptRow, folder: Path, number: int) -> dict[str, Any]:
    """The row as this project writes it. Images without a path of their own go into `folder`."""
    images = [_image_path(image, folder, f"{number:06d}_{place}") for place, image in enumerate(row.images)]
    own: dict[str, Any] = {"prompt": _prompt(row.prompt), "images": images}
    if row.videos:
        own["videos"] = row.videos
    for name in ("reference", "label"):
        if getattr(row, name) is not None:
            own[name] = getattr(row, name)
    return own | row.metadata


def _prompt(prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One message of the user as a string with marks for its media; a conversation as it is."""
    if isinstance(prompt, str) or len(prompt) > 1 or prompt[0]["role"] != "user":
        return prompt
    return "".join(part.get("text", f"<{part['type']}>") for part in prompt[0]["content"])


def _image_path(source: Any, folder: Path, name: str) -> str:
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return source
    content = read_source(source)
    if isinstance(content, Path):
        return str(content.resolve())
    suffix = next((suffix for magic, suffix in SUFFIXES if content.startswith(magic)), ".img")
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}{suffix}"
    path.write_bytes(content)
    return str(path.resolve())


def _plain(value: Any) -> str:
    """Values that tables have and JSON lacks."""
    if isinstance(value, (datetime.date, datetime.time, decimal.Decimal)):
        return str(value)
    raise DataError(f"a {type(value).__name__} in a column cannot be written as JSON: drop the column", "column form")


def convert(options: argparse.Namespace) -> BadRows:
    """Write the target file; returns the rows that were left out. Raises DataError."""
    target, names = Path(options.target), dict(pair.split("=", 1) for pair in options.map)
    config = DataConfig(data_format=options.data_format)
    source, bad = open_source(options.source, options.split), BadRows(options.source, 1.0)
    with open(target, "x", encoding="utf-8") as file:
        for number in range(len(source)):
            bad.inspected += 1
            name = source.name(number)
            try:
                row = parse_row(renamed(source[number], names), config, source=name, root=source.folder.resolve())
                content = own_form(row, target.with_name(f"{target.stem}_images"), number)
                file.write(json.dumps(content, ensure_ascii=False, default=_plain) + "\n")
            except DataError as error:
                found = BadRow.of(error, name)
                if options.on_bad_row == "error":
                    raise found.as_error() from error
                bad.add(found)
    return bad


def main(arguments: list[str]) -> None:
    """Convert as the command line says; ends the process with code 1 and one line on an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a .jsonl, .json, .csv, .txt or .parquet file, or a data set folder")
    parser.add_argument("target", help="the .jsonl file to write; it must not exist")
    parser.add_argument("--map", action="append", default=[], metavar="THEIRS=OURS")
    parser.add_argument("--data_format", default="auto", choices=DATA_FORMATS)
    parser.add_argument("--split", default="train")
    parser.add_argument("--on_bad_row", default="error", choices=("error", "skip"))
    options = parser.parse_args(arguments)
    if not all("=" in pair for pair in options.map):
        parser.error("--map takes THEIRS=OURS")
    try:
        bad = convert(options)
    except FileExistsError:
        sys.exit(f"error: {options.target} exists already")
    except LightRFTVisualError as error:
        Path(options.target).unlink(missing_ok=True)
        sys.exit(f"error: {error}")
    print(f"{options.target}: {bad.inspected - len(bad)} rows")
    if len(bad):
        print(bad.summary())


if __name__ == "__main__":
    main(sys.argv[1:])
