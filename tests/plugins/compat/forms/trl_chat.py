"""TRL: conversational completions, read by a helper of the file."""

import re


def text_of(completion):
    return completion[0]["content"]


def format_reward(completions, **kwargs):
    return [1.0 if re.fullmatch(r"<answer>.*</answer>", text_of(completion)) else 0.0 for completion in completions]


def question_in_answer(prompts, completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    questions = [prompt[-1]["content"] for prompt in prompts]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(question in content) for question, content in zip(questions, contents)]


async def later(completions, **kwargs):
    return [float(len(completion[-1]["content"])) for completion in completions]
