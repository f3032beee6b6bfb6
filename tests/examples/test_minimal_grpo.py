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


@pytest.fixture
def minimal(inputs):
    """The example with the reward of the fixture."""
    module = load(ROOT / "examples" / "minimal_grpo.py")
    module.score = load(inputs / "reward.py").score
    return module


def printed(module, flags: list[str], capsys) -> tuple[list[dict[str, float]], str]:
    """The lines of the steps as numbers, and the last line."""
    module.main(flags)
    lines = capsys.readouterr().out.splitlines()
    names = ("step", "reward", "loss", "grad_norm", "tokens", "seconds")
    steps = [dict(zip(names, map(float, match.groups()))) for match in map(LINE.fullmatch, lines) if match]
    return steps, lines[-1]


def test_minimal_loop_prints_a_line_a_step_and_the_rewards_of_both_ends(minimal, inputs, capsys):
    steps, last = printed(minimal, [*named(inputs), "--max_steps", "3", "--micro_batch_size", "8"], capsys)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["grad_norm"] > 0 and 1 < step["tokens"] < 5 for step in steps)
    assert len({step["loss"] for step in steps}) == 3
    first, end = steps[0]["reward"], steps[-1]["reward"]
    assert last == f"mean reward of the first 1 steps {first:.3f}, of the last {end:.3f}"


def test_first_step_does_not_depend_on_the_micro_batches(minimal, inputs, capsys):
    whole, cut = (
        printed(minimal, [*named(inputs), "--max_steps", "1", "--micro_batch_size", size], capsys)[0][0]
        for size in ("16", "3")
    )
    for name in ("reward", "loss", "grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7)


def test_first_step_is_that_of_the_full_trainer(minimal, inputs, capsys, tmp_path):
    (own,), _ = printed(minimal, [*named(inputs), "--max_steps", "1", "--micro_batch_size", "8"], capsys)
    script, reward = ROOT / "examples" / "train_grpo_vl.py", f"{inputs / 'reward.py'}:score"
    run_alone(script, *named(inputs), *TRAINER, "--reward_fn", reward, "--output_dir", tmp_path, limit=300)
    with open(tmp_path / "metrics.csv", newline="") as file:
        (trainers,) = csv.DictReader(file)
    assert own["grad_norm"] > 0.01 and abs(own["loss"]) > 1e-3
    assert float(trainers["reward_mean"]) == pytest.approx(own["reward"], abs=1e-4)
    assert float(trainers["response_length"]) == pytest.approx(own["tokens"], abs=1e-2)
    assert float(trainers["loss"]) == pytest.approx(own["loss"], rel=1e-4, abs=1e-7)
    assert float(trainers["grad_norm"]) == pytest.approx(own["grad_norm"], rel=1e-4)
