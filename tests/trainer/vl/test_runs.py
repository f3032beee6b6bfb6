"""Whole runs on prompts with a video, an mp4 file, with default flags; and runs whose reward scores nothing."""

import base64
import io
import json
import re
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from whole_runs import rollouts, rows, run_plan

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

COLOURS = {"red": (230, 20, 20), "blue": (20, 20, 230)}
SIZE = (
    "--rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 4 --train_batch_size 8 "
    "--micro_train_batch_size 4 --generate_max_len 8 --max_steps 2"
)
SCORE = """
def score(completions, frames, videos, references):
    seen = []
    for shown, clips, colour in zip(frames, videos, references):
        (clip,) = clips
        assert [frame.size for frame in shown] == [(64, 64)] * 4, shown
        assert clip.shape == (4, 64, 64, 3) and clip.dtype == "uint8", clip
        red, _, blue = shown[-1].resize((1, 1)).getpixel((0, 0))
        seen.append("red" if red > blue else "blue")
    assert seen == references
    return [len(text) % 3 for text in completions]

def nothing(completions):
    return [None] * len(completions)
"""
NOTHING = "--reward_fn {folder}/score.py:nothing --reward_max_invalid 1 --max_eval_samples 0 --engine_type hf"
ESTIMATORS = {"grpo": "group_norm", "ppo": "gae"}


def write_clip(path: Path, colour: tuple[int, int, int]) -> None:
    """Two seconds at 8 frames a second, of which the default takes four frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 64, "yuv420p", 4_000_000
        for _ in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), colour, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def colour_of(image: Image.Image) -> str:
    red, _, blue = image.convert("RGB").resize((1, 1)).getpixel((0, 0))
    return "red" if red > blue else "blue"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    model = build_tiny_checkpoint(folder / "model", "qwen2_5_vl")
    for name, colour in COLOURS.items():
        write_clip(folder / f"{name}.mp4", colour)
    data, asked = folder / "clips.jsonl", "<video>what colour is it?"
    lines = (json.dumps({"prompt": asked, "videos": [f"{name}.mp4"], "reference": name}) for name in COLOURS)
    data.write_text("\n".join(lines))
    (folder / "score.py").write_text(SCORE)
    given = f"{SIZE} --pretrain {model} --prompt_data {data} --eval_data {data} --reward_fn {folder}/score.py:score"
    runs = {"vllm": f"{given} --engine_type vllm"}
    for name, estimator in ESTIMATORS.items():
        runs[name] = f"{given} {NOTHING.format(folder=folder)} --advantage_estimator {estimator}"
    return run_plan({name: flags.split() for name, flags in runs.items()}, folder, cache_root)


def test_a_run_on_mp4_files_scores_records_and_shows_them(folder):
    run = folder / "vllm"
    assert len(rows(run)) == 2 and all(row["reward_invalid_share"] == 0 for row in rows(run))
    assert len(rows(run, "eval_metrics.csv")) >= 2
    evaluated = [json.loads(line) for line in (run / "rollouts" / "eval_step_000000.jsonl").open()]
    for record in [*sum(rollouts(run), []), *evaluated]:
        (name,) = record["videos"]
        strip = Image.open(run / "rollouts" / name)
        assert strip.width > 3 * strip.height  # four square frames side by side
        assert colour_of(strip) == record["reference"]
    page = (run / "report.html").read_text()
    found = re.findall(r"data:image/\w+;base64,([\w+/=]+)", page)
    shown = [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]
    assert {colour_of(image) for image in shown if image.width > 3 * image.height} == set(COLOURS)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_of_invalid_samples_alone_ends_the_run_whatever_share_is_allowed(folder, name):
    failed = (folder / name / "failed.txt").read_text()
    assert "RewardError: step 1: 100% of the samples are invalid" in failed
    assert not (folder / name / "metrics.csv").exists() and not (folder / name / "checkpoint-final").exists()
