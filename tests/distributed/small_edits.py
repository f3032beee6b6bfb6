"""A tiny model that edits, with fresh weights, and its rows; beside it another that draws."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_families
import torch
from PIL import Image


def given_edits(folder: Path) -> Path:
    """A folder, inside this one, with a tiny Qwen-Image-Edit-Plus and rows of one to three images of three sizes, and
    with a tiny Z-Image."""
    place = folder / "given_edits"
    place.mkdir()
    torch.manual_seed(0)
    tiny_families.qwen_image_edit_plus().save_pretrained(place / "pipeline")
    tiny_families.z_image().save_pretrained(place / "z_image")
    for colour, size in (("red", (40, 40)), ("blue", (80, 20)), ("green", (30, 60))):
        Image.new("RGB", size, colour).save(place / f"{colour}.png")
    rows = [["blue"], ["red", "blue"], ["green", "red", "blue"]]
    texts = [{"prompt": f"make it {row[0]}", "images": [f"{name}.png" for name in row]} for row in rows]
    (place / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return place
