"""A data set in which some rows are bad, each by a cause of its own; two of them show only when they are decoded."""

import base64
import json
import random
import struct
import zlib
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
    (folder / "bomb.png").write_bytes(bomb())
    Image.new("RGB", (9, 9)).save(folder / "moves.gif", save_all=True, append_images=[Image.new("RGB", (9, 9), "red")])
    (folder / "outside.png").symlink_to("/etc/passwd")
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
        ("image too large", {"prompt": "q", "images": ["bomb.png"]}),
        ("image animated", {"prompt": "q", "images": ["moves.gif"]}),
        ("not an image", {"prompt": "q", "images": ["outside.png"]}),
        ("not an image", {"prompt": "q", "images": ["/etc/passwd"]}),
        ("file missing", {"prompt": "q", "images": ["/dev/zero"]}),
        ("not base64", {"prompt": "q", "images": ["data:image/png;base64,%%%"]}),
        ("media form", {"prompt": "q", "images": [5]}),
        ("media missing", {"prompt": "q", "images": [None]}),
        ("media missing", {"prompt": "q", "videos": [[]]}),
        ("reference not finite", {"prompt": "q", "reference": float("nan")}),
        ("reference not finite", {"prompt": "q", "reference": {"boxes": [{"x": float("inf")}]}}),
        ("label form", {"prompt": "q", "label": {"kind": 1}}),
        ("prompt form", {"prompt": 5}),
        ("row form", "null"),
        ("not JSON", '{"prompt": "\udcff"}'),  # written as a byte that is not UTF-8
    ]


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 3.6 billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def write(folder: Path, good: Path, count: int) -> Path:
    """A jsonl file of `count` rows of the embedded task among all bad ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in good.read_text(encoding="utf-8").splitlines()[:count]]
    lines = [json.dumps({**row, "images": [str(good.parent / name) for name in row["images"]]}) for row in rows]
    lines += [row if isinstance(row, str) else json.dumps(row) for _, row in bad_rows(folder)]
    random.Random(0).shuffle(lines)
    path = folder / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogateescape")
    return path
