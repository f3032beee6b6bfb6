"""A small SD3 pipeline with fresh weights, captions, pairs and a reward, for runs that start from files of a user."""

import json
from pathlib import Path

from PIL import Image

from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

SCORE = """
def score(images, prompts):
    assert len(images) == len(prompts)
    return [sum(image.resize((1, 1)).getpixel((0, 0))[:2]) / 510 for image in images]
"""


def given_flags(folder: Path) -> list[str]:
    """Writes them into the folder; returns the flags that name them."""
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    captions = ["a red circle", "a blue cross", "a green square"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in captions))
    pairs = []
    for place, (text, colours) in enumerate(zip(captions, (("red", "blue"), ("blue", "red"), ("green", "red")))):
        files = [f"{place}_{colour}.png" for colour in colours]
        for file, colour in zip(files, colours):
            Image.new("RGB", (32, 32), colour).save(folder / file)
        pairs.append(json.dumps({"prompt": text, "chosen": files[0], "rejected": files[1]}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(pairs))
    (folder / "score.py").write_text(SCORE)
    return [
        "--pretrain", str(folder / "pipeline"), "--prompt_data", str(prompts), "--eval_data", str(prompts),
        "--reward_fn", f"{folder / 'score.py'}:score",
    ]  # fmt: skip
