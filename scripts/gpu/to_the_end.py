"""A run to its end on one card, over as many short visits as it takes: each call goes on where the last one stopped.

    python scripts/gpu/to_the_end.py counting|ocr FOLDER [--model NAME_OR_FOLDER] [--steps N] [--minutes 25]
        [--price DOLLARS_AN_HOUR] [--size real|tiny] [--docs docs/benchmarks.md] [flag of the run ...]

counting: Qwen2.5-VL-3B, GRPO with LoRA, counts shapes in drawn scenes (448 x 448, 2 to 9 of them; questions of the test
split ask about other scenes); a rule compares the number. ocr: Stable Diffusion 3.5 medium, Flow-GRPO with LoRA, writes
the words of its prompts, which RapidOCR reads. Without --model the shape has random weights: that shows the mechanics,
learns nothing, and the report says so.

After --minutes the run is asked to save and end. Every visit rewrites FOLDER/report.md: held-out rewards by step, hours
of the card, cost, device and versions. --docs also writes it into that page, between two marks with the run's name.
--size tiny: the embedded models and tasks, which a host without a card trains in minutes.
"""

import argparse
import contextlib
import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import parts  # noqa: E402
import shapes  # noqa: E402

SIDE, LEAST, MOST = 448, 2, 9  # pixels; shapes in a scene
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (50, 80, 230), "yellow": (235, 200, 20)}
KINDS = ("circle", "square", "triangle")
TRAIN, TEST = 4096, 256  # scenes
SAVING = 300  # seconds at most from the request to save until the run has ended
STOPPED = (0, 130, 143)  # exit codes of a run that ended or has saved
COUNTING = (
    "--bf16 true --lora_rank 64 --lora_alpha 128 --actor_learning_rate 2e-5 --init_kl_coef 0 --rollout_batch_size 32 "
    "--n_samples_per_prompt 8 --train_batch_size 256 --micro_train_batch_size 32 --micro_rollout_batch_size 32 "
    "--prompt_max_len 512 --generate_max_len 256 --max_eval_samples 256 --components.numeric 1 --engine_mem_util 0.3 "
    "--eval_steps 20 --save_steps 20 --gradient_checkpointing auto"
)
OCR = (
    "--bf16 true --lora_rank 32 --height 512 --width 512 --num_steps 10 --eval_num_steps 40 --guidance_scale 4.5 "
    "--rollout_batch_size 8 --n_samples_per_prompt 16 --train_batch_size 128 --micro_rollout_batch_size 16 "
    "--micro_train_batch_size 8 --steps_per_forward 5 --learning_rate 3e-4 --beta 0.04 --max_eval_samples 64 "
    "--components.ocr 1 --eval_steps 20 --save_steps 20 --gradient_checkpointing auto"
)


