"""The loop of examples/minimal_grpo.py: what it prints, and that its first step is that of the full trainer."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest
from forked import run_alone
from PIL import Image
from transformers import GenerationConfig

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"step (\d+) reward (\S+) loss (\S+) grad_norm (\S+) tokens (\S+) seconds (\S+)")
SCORE = """
def score(completions, references):
    return [float(len(text) % 3 + len(right)) for text, right in zip(completions, references)]
"""
SIZES = "--rollout_batch_size 4 --n_samples_per_prompt 4 --prompt_max_len 128 --generate_max_len 5 --seed 7".split()
# What the minimal loop does without, or has no flag for.
TRAINER = (
    "--engine_type hf --train_batch_size 16 --micro_train_batch_size 8 --micro_rollout_batch_size 8 "
    "--init_kl_coef 0 --l2 0 --lr_warmup_ratio 0 --actor_learning_rate 5e-4 --max_steps 1"
).split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with an untrained Qwen2.5-VL, rows of six questions, and a reward that tells its answers apart."""
    folder = tmp_path_factory.mktemp("minimal")
    build_tiny_checkpoint(folder / "model", "qwen2_5_vl", texts=["which colour is it? red blue green"])
    settings = GenerationConfig.from_pretrained(folder / "model")
    settings.eos_token_id = list(range(0, 300, 3))  # so that answers of an untrained model differ in length
    settings.save_pretrained(folder / "model")
    rows = []
    for number, colour in enumerate(["red", "blue", "green", "red", "blue", "green"]):
        Image.new("RGB", (56 + 28 * number, 56), colour).save(folder / f"{number}.png")
        rows.append(f'{{"prompt": "which colour is it?", "images": ["{number}.png"], "reference": "{colour}"}}\n')
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(SCORE)
    return folder


def named(inputs: Path) -> list[str]:
    return ["--pretrain", str(inputs / "model"), "--prompt_data", str(inputs / "rows.jsonl"), *SIZES]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(module, inputs: Path, capsys, steps: int, micro_batch: int) -> tuple[list[dict[str, float]], str]:
    """The lines of the steps as numbers, and the last line."""
    module.main([*named(inputs), "--max_steps", str(steps), "--micro_batch_size", str(micro_batch)])
    lines = capsys.readouterr().out.splitlines()
    names = ("step", "reward", "loss", "grad_norm", "tokens", "seconds")
    return [dict(zip(names, map(float, match.groups()))) for match in map(LINE.fullmatch, lines) if match], lines[-1]


def test_minimal_loop_prints_its_steps_and_the_first_one_is_that_of_other_micro_batches_and_of_the_full_trainer(
    inputs, capsys, tmp_path
):
    minimal = load(ROOT / "examples" / "minimal_grpo.py")
    minimal.score = load(inputs / "reward.py").score
    steps, last = printed(minimal, inputs, capsys, 3, 8)
    own = steps[0]
    assert [step["step"] for step in steps] == [1, 2, 3] and len({step["loss"] for step in steps}) == 3
    assert all(step["grad_norm"] > 0 and 1 < step["tokens"] < 5 for step in steps)
    end = steps[-1]["reward"]
    assert last == f"mean reward of the first 1 steps {own['reward']:.3f}, of the last {end:.3f}"
    (cut,), _ = printed(minimal, inputs, capsys, 1, 3)
    for name in ("reward", "loss", "grad_norm"):
        assert cut[name] == pytest.approx(own[name], rel=1e-4, abs=1e-7)

    script, reward = ROOT / "examples" / "train_grpo_vl.py", f"{inputs / 'reward.py'}:score"
    run_alone(script, *named(inputs), *TRAINER, "--reward_fn", reward, "--output_dir", tmp_path, limit=300)
    with open(tmp_path / "metrics.csv", newline="") as file:
        (trainers,) = csv.DictReader(file)
    assert own["grad_norm"] > 0.01 and abs(own["loss"]) > 1e-3
    assert float(trainers["reward_mean"]) == pytest.approx(own["reward"], abs=1e-4)
    assert float(trainers["response_length"]) == pytest.approx(own["tokens"], abs=1e-2)
    assert float(trainers["loss"]) == pytest.approx(own["loss"], rel=1e-4, abs=1e-7)
    assert float(trainers["grad_norm"]) == pytest.approx(own["grad_norm"], rel=1e-4)
