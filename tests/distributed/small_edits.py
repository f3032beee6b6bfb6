"""A tiny model that edits, with fresh weights, and its rows; beside it another that draws."""

import json
from pathlib import Path

import tiny_families
import torch
from PIL import Image

FAMILIES = ("z_image", "flux_kontext", "hunyuan_video15", "ltx2", "qwen_image21")

FIRST_FRAME = """
def red(videos, prompts):
    return [float(video[0, ..., 0].mean()) / 255 for video in videos]
"""


def given_edits(folder: Path) -> Path:
    """A folder, inside this one, with a tiny Qwen-Image-Edit-Plus and rows of one to three images of three sizes
    (`edits.jsonl`; `one.jsonl` has the first of each), and with tiny pipelines of FAMILIES."""
    place = folder / "given_edits"
    place.mkdir()
    torch.manual_seed(0)
    tiny_families.qwen_image_edit_plus().save_pretrained(place / "pipeline")
    for name in FAMILIES:
        tiny_families.FAMILIES[name]().save_pretrained(place / name)
    for colour, size in (("red", (40, 40)), ("blue", (80, 20)), ("green", (30, 60))):
        Image.new("RGB", size, colour).save(place / f"{colour}.png")
    rows = [["blue"], ["red", "blue"], ["green", "red", "blue"]]
    texts = [{"prompt": f"make it {row[0]}", "images": [f"{name}.png" for name in row]} for row in rows]
    (place / "first.py").write_text(FIRST_FRAME)
    ones = [row | {"images": row["images"][:1]} for row in texts]
    for name, rows_of in (("edits", texts), ("one", ones)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    return place
