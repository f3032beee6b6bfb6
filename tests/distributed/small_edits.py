"""A tiny model that edits, with fresh weights, and its rows; beside it another that draws."""

import json
from pathlib import Path

import tiny_families
import torch
from PIL import Image

FIRST_FRAME = """
def red(videos, prompts):
    return [float(video[0, ..., 0].mean()) / 255 for video in videos]
"""


def given_edits(folder: Path) -> Path:
    """A folder, inside this one, with a tiny Qwen-Image-Edit-Plus and rows of one to three images of three sizes
    (`edits.jsonl`), and with a tiny LTX-2."""
    place = folder / "given_edits"
    place.mkdir()
    torch.manual_seed(0)
    tiny_families.qwen_image_edit_plus().save_pretrained(place / "pipeline")
    tiny_families.FAMILIES["ltx2"]().save_pretrained(place / "ltx2")
    for colour, size in (("red", (40, 40)), ("blue", (80, 20)), ("green", (30, 60))):
        Image.new("RGB", size, colour).save(place / f"{colour}.png")
    rows = [["blue"], ["red", "blue"], ["green", "red", "blue"]]
    texts = [{"prompt": f"make it {row[0]}", "images": [f"{name}.png" for name in row]} for row in rows]
    (place / "first.py").write_text(FIRST_FRAME)
    (place / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return place
