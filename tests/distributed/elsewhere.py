"""Models, data files and reward functions made outside of the package's defaults, and broken ones."""

import json
from pathlib import Path

from PIL import Image
from whole_runs import SMALL

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "qwen2")
REWARDS = """
def score(prompts, completions, reference, images):
    return [float(str(answer) in text) + 0.01 * len(text) for text, answer in zip(completions, reference)]
"""


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build(folder: Path) -> Path:
    """models/<family>, data/rows.jsonl with none to two images a row, data/text.jsonl, my_reward.py."""
    (folder / "data" / "pictures").mkdir(parents=True)
    for number in range(4):
        size = (56 + 28 * number, 56)
        Image.new("RGB", size, (60 * number, 255 - 60 * number, 90)).save(folder / "data/pictures" / f"{number}.png")
    rows = [
        {"prompt": "what colour is it?", "images": ["pictures/0.png"], "reference": "green"},
        {"prompt": "are these equal?", "images": ["pictures/1.png", "pictures/2.png"], "reference": "no"},
        {"prompt": "say yes", "reference": "yes"},
        {"prompt": "is it wide?", "images": "pictures/3.png", "reference": "yes"},
    ]
    write_rows(folder / "data" / "rows.jsonl", rows)
    write_rows(folder / "data" / "text.jsonl", [{"prompt": f"say {n}", "reference": str(n)} for n in range(8)])
    missing = [rows[0], rows[3] | {"images": ["pictures/none.png"]}]
    write_rows(folder / "data" / "no_image.jsonl", missing)
    (folder / "my_reward.py").write_text(REWARDS, encoding="utf-8")
    for family in FAMILIES:
        build_tiny_checkpoint(folder / "models" / family, family, texts=[row["prompt"] for row in rows] + ["yes no"])
    return folder


def settings(folder: Path, family: str, data: str) -> list[str]:
    own = (
        f"--pretrain {folder}/models/{family} --prompt_data {folder}/data/{data} --max_steps 1 --generate_max_len 8 "
        f"--engine_type hf --prompt_max_len 256 --actor_learning_rate 1e-4 --init_kl_coef 0 --no_reward_probe "
        f"--reward_fn {folder}/my_reward.py:score"
    )
    return [*SMALL, *own.split()]


def good(folder: Path) -> dict[str, list[str]]:
    runs = {f"from_{f}": settings(folder, f, "text.jsonl" if f == "qwen2" else "rows.jsonl") for f in FAMILIES}
    runs["from_qwen2_5_vl"] += ["--eval_data", f"{folder}/data/rows.jsonl", "--max_eval_samples", "4"]
    return runs


def bad(folder: Path) -> dict[str, list[str]]:
    """Runs that must fail before any model loads."""
    rows = settings(folder, "qwen2_5_vl", "rows.jsonl")
    return {
        "no_image": settings(folder, "qwen2_5_vl", "no_image.jsonl"),
        "long_prompt": [*rows, "--prompt_max_len", "8"],
        "save_path": [*rows, "--save_path", f"{folder}/data"],
    }
