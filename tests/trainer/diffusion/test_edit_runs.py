"""Edits end to end: rewards that see source and drawn images, exact replay, what is saved."""

import json
from pathlib import Path

import pytest
import tiny_families
import torch
from drawing_runs import facts, rows, run_all
from forked import on_ranks
from PIL import Image

BASE = (
    "--pretrain {folder}/edit --prompt_data {folder}/edits.jsonl --eval_data {folder}/edits.jsonl --eval_split train "
    "--height 32 --width 32 --source_pixels 4096 --num_steps 3 --eval_num_steps 2 --guidance_scale 3 --lora_rank 2 "
    "--rollout_batch_size 2 --n_samples_per_prompt 2 --micro_rollout_batch_size 4 --train_batch_size 4 "
    "--micro_train_batch_size 2 --learning_rate 1e-2 --report false --max_steps 2 --reward_fn {folder}/scores.py:nearer"
)
SCORES = """
def mean(image):
    return image.convert("RGB").resize((1, 1)).getpixel((0, 0))

def nearer(images, prompts, source_images, metadata):
    \"\"\"The prompt's colour, and close to the source's.\"\"\"
    assert [len(row) for row in source_images] == [len(row["sizes"]) for row in metadata]
    assert [list(row[0].size) for row in source_images] == [row["sizes"][0] for row in metadata]
    return [-abs(mean(image)[0] - mean(row[0])[0]) / 255 for image, row in zip(images, source_images)]
"""
QUICK = "--max_steps 1 --max_eval_samples 0"
RUNS = {
    "flow_grpo": "",
    "nft": f"--diffusion_algorithm diffusion_nft {QUICK}",
    "many": f"--pretrain {{folder}}/plus --prompt_data {{folder}}/many.jsonl --eval_data {{folder}}/many.jsonl {QUICK}",
    "too_many": "--prompt_data {folder}/many.jsonl",
    "no_edits": "--pretrain {folder}/plain",
}


def prepare(folder: Path) -> None:
    kinds = {"edit": "qwen_image_edit", "plus": "qwen_image_edit_plus", "plain": "qwen_image"}
    for place, kind in kinds.items():
        torch.manual_seed(0)
        tiny_families.FAMILIES[kind]().save_pretrained(folder / place)
    Image.new("RGB", (40, 40), "red").save(folder / "red.png")
    Image.new("RGB", (80, 20), "blue").save(folder / "blue.png")
    red, blue = {"images": ["red.png"], "sizes": [[40, 40]]}, {"images": "blue.png", "sizes": [[80, 20]]}
    both = {"images": ["red.png", "blue.png"], "sizes": [[40, 40], [80, 20]]}
    for name, given in {"edits": [red, blue], "many": [red, both]}.items():
        texts = [json.dumps({"prompt": f"make it darker {place}", **row}) for place, row in enumerate(given)]
        (folder / f"{name}.jsonl").write_text("\n".join(texts))
    (folder / "scores.py").write_text(SCORES)


def all_runs(folder: Path) -> None:
    prepare(folder)
    run_all(folder, BASE, RUNS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("edits")
    on_ranks(all_runs, place, ranks=1, limit=280)
    return place


def test_edits_are_trained_by_and_too_many_images_and_edits_elsewhere_refused(folder) -> None:
    for name, updates in (("flow_grpo", 2), ("nft", 1), ("many", 1)):
        assert facts(folder, name)["updates"] == updates and (folder / name / "checkpoint-final").is_dir()
        for row in rows(folder, name):
            assert -1 <= float(row["reward_mean"]) <= 0 and float(row["reward_invalid_share"]) == 0
            assert name == "nft" or float(row["ratio_max_dev_first"]) == 0
        assert bool([*(folder / name).glob("eval_epoch_*/contact_sheet.png")]) == (name == "flow_grpo")
    assert "2 images in column 'images'; this model takes 1" in facts(folder, "too_many")["text"]
    assert "source_pixels" in facts(folder, "no_edits")["text"]
