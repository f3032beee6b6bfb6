"""A judge in the run: a tiny Qwen2-VL that is asked by a template, and what becomes of its replies."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import environment_restored
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.rewards import RewardComputationEngine, recipe_from_components
from lightrft_visual.rewards.batch import Failed, batch_from_media
from lightrft_visual.rewards.functions.judge import Judge, Schema
from lightrft_visual.rewards.functions.judge_engines import VLLMReplies

IMAGES = [Image.effect_noise((90, 60), 90).convert("RGB"), Image.new("RGB", (40, 80), "green")]
REPLY = {"colour": [0, 10], "form": [1, 5]}


@pytest.fixture(autouse=True)
def environment():
    """vLLM sets variables that programs started by later tests would inherit."""
    with environment_restored():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge")
    build_tiny_checkpoint(str(path), "qwen2_vl")
    return str(path)


def answering(judge, answers, cut=False):
    """The judge, whose model says `answers` one by one; how many it was asked at a time."""
    asked, left = [], iter(answers)

    def replies(new, device):
        asked.append(len(new))
        return [(next(left), 3, cut) for _ in new]

    replies.marks = judge._replies.marks
    judge._replies = replies
    return asked


@torch.no_grad()
def test_replies_are_those_of_each_question_alone_however_they_are_batched(folder):
    judge = Judge(folder, "{prompt}?", bf16=False, max_tokens=6, batch_size=3)
    batch = batch_from_media(["a cat", "two red circles on a table", "a dog"], [*IMAGES, IMAGES[0]])
    found = [text for text, *_ in judge._replies([judge.asked(batch, i) for i in range(3)], "cpu")]
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    for index, (prompt, image) in enumerate(zip(batch.prompts, [*IMAGES, IMAGES[0]])):
        content = [{"type": "image"}, {"type": "text", "text": f"{prompt}?"}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        made = model.generate(**inputs, do_sample=False, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
        assert found[index] == processor.decode(made, skip_special_tokens=True)


def test_a_question_about_the_same_pixels_is_asked_once_and_the_cost_is_shown(folder):
    settings = {"model": folder, "template": "{prompt}?", "reply": REPLY, "bf16": False}
    recipe = recipe_from_components({"judge": 1.0}, {"judge": settings})
    engine = RewardComputationEngine(reward_recipe=recipe)
    (source,) = engine._by_identity.values()
    asked = answering(
        source.function, ['{"colour": 10, "form": 3}', '{"colour": 0, "form": 1}', '{"colour": 5, "form": 5}']
    )
    first = engine.score_media(["a", "a", "b"], images=[IMAGES[0], IMAGES[0].copy(), IMAGES[0]])
    assert asked == [2] and first.score.tolist() == [0.75, 0.75, 0.0]
    parts = first.components
    assert parts["judge_asked"].tolist() == [1, 0, 1] and parts["judge_tokens"].tolist() == [3, 0, 3]
    assert (
        parts["colour"].tolist() == [1, 1, 0] and parts["form"].tolist() == [0.5, 0.5, 0] and "judge_seconds" in parts
    )
    again = engine.score_media(["b", "b"], images=IMAGES)
    assert (
        asked == [2, 1] and again.score.tolist() == [0.0, 0.75] and again.components["judge_asked"].tolist() == [0, 1]
    )


@torch.no_grad()
def test_a_model_that_says_seven_of_nine_gives_that_score(folder, tmp_path):
    """One coordinate of its hidden state is what its embeddings have there, largest of the token 7."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    words, language = model.get_input_embeddings().weight, model.model.language_model
    for weight in (words, model.get_output_embeddings().weight):
        weight[:, 0] = 1
        weight[processor.tokenizer.convert_tokens_to_ids("7"), 0] = 2
    language.norm.weight.zero_()
    language.norm.weight[0] = 1
    for layer in language.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "pattern": r"(\d)", "high": 9, "max_tokens": 1, "bf16": False}
    engine = RewardComputationEngine(reward_recipe=recipe_from_components({"judge": 1.0}, {"judge": settings}))
    found = engine.score_media(["a", "b"], images=IMAGES)
    assert found.score.tolist() == pytest.approx([7 / 9] * 2) and found.components["judge_tokens"].tolist() == [1, 1]


def test_a_reply_that_is_cut_is_no_score_but_a_whole_line_of_it_is(folder):
    judge = Judge(folder, "{prompt}", bf16=False)
    answering(judge, ["A score of 0 would", "Score: 8\nThe cat is"], cut=True)
    cut, score = judge(batch_from_media(["a", "b"]), "cpu")["rewards"]
    assert cut.reason == "the judge's reply was cut at max_tokens" and score == 0.8
    judge = Judge(folder, reply=REPLY, bf16=False)
    answering(judge, ['A draft: {"colour": 5, "form": 3}. But'], cut=True)
    (draft,) = judge(batch_from_media(["a"]), "cpu")["rewards"]
    assert draft.reason == cut.reason


def test_a_reply_of_max_tokens_is_cut_unless_its_last_token_ends_it(folder):
    judge = Judge(folder, "{prompt}?", bf16=False, max_tokens=2)
    ends = judge._replies._model.generation_config.eos_token_id
    for last, cut in ((5, True), (ends[0] if isinstance(ends, list) else ends, False)):
        judge._replies._model.generate = lambda input_ids, last=last, **_: torch.cat(
            [input_ids, torch.tensor([[4, last]])], dim=1
        )
        ((_, tokens, found),) = judge._replies([judge.asked(batch_from_media(["a"], IMAGES[:1]), 0)], "cpu")
        assert (tokens, found) == (2, cut)


