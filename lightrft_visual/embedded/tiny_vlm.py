"""Tiny but real checkpoints, built on the spot: real architectures, tokenizer, processor and chat template.

They load through the same code as hub checkpoints. About 0.5 M parameters; head_dim 32 is the smallest that vLLM's CPU
attention takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from ..strategy.seeding import seed_everything

QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VISION_FAMILIES = (*QWEN_FAMILIES, "internvl")
FAMILIES = (*VISION_FAMILIES, "qwen2")

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

_QWEN_MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_INTERNVL_MEDIA = {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
INTERNVL_TILE, INTERNVL_PATCH = 56, 14  # pixels; a tile takes (56 / 14 / 2) ** 2 = 4 tokens

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}IMAGE_PLACEHOLDER"
    "{% elif part['type'] == 'video' %}VIDEO_PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_template(family: str) -> str:
    """ChatML with the placeholders of a family."""
    media = _INTERNVL_MEDIA if family == "internvl" else _QWEN_MEDIA
    return _CHAT_TEMPLATE.replace("IMAGE_PLACEHOLDER", media["image"]).replace("VIDEO_PLACEHOLDER", media["video"])


CHAT_TEMPLATE = chat_template("qwen2_5_vl")


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512, family: str = "qwen2_5_vl") -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer of the Qwen2 class trained on `texts`; every string round-trips."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) if not isinstance(merge, str) else tuple(merge.split(" ", 1)) for merge in model["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **(
            {"extra_special_tokens": _INTERNVL_TOKENS}
            if family == "internvl"
            else {"additional_special_tokens": list(SPECIAL_TOKENS)}
        ),
    )
    if family == "internvl":  # one of the two arguments only
        tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    tokenizer.chat_template = chat_template(family)
    return tokenizer


def build_processor(family: str, tokenizer: Qwen2Tokenizer, max_pixels: int = 448 * 448):
    """The family's own processor around `tokenizer`; images are resized to multiples of the merged patch, or cut into
    tiles."""
    if family == "internvl":
        return _internvl_processor(tokenizer)
    patch_size = 16 if family == "qwen3_vl" else 14
    unit = (2 * patch_size) ** 2
    size = {"shortest_edge": unit, "longest_edge": max_pixels}
    shared = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    image_processor = Qwen2VLImageProcessor(**shared)
    video_class = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    video_processor = video_class(**shared)
    processor_class = {
        "qwen2_vl": Qwen2VLProcessor,
        "qwen2_5_vl": Qwen2_5_VLProcessor,
        "qwen3_vl": Qwen3VLProcessor,
    }[family]
    return processor_class(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=video_processor,
        chat_template=CHAT_TEMPLATE,
    )


def _internvl_processor(tokenizer: Qwen2Tokenizer) -> InternVLProcessor:
    size = {"height": INTERNVL_TILE, "width": INTERNVL_TILE}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=(INTERNVL_TILE // INTERNVL_PATCH // 2) ** 2,
        chat_template=chat_template("internvl"),
    )


def _text_config(vocab_size: int, hidden: int, layers: int) -> dict:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }


def tiny_config(family: str, tokenizer: Qwen2Tokenizer, *, tie_embeddings: bool, hidden: int = 128, layers: int = 2):
    """The configuration object of a tiny model of `family` for the vocabulary of `tokenizer`."""
    token_id = tokenizer.convert_tokens_to_ids
    vocab_size = -(-len(tokenizer) // 64) * 64
    text = _text_config(vocab_size, hidden, layers)
    ends = {"bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>")}
    if family == "qwen2":
        return Qwen2Config(**text, **ends, tie_word_embeddings=tie_embeddings)
    if family == "internvl":
        vision = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [INTERNVL_TILE, INTERNVL_TILE],
            "patch_size": [INTERNVL_PATCH, INTERNVL_PATCH],
        }
        return InternVLConfig(
            vision_config=vision,
            text_config=text | ends | {"model_type": "qwen2"},
            image_token_id=token_id("<IMG_CONTEXT>"),
            image_seq_length=(INTERNVL_TILE // INTERNVL_PATCH // 2) ** 2,
            tie_word_embeddings=tie_embeddings,
        )
    mrope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    shared = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": tie_embeddings,
    }
    text |= ends
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 64, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text | {"rope_parameters": mrope}, vision_config=vision, **shared)
    if family == "qwen2_5_vl":
        vision = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        }
        return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": mrope}, vision_config=vision, **shared)
    if family == "qwen3_vl":
        vision = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }
        text |= {"head_dim": 32, "rope_parameters": mrope | {"mrope_interleaved": True}}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **shared)
    raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")


def build_tiny_model(config) -> PreTrainedModel:
    """A randomly initialised float32 model of the class that the Auto classes map `config` to."""
    auto = AutoModelForCausalLM if config.model_type == "qwen2" else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [_eos_of(config)]
    model.generation_config.do_sample = True
    return model


def _eos_of(config) -> int:
    return config.get_text_config().eos_token_id


def build_tiny_checkpoint(
    folder: Path,
    family: str = "qwen2_5_vl",
    *,
    texts: Iterable[str],
    tie_embeddings: bool = False,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
) -> Path:
    """Write an untrained tiny checkpoint (config, weights, tokenizer, processor, chat template) into `folder`."""
    seed_everything(seed)
    tokenizer = build_tokenizer(texts, family=family)
    config = tiny_config(family, tokenizer, tie_embeddings=tie_embeddings, hidden=hidden, layers=layers)
    build_tiny_model(config).save_pretrained(folder)
    if family in VISION_FAMILIES:
        build_processor(family, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
