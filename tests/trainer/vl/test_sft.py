"""What supervised training counts of a response."""

import pytest
import torch

from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.data.rows import parse_row
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.trainer.vl.sft import ResponseEncoder

OPENED = (
    "{% for m in messages %}{{ m.role }}: {{ '\n</think>' if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "qwen2"
    build_tiny_checkpoint(folder, "qwen2")
    return open_checkpoint(str(folder), ModelConfig(), DataConfig())


def trained_text(checkpoint):
    """Of a question with the answer "42"."""
    config = SFTRunConfig()
    encoder = ResponseEncoder(checkpoint, config)
    row = parse_row({"prompt": "how many?", "response": "42"}, config.data, source="rows", root=None)
    experience = encoder.experience(encoder.batch([row], torch.arange(1)))
    count = int(experience.action_mask.sum())
    return checkpoint.tokenizer.decode(experience.sequences[0, -count:])


def test_what_the_template_writes_of_an_answer_is_trained_with_its_end_token_and_no_newline(checkpoint):
    assert trained_text(checkpoint) == "42<|im_end|>"
    checkpoint.tokenizer.chat_template = OPENED
    assert trained_text(checkpoint) == "\n</think>42<|im_end|>"


def test_the_end_token_is_the_checkpoints_where_its_tokenizer_has_none(checkpoint):
    checkpoint.tokenizer.eos_token = None
    assert checkpoint.tokenizer.eos_token_id is None
    assert trained_text(checkpoint) == "42<|im_end|>"
    checkpoint.tokenizer.chat_template = OPENED.replace("<|im_end|>", "")
    assert trained_text(checkpoint) == "\n</think>42<|im_end|>"
