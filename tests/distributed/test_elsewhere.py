"""Runs on models, data and rewards of one's own; and what is said where they are broken."""

import csv
import re

import pytest
import torch
from elsewhere import FAMILIES
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from whole_runs import rollouts, rows

COLUMNS = (
    "step reward_mean reward_std loss kl grad_norm clip_frac ratio_max_dev_first rollout_logp_diff_max response_length "
    "tokens time_generate time_reward time_forward time_train time_sync"
).split()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_on_a_model_of_each_family(one_rank, family):
    (row,) = rows(one_rank / f"from_{family}")
    assert row["parity"] <= 1e-5 and row["ratio_max_dev_first"] <= 1e-4 and row["grad_norm"] > 0
    shown = [record for step in rollouts(one_rank / f"from_{family}") for record in step]
    counts = {len(record.get("images", [])) for record in shown}
    assert counts == ({0} if family == "qwen2" else {0, 1, 2})


def test_columns_of_the_metrics_files(one_rank):
    with open(one_rank / "from_qwen2_5_vl" / "metrics.csv", newline="") as file:
        assert next(csv.reader(file))[: len(COLUMNS)] == COLUMNS
    with open(one_rank / "base" / "eval_metrics.csv", newline="") as file:
        header = next(csv.reader(file))
    assert header[:3] == ["step", "eval_reward", "eval_reward_greedy"]
    assert {"eval_reward_count", "eval_reward_colour"} <= set(header)  # one column for each kind of question
    assert [row["step"] for row in rows(one_rank / "base", "eval_metrics.csv")] == [0, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_checkpoint_answers_in_transformers(one_rank, family):
    folder = one_rank / f"from_{family}" / "checkpoint-final"
    text = [{"role": "user", "content": "say yes"}]
    if family == "qwen2":
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        inputs = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder)
        content = [{"type": "image"}, {"type": "text", "text": "what colour is it?"}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[Image.new("RGB", (56, 56), "red")], return_tensors="pt")
    answer = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_merged_final_checkpoint_answers_in_vllm(one_rank):
    """A run that starts from it: what vLLM samples there is what the trainer scores, and its rewards are as good."""
    (row,) = rows(one_rank / "reloaded")
    assert row["rollout_logp_diff_max"] <= 1e-4 and row["parity"] <= 1e-5
    assert row["reward_mean"] > 0.15


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_image", "DataError: .*no_image.jsonl.*2.*none.png"),
        ("long_prompt", "DataError: .*rows.jsonl.*8"),
        ("save_path", "ConfigError: .*data.*the run replaces or removes files there"),
    ],
)
def test_bad_input_is_named_before_any_model_loads(one_rank, name, told):
    trace = (one_rank / name / "failed.txt").read_text()
    assert re.search(told, trace.strip().splitlines()[-1])
    assert "in _models" not in trace and "build_engine" not in trace
