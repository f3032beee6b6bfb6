"""A tiny sequence classifier as a reward model, over letters."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 :."]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_classifier(folder: Path) -> str:
    """The folder, with the model in it."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        num_labels=1,
        max_position_embeddings=40,
        pad_token_id=0,
        **size,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return str(folder)
