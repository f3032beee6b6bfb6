"""Tiny models of families without an adapter, of transformers' own classes, with tokenizer and processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers.models.smolvlm.processing_smolvlm as smolvlm
from tiny_models import perturb
from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
    VipLlavaConfig,
)

from lightrft_visual.models.tiny.vlm import (
    _MROPE,
    _TOWER,
    _qwen_shared,
    build_processor,
    build_tiny_model,
    build_tokenizer,
)

IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Stock:
    """A model, and what makes its inputs."""

    model: PreTrainedModel
    processor: ProcessorMixin
    tokenizer: Qwen2Tokenizer


def _text(tokenizer: Qwen2Tokenizer, **more) -> dict:
    return {
        "vocab_size": len(tokenizer) + 3, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
    } | more  # fmt: skip


def _vision(kind: str, size: int, patch: int) -> dict:
    return {
        "model_type": kind, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": size, "patch_size": patch,
    }  # fmt: skip


def _plain_tokenizer(image: str, **named: str) -> Qwen2Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([image, *named.values()], special_tokens=True)
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("IMAGE", image)
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def _qwen3_vl_moe():
    tokenizer = build_tokenizer()
    own = {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = _text(
        tokenizer, rope_parameters=_MROPE | {"mrope_interleaved": True}, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    shared = _qwen_shared(tokenizer.convert_tokens_to_ids, False)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=_TOWER | own, **shared)
    return config, build_processor("qwen3_vl", tokenizer), tokenizer


def _qwen3_5():
    tokenizer = build_tokenizer()
    own = {"out_hidden_size": 64, "num_position_embeddings": 64}
    rope = _MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text = _text(
        tokenizer, rope_parameters=rope, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
    )  # fmt: skip
    shared = _qwen_shared(tokenizer.convert_tokens_to_ids, False)
    config = Qwen3_5Config(text_config=text, vision_config=_TOWER | own, **shared)
    return config, build_processor("qwen3_vl", tokenizer), tokenizer


def _gemma3():
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _plain_tokenizer("<start_of_image>", **named)
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    text = _text(
        tokenizer, query_pre_attn_scalar=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )  # fmt: skip
    vision = _vision("siglip_vision_model", 56, 14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)
    return config, processor, tokenizer


def _llava_onevision():
    tokenizer = _plain_tokenizer("<image>", video_token="<video>")
    token = tokenizer.convert_tokens_to_ids
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = LlavaOnevisionConfig(
        text_config=_text(tokenizer, model_type="qwen2"), vision_config=_vision("siglip_vision_model", 28, 14),
        image_token_index=token("<image>"), video_token_index=token("<video>"), image_grid_pinpoints=pinpoints,
    )  # fmt: skip
    size = {"height": 28, "width": 28}
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints), tokenizer,
        LlavaOnevisionVideoProcessor(size=size), num_image_tokens=4, vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return config, processor, tokenizer


def _smolvlm():
    tokenizer = _plain_tokenizer("<image>", fake_image_token="<fake_token_around_image>", global_image="<global-img>")
    tokenizer.add_tokens([f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)], special_tokens=True)
    config = SmolVLMConfig(
        text_config=_text(tokenizer, model_type="llama"), vision_config=_vision("smolvlm_vision", 56, 14),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    smolvlm.num2words = smolvlm.num2words or str  # an optional package that spells the numbers of videos
    images = SmolVLMImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = SmolVLMProcessor(
        images, tokenizer, SmolVLMVideoProcessor(), image_seq_len=4, chat_template=tokenizer.chat_template
    )
    return config, processor, tokenizer


def _mistral3():
    tokenizer = _plain_tokenizer("[IMG]", row="[IMG_BREAK]", end="[IMG_END]")
    config = Mistral3Config(
        text_config=_text(tokenizer, model_type="mistral"),
        vision_config=_vision("pixtral", 112, 14) | {"head_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), spatial_merge_size=2,
    )  # fmt: skip
    images = PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
    processor = PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=tokenizer.chat_template
    )
    return config, processor, tokenizer


def _vipllava(**text):
    """A type that the plain adapter runs right."""
    tokenizer = _plain_tokenizer("<image>")
    config = VipLlavaConfig(
        text_config=_text(tokenizer, model_type="mistral", sliding_window=None) | text,
        vision_config=_vision("clip_vision_model", 28, 14) | {"projection_dim": 32, "num_hidden_layers": 3},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=4,
        vision_feature_layers=[-2, -1],
    )  # fmt: skip
    size = {"height": 28, "width": 28}
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return config, processor, tokenizer


STOCK: dict[str, Callable] = {
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "llava_onevision": _llava_onevision,
    "smolvlm": _smolvlm,
    "mistral3": _mistral3,
    "vipllava": _vipllava,
}


def stock(model_type: str, attention: str = "sdpa", **text) -> Stock:
    """Weights are scaled up, so that no prediction is near uniform and positions and images matter."""
    torch.manual_seed(0)
    config, processor, tokenizer = STOCK[model_type](**text)
    config._attn_implementation = attention
    model = build_tiny_model(config).eval()
    perturb(model, 0, 0.1)
    return Stock(model, processor, tokenizer)
