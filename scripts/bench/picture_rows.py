"""`picture_rows.py SOURCE.jsonl FOLDER SIZE [ROWS]`: the first 128 rows with one image, resized to SIZE x SIZE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

ROWS = 128


def main(source: Path, folder: Path, size: int, count: int = ROWS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row.get("images") or []) == 1][:count]
    for number, row in enumerate(rows):
        Image.open(source.parent / row["images"][0]).convert("RGB").resize((size, size)).save(folder / f"{number}.png")
        row["images"] = [f"{number}.png"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
