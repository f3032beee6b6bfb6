"""A data set in which some rows are bad, each by a cause of its own; two of them show only when they are decoded."""

from __future__ import annotations

import base64
import json
import random
from functools import reduce
from pathlib import Path
from typing import Any

from PIL import Image

AT_RUN_TIME = "image damaged"


def bad_rows(folder: Path) -> list[tuple[str, Any]]:
    """(cause, row) of each; a row that is no mapping is a line as it stands. Writes the images that they name."""
    Image.effect_noise((64, 64), 9).convert("RGB").save(folder / "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[:-500])
    (folder / "text.png").write_bytes(b"no image at all")
    (folder / "empty.png").touch()
    Image.new("RGB", (1, 300)).save(folder / "thin.png")
    Image.new("1", (8000, 8000)).save(folder / "large.png")
    frames, deep = ["whole.jpg"] * 4, reduce(lambda inner, _: [inner], range(60), 1)
    return [
        ("text not Unicode", {"prompt": "q", "reference": "\ud800"}),
        ("text not Unicode", {"prompt": "q \udfff"}),
        (AT_RUN_TIME, {"prompt": "q", "images": ["cut.jpg"]}),
        (AT_RUN_TIME, {"prompt": "q", "images": [base64.b64encode(whole[:-400]).decode()]}),
        ("not an image", {"prompt": "q", "images": ["text.png"]}),
        ("file empty", {"prompt": "q", "images": ["empty.png"]}),
        ("file missing", {"prompt": "q", "images": ["gone.png"]}),
        ("image aspect ratio", {"prompt": "q", "images": ["thin.png"]}),
        ("image too large", {"prompt": "q", "images": ["large.png"]}),
        ("nested too deep", {"prompt": "q", "extra": deep}),
        ("nested too deep", "[" * 100_000),
        ("number too long", {"prompt": "q", "reference": 10**1000}),
        ("video options", {"prompt": "q", "videos": [{"video": frames, "fps": "two"}]}),
        ("video options", {"prompt": "q", "videos": [{"video": frames, "sample_fps": 0}]}),
        ("video options", {"prompt": "q", "videos": [{"video": frames, "resized_height": 100_000}]}),
        ("video damaged", {"prompt": "q", "videos": ["text.png"]}),
        ("vision token in the text", {"prompt": "what is <|image_pad|>"}),
        ("placeholders", {"prompt": "<image> and <image>", "images": ["whole.jpg"]}),
        ("prompt form", {"prompt": ""}),
        ("prompt form", {"prompt": [{"role": "robot", "content": "x"}]}),
        ("prompt form", {"prompt": "[{'role': 'user', 'content': 'x'}]"}),
        ("column missing", {"nothing": 1}),
        ("column not read", {"prompt": "q", "photo": "whole.jpg"}),
        ("not fetched", {"prompt": "q", "images": ["http://host/c.png"]}),
        ("not JSON", '{"prompt": '),
        ("long prompt", {"prompt": "which? " * 400}),
    ]


def write(folder: Path, good: Path, count: int) -> Path:
    """A jsonl file of `count` rows of the embedded task among all bad ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in good.read_text(encoding="utf-8").splitlines()[:count]]
    lines = [json.dumps({**row, "images": [str(good.parent / name) for name in row["images"]]}) for row in rows]
    lines += [row if isinstance(row, str) else json.dumps(row) for _, row in bad_rows(folder)]
    random.Random(0).shuffle(lines)
    path = folder / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
