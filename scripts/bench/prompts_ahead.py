"""Seconds that a step waits for its prompts: read and preprocessed when it asks, only read ahead, all of it ahead.

    OMP_NUM_THREADS=1 python scripts/bench/prompts_ahead.py [--prompts 16] [--size 1024] [--busy 2] [--rounds 5]

Each prompt has one JPEG of its own, `size` pixels wide and high, patches by the processor of Qwen2.5-VL. Between two
batches the step does `busy` seconds of something that leaves the host alone, as training on an accelerator does. The
three forms run in turn; CPU seconds of all threads are given beside the wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FORMS = ("when asked", "rows ahead", "all ahead")


def parts_of(folder: Path, arguments: argparse.Namespace):
    """A new supply of prompts, and what prepares them."""
    from PIL import Image

    from lightrft_visual.batches.prompts import PromptBatch
    from lightrft_visual.config.vl import DataConfig
    from lightrft_visual.data.prompts import PromptDataset, PromptSampler
    from lightrft_visual.data.supply import PromptSupply
    from lightrft_visual.embedded.tiny_vlm import build_processor, build_tokenizer
    from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
    from lightrft_visual.trainer.vl.prompts import PromptSource

    path = folder / "rows.jsonl"
    if not path.exists():
        rows = []
        for index in range(2 * arguments.prompts):
            Image.effect_noise((arguments.size, arguments.size), 40 + index).save(folder / f"{index}.jpg")
            rows.append({"prompt": "how many?", "images": [f"{index}.jpg"]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = build_tokenizer(["how many?"])
    own = build_processor("qwen2_5_vl", tokenizer, max_pixels=2 * arguments.size**2)
    processor = MultimodalDataProcessor(tokenizer, own, prompt_max_len=10**6)
    text = "<|vision_start|><|image_pad|><|vision_end|>how many?"

    def make(rows, ids) -> PromptBatch:
        return PromptBatch.of([text] * len(rows), [row.images for row in rows], ids=ids)

    dataset = PromptDataset(str(path), DataConfig(), split="train", max_rows=10**6)
    sampler = PromptSampler([len(dataset)], arguments.prompts, seed=1)
    return PromptSource(PromptSupply(dataset, sampler), make, processor.features), processor


def one_run(form: str, folder: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """(median wait, CPU seconds of a step) over the steps after the first."""
    prompts, processor = parts_of(folder, arguments)
    waits, used = [], []
    for step in range(arguments.rounds + 1):
        cpu, asked = time.process_time(), time.perf_counter()
        batch = prompts.next(step)
        features = batch.prepared or processor.features(batch)
        waits.append(time.perf_counter() - asked)
        if len(features) != arguments.prompts:
            raise SystemExit("a batch is not whole")
        if form == "rows ahead":
            prompts.supply.look_ahead()
        elif form == "all ahead":
            prompts.prepare_next()
        time.sleep(arguments.busy)
        used.append(time.process_time() - cpu)
    return statistics.median(waits[1:]), statistics.median(used[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--busy", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {form: [] for form in FORMS}
        for _ in range(arguments.turns):
            for form in FORMS:
                found[form].append(one_run(form, Path(folder), arguments))
    print(f"{arguments.prompts} prompts with an image of {arguments.size} x {arguments.size} pixels each")
    for form, figures in found.items():
        wait, cpu = (statistics.median(column) for column in zip(*figures))
        print(f"{form}: the step waits {wait:.3f} s, {cpu:.3f} s of CPU")


if __name__ == "__main__":
    main()
