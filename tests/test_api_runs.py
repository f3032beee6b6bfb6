"""Whole runs from Python, several in one process; notebooks: tests/examples; two ranks: trainer/vl/test_sft_runs.py."""

import os
import subprocess
import sys
from pathlib import Path

from forked import run_alone

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]

# One program, as users write it: loaded models, images in rows, a Dataset, a hook, errors that are raised.
PROGRAM = """
import gc, json, logging, os, random, sys, warnings
from pathlib import Path

import datasets
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft_visual import GRPOTrainer, StepHook, StopRun, evaluate, sample
from lightrft_visual.errors import RewardError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

out = Path(sys.argv[-1])
folder = build_tiny_checkpoint(out / "tiny", "qwen2_5_vl")
model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
rows = [
    {"prompt": "how many?", "images": [Image.new("RGB", (56, 56), (40 * index, 0, 0))], "reference": str(index)}
    for index in range(4)
]
small = dict(
    engine_type="hf", rollout_batch_size=4, n_samples_per_prompt=2, train_batch_size=8, prompt_max_len=128,
    generate_max_len=4, max_steps=2, init_kl_coef=0.0, image_dependence_every=0,
)

def trainer(name, rewards, data, **more):
    return GRPOTrainer((model, processor), rewards, data, rows[:2], output_dir=out / name, **small | more)

def fit(*given, **more):
    return trainer(*given, **more).fit()

steps = []
class Counting(StepHook):
    def on_metrics(self, metrics):
        steps.append(metrics["reward_mean"])

length = lambda completions: [float(len(each)) for each in completions]
result = fit("list", length, rows, callbacks=[Counting()], save_steps=1)
assert [each["step"] for each in result.history] == [1, 2] and len(steps) == 2, result.history
assert result.evaluations[-1]["step"] == 2 and result.metrics["eval_reward"] == result.evaluations[-1]["eval_reward"]
assert result.report.is_file() and (result.checkpoint / "config.json").is_file()
assert not list((Path(os.environ["LIGHTRFT_CACHE"]) / "given").glob("*")), "the loaded model's folder stays"

whole = fit("list", length, rows, max_steps=3, save_steps=1, eval_steps=2, resume_from="auto")
assert [each["step"] for each in whole.history] == [1, 2, 3] and whole.history[:2] == result.history, whole.history
assert whole.evaluations[:-1] == result.evaluations and whole.evaluations[-1]["step"] == 3, whole.evaluations
done = trainer("list", length, rows, max_steps=3, resume_from="auto")
again = done.fit()
assert (again.metrics, again.history) == (whole.metrics, whole.history), again.metrics
assert again.evaluations == whole.evaluations

calls = []
def broken(completions):
    calls.append(len(completions))
    if len(calls) > 2:  # not when it is asked once before the models are loaded
        raise KeyError("mine")
    return [0.0] * len(completions)

try:
    fit("broken", broken, rows)
except RewardError as error:
    assert "KeyError: 'mine'" in str(error)
    sys.last_exc = error  # as notebooks keep it
else:
    raise AssertionError("nothing was raised")

class Enough(StepHook):
    def on_metrics(self, metrics):
        raise StopRun("enough")

table = datasets.Dataset.from_list([{"prompt": "what?", "reference": "1"}] * 4)
stopped = trainer(
    "dataset", length, table, callbacks=[Enough()], eval_steps=2, init_kl_coef=0.01, actor_learning_rate=0.01,
    lr_warmup_ratio=0.0,
)
result = stopped.fit()
assert result.metrics["step"] == 1 and result.checkpoint.name == "checkpoint-000001", result.checkpoint
assert "eval_reward" in stopped.evaluate()  # of trained weights, beside a reference that is the base

final = out / "list" / "checkpoint-final"
measured = evaluate(final, rows[:2], "exact", eval_samples_per_prompt=1)
assert set(measured) >= {"eval_reward", "eval_reward_greedy"}, measured
again = evaluate(out / "list" / "checkpoint-000002", rows[:2], "exact", base=(model, processor))
assert again["eval_reward_greedy"] == measured["eval_reward_greedy"], (measured, again)
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("the program's own", FutureWarning)
assert caught and not logging.root.handlers and "TRANSFORMERS_VERBOSITY" not in os.environ, "runs leave traces"
assert not torch.distributed.is_initialized() and "RANK" not in os.environ, "a group of one stays"
drawn = random.getstate()
answers = sample(final, rows[:2], n=3, temperature=0.5)
assert random.getstate() == drawn, "the program's own numbers begin anew"
assert [len(each) for each in answers] == [3, 3] and isinstance(answers[0][0], str)
assert sample(final, rows[:1], temperature=0) == sample(final, rows[:1], temperature=0)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
assert sample(final, rows[:1], temperature=0)[0][0] and torch.distributed.is_initialized()
torch.distributed.destroy_process_group()

kept = Counting()
fit("engine", ["exact"], table, engine_type="vllm", max_steps=1, callbacks=[kept])
assert kept.context.step() == 1 and kept.context.config.rollout.engine_type == "vllm"
own = set(map(id, model.modules()))
modules = [each for each in gc.get_objects() if isinstance(each, torch.nn.Module) and id(each) not in own]
left = sorted({type(each).__name__ for each in modules if next(each.parameters(), None) is not None})
assert not left and sys.last_exc.__traceback__, f"models stay in memory: {left}"
assert not torch.distributed.is_initialized() and "MASTER_PORT" not in os.environ, "a group of one stays"
print("all well")
"""


def test_program_trains_is_told_of_errors_and_goes_on(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    own = {"PYTHONPATH": str(ROOT), "LIGHTRFT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    assert run_alone(program, tmp_path, limit=600, **own).splitlines()[-1] == "all well"


def test_a_command_says_at_most_12_lines_before_its_first_step_and_a_summary_at_last(tmp_path):
    build_tiny_checkpoint(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "what?", "reference": "1"}\n' * 4)
    files = "--pretrain model --prompt_data rows.jsonl --eval_data rows.jsonl --output_dir out --engine_type hf"
    sizes = "--rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 --generate_max_len 4 --max_steps 1"
    words = f"-m lightrft_visual train grpo {files} {sizes} --reward.components.exact 1.0".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, *words], subprocess.PIPE
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.STDOUT, timeout=300)
    lines = done.stdout.decode().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/1"))
    assert first <= 12 and lines[-1].startswith("done: 1 steps in"), lines