def scene(draw: random.Random) -> tuple[Any, list[tuple[str, str]]]:
    """An image of shapes that do not touch, and (colour, kind) of each."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    pen, shown = ImageDraw.Draw(image), []
    cells = draw.sample(range(16), draw.randint(LEAST, MOST))
    for cell in cells:
        size, colour, kind = draw.randint(24, 44), draw.choice(list(COLOURS)), draw.choice(KINDS)
        x, y = (112 * index + draw.randint(size + 4, 108 - size) for index in (cell % 4, cell // 4))
        corners = {
            "circle": [(x - size, y - size), (x + size, y + size)],
            "square": [(x - size, y - size), (x + size, y + size)],
            "triangle": [(x, y - size), (x - size, y + size), (x + size, y + size)],
        }
        form = {"circle": pen.ellipse, "square": pen.rectangle, "triangle": pen.polygon}[kind]
        form(corners[kind], fill=COLOURS[colour])
        shown.append((colour, kind))
    return image, shown


def counting_split(folder: Path, name: str, count: int) -> Path:
    """Questions about scenes of one split, as jsonl; about what a scene shows, or in one of four what it may lack."""
    path = folder / f"{name}.jsonl"
    if path.is_file():
        return path
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        draw = random.Random(f"{name} {index}")
        image, shown = scene(draw)
        image.save(folder / name / f"{index}.png")
        colour, kind = draw.choice(shown) if index % 4 else (draw.choice(list(COLOURS)), draw.choice(KINDS))
        number = sum(each == (colour, kind) for each in shown)
        text = f"How many {colour} {kind}s are there? End with the number."
        rows.append({"prompt": text, "images": [f"{name}/{index}.png"], "reference": str(number)})
    parts.write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def counting(folder: Path, model: str | None, size: str) -> list[str]:
    """What the run is started with."""
    if size == "tiny":
        return "train grpo --engine_type hf --save_steps 20 --eval_steps 20".split()
    model = model or str(shapes.vision_language(folder / "model", size))
    data = [str(counting_split(folder / "scenes", *split)) for split in (("train", TRAIN), ("test", TEST))]
    return ["train", "grpo", "--pretrain", model, "--prompt_data", data[0], "--eval_data", data[1], *COUNTING.split()]


def ocr(folder: Path, model: str | None, size: str) -> list[str]:
    """What the run is started with."""
    if size == "tiny":
        return "train flow-grpo --save_steps 5 --eval_steps 5 --max_eval_samples 32".split()
    model = model or str(shapes.stable_diffusion_3(folder / "model", size))
    prompts = ROOT / "examples" / "datasets" / "ocr"
    data = ["--prompt_data", str(prompts / "train.txt"), "--eval_data", str(prompts / "test.txt")]
    return ["train", "flow-grpo", "--pretrain", model, *data, *OCR.split()]


RUNS = {"counting": (counting, 200), "ocr": (ocr, 300)}


def visit(command: list[str], folder: Path, seconds: float) -> int:
    """The exit code of the run from here to its end, or to the checkpoint that it is asked for in time."""
    with open(folder / "visits.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        finally:  # its time is over, or a signal ends this process
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                code = process.wait(SAVING)
            finally:
                process.kill()
    return code


def columns(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def report(name: str, folder: Path, note: dict[str, Any]) -> str:
    """What is known so far, as markdown."""
    visits = json.loads((folder / "visits.json").read_text())
    steps, evaluations = (columns(folder / "run" / file) for file in ("metrics.csv", "eval_metrics.csv"))
    done = int(steps[-1]["step"]) if steps else 0
    hours = sum(each["seconds"] for each in visits) / 3600
    cost = f", {hours * note['price']:.2f} dollars at {note['price']:g} an hour" if note["price"] else ""
    lines = [
        f"`scripts/gpu/to_the_end.py {name}`: {done} of {note['steps']} steps in {len(visits)} visit(s), {hours:.2f} "
        f"hours of the card with loading{cost}. {note['model']}.",
        "",
        f"Device: {note['host'].pop('device')}. " + ", ".join(f"{k} {v}" for k, v in note["host"].items()) + ".",
        "",
    ]
    kinds = [each for each in ("eval_reward", "eval_reward_greedy") if evaluations and evaluations[-1].get(each)]
    lines += ["| step | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    lines += [
        f"| {row['step']} | " + " | ".join(f"{float(row[each]):.3f}" for each in kinds) + " |" for row in evaluations
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, help="default: 200 of counting, 300 of ocr")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--price", type=float, default=0.0)
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--docs", type=Path)
    arguments, more = parser.parse_known_args()
    parts.end_by_signals()
    began, folder = time.monotonic(), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    start, usual = RUNS[arguments.name]
    steps = arguments.steps or usual
    words = [*start(folder, arguments.model, arguments.size), "--max_steps", str(steps), *more]
    resumed = ["--resume"] if any((folder / "run").glob("checkpoint-*")) else []
    command = [sys.executable, "-m", "lightrft_visual", *words, "--output_dir", str(folder / "run"), *resumed]
    known, code, visited = folder / "visits.json", None, time.monotonic()
    visits = json.loads(known.read_text()) if known.is_file() else []
    try:
        code = visit(command, folder, arguments.minutes * 60 - (visited - began))
    finally:  # a visit that a signal ends has cost its time too
        visits.append({"seconds": time.monotonic() - visited, "code": code})
        parts.write_whole(known, json.dumps(visits))
    model = arguments.model or "Random weights: the mechanics alone, nothing is learnt"
    if arguments.size == "tiny":
        model = "The embedded model and its task"
    note = {"steps": steps, "price": arguments.price, "model": model, "host": parts.host()}
    text = report(arguments.name, folder, note)
    parts.write_whole(folder / "report.md", text)
    if arguments.docs is not None:
        heading = f"{arguments.name.capitalize()}, to its end on one card"
        parts.into(arguments.docs, f"to_the_end {arguments.name}", heading, text)
    print(text)
    finished = (folder / "run" / "checkpoint-final").is_dir()
    print("done" if finished else f"not at its end (exit code {code}, {folder / 'visits.log'}): call it again")
    return 0 if finished or code in STOPPED else 1


if __name__ == "__main__":
    raise SystemExit(main())
