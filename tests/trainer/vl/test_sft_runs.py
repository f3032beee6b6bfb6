"""Supervised runs: what is in the loss, packing, ranks, resume, learning, and the model in a run with rewards."""

import json
import os

from forked import run_on_ranks, run_together

PROGRAM = """
import json, os, sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft_visual import GRPOTrainer, SFTTrainer, sample
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.families import family_of

out = Path(sys.argv[-1])
folder = out / "tiny"
rows = [
    {"prompt": "how many?", "images": [Image.new("RGB", (28 * (1 + index % 3), 56), (40 * index, 0, 0))],
     "response": "it is " + "so " * (index % 4) + str(index)}
    for index in range(7)
] + [{"prompt": "and without?", "reference": "none"}]
small = dict(
    train_batch_size=4, micro_train_batch_size=2, prompt_max_len=128, generate_max_len=32, max_steps=4,
    actor_learning_rate=1e-3, seed=3,
)

def fit(name, data=rows, held_out=rows[:3], **more):
    return SFTTrainer(str(folder), data, held_out, output_dir=out / name, **small | more).fit()

def losses(result):
    return [each["loss"] for each in result.history]

if os.environ.get("WORLD_SIZE", "1") == "2":
    both = fit("two")
    later = fit("two_later", resume_from=str(out / "whole" / "checkpoint-000002"))
    print(json.dumps([losses(both), both.metrics["eval_loss"], losses(later)]))
    raise SystemExit(0)

build_tiny_checkpoint(folder, "qwen2_5_vl")
whole = fit("whole", save_steps=2)
print(json.dumps([losses(whole), whole.metrics["eval_loss"]]))

# Transformers' own logits give the loss of the first step; the prompt is not in it.
model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
banned = family_of(model.config).banned_ids(processor.tokenizer)
one = fit("one", rows[:4], None, max_steps=1)
found, count = 0.0, 0
for row in rows[:4]:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = processor.tokenizer(row["response"] + processor.tokenizer.eos_token, add_special_tokens=False).input_ids
    inputs = processor(text=[prompt + row["response"] + processor.tokenizer.eos_token], images=row["images"],
                       return_tensors="pt")
    logits = model(**inputs).logits[0, -len(answer) - 1 : -1]
    logits[:, banned] = -torch.inf
    found -= logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).sum().item()
    count += len(answer)
assert inputs["input_ids"][0, -len(answer):].tolist() == answer
assert abs(one.history[0]["loss"] - found / count) < 1e-5, (one.history, found / count)
assert abs(one.history[0]["response_length"] - count / 4) < 1e-6

packed = fit("packed", packing_samples=True, max_tokens_per_batch=256, prompt_max_len=1024)
assert all(abs(a - b) < 1e-5 for a, b in zip(losses(whole), losses(packed))), (losses(whole), losses(packed))

resumed = fit("resumed", resume_from=str(out / "whole" / "checkpoint-000002"))
assert losses(resumed) == losses(whole)[2:], (losses(resumed), losses(whole))

quick = dict(train_batch_size=2, max_steps=25, actor_learning_rate=4e-3, lr_scheduler="constant_with_warmup")
trained = fit("learns", rows[-2:], None, **quick)
assert trained.metrics["loss"] < 0.3 * trained.history[0]["loss"], trained.metrics
answers = sample(trained.checkpoint, rows[-1:], temperature=0, generate_max_len=8, engine_type="hf")
assert answers == [["none"]], answers

adapted = fit("lora", held_out=None, lora_rank=4, max_steps=1)
assert (adapted.checkpoint / "lora" / "adapter_config.json").is_file()

after = GRPOTrainer(
    trained.checkpoint, lambda completions: [float(len(each)) for each in completions], rows, engine_type="hf",
    rollout_batch_size=4, n_samples_per_prompt=2, train_batch_size=8, prompt_max_len=128, generate_max_len=4,
    max_steps=1, init_kl_coef=0.0, image_dependence_every=0, output_dir=out / "after",
).fit()
assert after.metrics["step"] == 1

for data, told in (
    ([{"prompt": "what?"}], "row 0: the row has no response"),
    ([{"prompt": "what?", "response": "x " * 40}], "above generate_max_len = 32"),
    ([{"prompt": "what?", "response": "<|image_pad|>"}], "which stands for an image or video"),
):
    try:
        fit("refused", data, None)
    except DataError as error:
        assert told in str(error), error
    else:
        raise AssertionError(told)
try:
    fit("refused", packing_samples=True, max_tokens_per_batch=8)
except ConfigError as error:
    assert "the longest row of the data has" in str(error), error
else:
    raise AssertionError("no room for a row")
print("all well")
"""


def test_supervised_runs_count_responses_alone_and_go_on_exactly(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"LIGHTRFT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    said = run_together(program, [str(tmp_path)], [environment], 600)
    assert "all well" in said.splitlines()
    both = run_on_ranks(program, [str(tmp_path)], environment, 2, 600)
    one, two, other = (json.loads(line) for line in f"{said}\n{both}".splitlines() if line.startswith("[["))
    assert two == other  # each rank is given one result
    assert max(abs(a - b) for a, b in zip(one[0], two[0])) < 1e-5
    assert abs(one[1] - two[1]) < 1e-5
    assert max(abs(a - b) for a, b in zip(one[0][2:], two[2], strict=True)) < 1e-5  # resumed by two ranks