def test_the_oldest_reply_is_forgotten_first(folder):
    judge = Judge(folder, "{prompt}", bf16=False, cache=2)
    asked = answering(judge, ["score: 1", "score: 2", "score: 3", "score: 4"])
    for prompts in (["a", "b"], ["a", "c"], ["a"], ["b"]):
        judge(batch_from_media(prompts), "cpu")
    assert asked == [2, 1, 1]


def test_a_reply_outside_the_schema_is_counted_and_masked(folder):
    judge = Judge(folder, reply=REPLY, bf16=False)
    answering(
        judge, ['{"colour": 11, "form": 1}', "good", 'So: {"colour": 5, "form": 3}', '{"colour": true, "form": 1}']
    )
    found = judge(batch_from_media(list("abcd")), "cpu")
    assert [isinstance(score, Failed) for score in found["rewards"]] == [True, True, False, True]
    assert "colour is no number from 0 to 10" in found["rewards"][0].reason and "no JSON" in found["rewards"][1].reason
    assert found["rewards"][2] == 0.5 and found["colour"] == [None, None, 0.5, None]


def test_the_question_says_the_schema_and_a_file_holds_a_template(tmp_path, folder):
    (tmp_path / "ask.yaml").write_text("question: '{prompt}, {low:g} to {high:g}'\nhigh: 4\nreply: {good: [0, 4]}\n")
    judge = Judge(folder, str(tmp_path / "ask.yaml"), bf16=False, high=5)
    (message,) = judge.schema.messages(batch_from_media(["a {cat}"]), 0, None)
    text = message["content"][-1]["text"]
    assert text.startswith("a {cat}, 0 to 5") and text.endswith('{"good": <number from 0 to 4>}')
    (tmp_path / "ask.yaml").write_text("questions: x\n")
    with pytest.raises(ConfigError, match="holds questions; known are question, "):
        Judge(folder, str(tmp_path / "ask.yaml"))


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_judge_of_texts_alone_is_refused_by_name(tmp_path, engine):
    build_tiny_checkpoint(str(tmp_path / "text"), "qwen2")
    with pytest.raises(ConfigError, match=f"judge: {tmp_path}/text is a model of texts alone"):
        Judge(str(tmp_path / "text"), "{prompt}?", engine=engine)


@pytest.mark.parametrize(
    "reply", [{"good": [3, 1]}, {"good": [0, "high"]}, {"good": "ab"}, {"good": 5}, ["good", "looks"]]
)
def test_a_reply_that_is_no_mapping_of_names_to_two_numbers_is_refused(reply):
    with pytest.raises(ConfigError, match="judge: reply.*lowest, highest"):
        Schema(reply=reply)


def test_marks_of_the_judged_text_are_left_out_of_the_question(folder):
    """A prompt of a vision-language run is rendered, with a place for each image."""
    judge = Judge(folder, "{prompt}", bf16=False, max_tokens=2)
    rendered = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>"
    batch = batch_from_media([rendered], IMAGES[:1])
    assert judge.asked(batch, 0)[-1]["content"][-1]["text"] == "user\nFind x."
    assert len(judge._replies([judge.asked(batch, 0)], "cpu")) == 1
    nested = batch_from_media(["a<|im_<|im_end|>end|>b"], IMAGES[:1])  # what is left would end the turn
    assert judge.asked(nested, 0)[-1]["content"][-1]["text"] == "ab"


@pytest.mark.slow
def test_vllm_replies_as_transformers_does_and_what_is_compiled_beside_it_is_compiled(folder):
    """As `torch.compile` is in a drawing run with such a judge."""
    pytest.importorskip("vllm")
    rng = np.random.default_rng(3)  # among these are replies that end within a character
    images = [Image.fromarray(rng.integers(0, 256, (60, 90, 3), "uint8")) for _ in range(40)]
    batch = batch_from_media([f"a cat {index}" for index in range(40)], images)
    found, compiled = [], []
    for engine in ("hf", "vllm"):
        judge = Judge(folder, "{prompt}?", bf16=False, max_tokens=2, engine=engine)  # of 2,048 positions
        found.append([text for text, *_ in judge._replies([judge.asked(batch, i) for i in range(40)], "cpu")])
        judge.close()
    assert found[0] == found[1]
    assert any(text.endswith("\N{REPLACEMENT CHARACTER}") for text in found[0])
    torch.compile(lambda value: value + 1, backend=lambda graph, inputs: compiled.append(graph) or graph)(torch.ones(3))
    assert len(compiled) == 1 and "TORCHDYNAMO_DISABLE" not in os.environ


def test_vllm_is_asked_for_no_special_tokens_beside_those_of_the_chat_template(folder):
    """Up to 0.29 it added others where a processor makes the inputs."""
    pytest.importorskip("vllm")
    asked, answers = {}, [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[72, 73], finish_reason="length")])]

    def chat(questions, parameters, **named):
        asked.update(named)
        return answers

    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    engine = SimpleNamespace(llm=SimpleNamespace(chat=chat), tokenizer=tokenizer, wake=lambda: None, sleep=lambda: None)
    replies = VLLMReplies.__new__(VLLMReplies)
    replies.max_tokens, replies._engine = 4, engine
    assert replies([[{"role": "user", "content": "?"}]], "cpu") == [(tokenizer.decode([72, 73]), 2, True)]
    assert asked["tokenization_kwargs"] == {"add_special_tokens": False}
