"""Tiny models of transformers' own classes, with tokenizer and processor, of types with and without an adapter."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.models.smolvlm.processing_smolvlm as smolvlm
from safetensors.torch import load_file, save_file
from tiny_models import perturb, picture
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin, Qwen2Tokenizer

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.rollouts import PromptBatch
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import Checkpoint, open_checkpoint
from lightrft_visual.models.tiny.vlm import (
    _MROPE,
    _TOWER,
    SPECIAL_TOKENS,
    VISION_FAMILIES,
    _qwen_shared,
    build_processor,
    build_tiny_model,
    build_tokenizer,
    tiny_config,
)
from lightrft_visual.models.vlm import probe
from lightrft_visual.runtime.checkpoint.export import TRANSPOSED, as_published

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


def _vision(kind: str, size: int, patch: int, **more) -> dict:
    """size: of images, which towers of any size are not told (0)."""
    return {
        "model_type": kind, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": patch,
    } | ({"image_size": size} if size else {}) | more  # fmt: skip


def _ids(tokenizer: Qwen2Tokenizer, end: str = "_id", **tokens: str) -> dict[str, int]:
    return {f"{name}{end}": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


SIDE = {"height": 28, "width": 28}
GRID = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
PIXTRAL = {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}
# Of processors that take the images of CLIP's tower without the token of the class.
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _plain_tokenizer(image: str, **named: str) -> Qwen2Tokenizer:
    """With `image` and the tokens that the processor reads by a name of the tokenizer's."""
    base = build_tokenizer()
    model = json.loads(base.backend_tokenizer.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(each) for each in model["merges"]], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", extra_special_tokens=named,
    )  # fmt: skip
    tokenizer.add_tokens([*SPECIAL_TOKENS, image], special_tokens=True)
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _experts(tokenizer: Qwen2Tokenizer) -> dict:
    return _text(
        tokenizer, rope_parameters=_MROPE | {"mrope_interleaved": True}, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip


def _delta_nets(tokenizer: Qwen2Tokenizer, **more) -> dict:
    """The text layers of Qwen3.5: one with a state, one with attention."""
    rope = _MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return _text(
        tokenizer, rope_parameters=rope, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, **more,
    )  # fmt: skip


def _qwen_like(kind: type, text: Callable[[Qwen2Tokenizer], dict], **tower):
    """With the tokens and the processor of Qwen3-VL."""
    tokenizer = build_tokenizer()
    config = kind(
        text_config=text(tokenizer),
        vision_config=_TOWER | {"out_hidden_size": 64, "num_position_embeddings": 64} | tower,
        **_qwen_shared(tokenizer.convert_tokens_to_ids, False),
    )
    return config, build_processor("qwen3_vl", tokenizer), tokenizer


def _gemma3():
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _plain_tokenizer("<start_of_image>", **named)
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # vLLM joins those around images
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=_text(tokenizer, query_pre_attn_scalar=32, sliding_window=8, layer_types=layers),
        vision_config=_vision("siglip_vision_model", 56, 14), mm_tokens_per_image=4,
        **_ids(tokenizer, "_index", **named),
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = transformers.Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)
    return config, processor, tokenizer


def _llava_onevision():
    tokenizer = _plain_tokenizer("<image>", video_token="<video>")
    config = transformers.LlavaOnevisionConfig(
        text_config=_text(tokenizer, model_type="qwen2"), vision_config=_vision("siglip_vision_model", 28, 14),
        image_grid_pinpoints=PINPOINTS, **_ids(tokenizer, "_token_index", image="<image>", video="<video>"),
    )  # fmt: skip
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=SIDE, image_grid_pinpoints=PINPOINTS), tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=SIDE), num_image_tokens=4, vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return config, processor, tokenizer


def _tiled(name: str, *videos: Any):
    """Idefics 3 and what has its form."""
    tokenizer = _plain_tokenizer("<image>", fake_image_token="<fake_token_around_image>", global_image="<global-img>")
    tokenizer.add_tokens([f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)], special_tokens=True)
    config, images, processor = (
        getattr(transformers, f"{name}{part}") for part in ("Config", "ImageProcessor", "Processor")
    )
    config = config(
        text_config=_text(tokenizer, model_type="llama"), vision_config=_vision(f"{name.lower()}_vision", 56, 14),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    images = images(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = processor(images, tokenizer, *videos, image_seq_len=4, chat_template=tokenizer.chat_template)
    return config, processor, tokenizer


def _smolvlm():
    smolvlm.num2words = smolvlm.num2words or str  # an optional package that spells the numbers of videos
    return _tiled("SmolVLM", transformers.SmolVLMVideoProcessor())


def _pixtral_like(kind: type, settings: dict, text: dict, **merging: int):
    tokenizer = _plain_tokenizer("[IMG]", row="[IMG_BREAK]", end="[IMG_END]")
    config = kind(
        text_config=_text(tokenizer, model_type="mistral") | text,
        vision_config=_vision("pixtral", 112, 14, head_dim=32), **_ids(tokenizer, "_index", image_token="[IMG]"),
        **settings, **merging,
    )  # fmt: skip
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(**PIXTRAL), tokenizer, patch_size=14,
        chat_template=tokenizer.chat_template, **merging,
    )  # fmt: skip
    return config, processor, tokenizer


def _mistral3(**text):
    return _pixtral_like(transformers.Mistral3Config, {}, text, spatial_merge_size=2)


def _pixtral():
    """Pixtral 12B in transformers' own form: LLaVA's class around another tower."""
    settings = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _pixtral_like(transformers.LlavaConfig, settings, {})


def _llava_like(kind: type[PretrainedConfig], settings: dict, text: dict):
    tokenizer = _plain_tokenizer("<image>")
    config = kind(
        text_config=_text(tokenizer, model_type="mistral", sliding_window=None) | text,
        vision_config=_vision("clip_vision_model", 28, 14, projection_dim=32, num_hidden_layers=3),
        image_seq_length=4, **_ids(tokenizer, "_index", image_token="<image>"), **settings,
    )  # fmt: skip
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=SIDE)
    template = tokenizer.chat_template
    return config, transformers.LlavaProcessor(images, tokenizer, chat_template=template, **LLAVA), tokenizer


def _vipllava(**text):
    """A type that the plain adapter runs right."""
    return _llava_like(transformers.VipLlavaConfig, {"vision_feature_layers": [-2, -1]}, text)


def _gemma4():
    named = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
             "boa_token": "<|audio>", "eoa_token": "<audio|>"}  # fmt: skip
    tokenizer = _plain_tokenizer("<|image|>", **named)
    tokenizer.add_tokens(["<|video|>"], special_tokens=True)
    text = _text(
        tokenizer, sliding_window=8, layer_types=["sliding_attention", "full_attention"], global_head_dim=32,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=len(tokenizer) + 3, final_logit_softcapping=3.0,
        use_bidirectional_attention="vision",
    )  # fmt: skip
    vision = _vision(
        "gemma4_vision", 0, 16, head_dim=32, num_key_value_heads=2, position_embedding_size=64,
        default_output_length=70,
    )  # fmt: skip
    last = named.pop("eoa_token")
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, **_ids(tokenizer, video_token="<|video|>", **named),
        **_ids(tokenizer, "_index", eoa_token=last),
    )  # fmt: skip
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor(max_soft_tokens=70), tokenizer,
        transformers.Gemma4VideoProcessor(), chat_template=tokenizer.chat_template, image_seq_length=70,
    )  # fmt: skip
    return config, processor, tokenizer


def _glm(kind: str):
    """The sections of M-RoPE fill half of what is rotated, half of a head."""
    named = {"image": "<|image|>", "video": "<|video|>", "image_start": "<|begin_of_image|>",
             "image_end": "<|end_of_image|>", "video_start": "<|begin_of_video|>",
             "video_end": "<|end_of_video|>"}  # fmt: skip
    tokenizer = _plain_tokenizer(named["image"])
    tokenizer.add_tokens([*named.values()], special_tokens=True)
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
               "use_qk_norm": False}  # fmt: skip
    text = _text(tokenizer, rope_parameters=rope, attention_bias=True) | (experts if kind == "glm4v_moe" else {})
    vision = _TOWER | {"out_hidden_size": 64, "image_size": 56, "patch_size": 14}
    if kind == "glm46v":
        text["model_type"] = "glm4v_text"
    own, shared = {"glm4v": ("Glm4v", "Glm4v"), "glm4v_moe": ("Glm4vMoe", "Glm4v"), "glm46v": ("Glm46V",) * 2}[kind]
    config = getattr(transformers, f"{own}Config")(
        text_config=text, vision_config=vision, **_ids(tokenizer, "_token_id", **named)
    )
    processor, images, videos = (
        getattr(transformers, f"{shared}{part}") for part in ("Processor", "ImageProcessor", "VideoProcessor")
    )
    return config, processor(images(size=GRID), tokenizer, videos(size=GRID), tokenizer.chat_template), tokenizer


def _minicpmv4_6():
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
             "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
             "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}  # fmt: skip
    tokenizer = _plain_tokenizer(named["image_token"], **named)
    config = transformers.MiniCPMV4_6Config(
        text_config=_delta_nets(tokenizer) | {"model_type": "qwen3_5_text"}, insert_layer_id=0, image_size=112,
        vision_config=_vision("minicpmv4_6_vision", 112, 14, insert_layer_id=0),
        **_ids(tokenizer, image_token="<|image_pad|>", video_token="<|video_pad|>"),
    )  # fmt: skip
    sizes = {"scale_resolution": 112, "max_slice_nums": 4, "patch_size": 14}
    processor = transformers.MiniCPMV4_6Processor(
        transformers.MiniCPMV4_6ImageProcessor(**sizes), transformers.MiniCPMV4_6VideoProcessor(**sizes), tokenizer,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return config, processor, tokenizer


def _kimi_k25():
    tokenizer = _plain_tokenizer("<|media_pad|>")
    tokenizer.add_tokens(["<|kimi_k25_video_placeholder|>"], special_tokens=True)
    text = _text(
        tokenizer, model_type="deepseek_v3", num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, num_mtp_layers=0,
    )  # fmt: skip
    text.pop("head_dim")
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=_vision("kimi_k25_vision", 0, 14, pos_emb_height=8, pos_emb_width=8),
        projection_hidden_size=64, tie_word_embeddings=False,
        **_ids(tokenizer, "_token_id", image="<|media_pad|>", video="<|kimi_k25_video_placeholder|>",
               vision_start="<|vision_start|>", vision_end="<|vision_end|>"),
    )  # fmt: skip
    images = transformers.Kimi_K25ImageProcessor(max_patches=64)
    videos, template = transformers.Kimi_K25VideoProcessor(), tokenizer.chat_template
    return config, transformers.Kimi_K25Processor(images, tokenizer, videos, chat_template=template), tokenizer


def _llava_next(name: str = "LlavaNext"):
    """Or, without an adapter, the one that takes videos too."""
    tokenizer = _plain_tokenizer("<image>")
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size=SIDE, image_grid_pinpoints=PINPOINTS
    )
    parts, tokens, more = [images, tokenizer], {"image_token": "<image>"}, {"image_seq_length": 4}
    if name == "LlavaNextVideo":
        tokenizer.add_tokens(["<video>"], special_tokens=True)
        parts.insert(0, transformers.LlavaNextVideoVideoProcessor(size=SIDE, crop_size=SIDE))
        tokens, more = tokens | {"video_token": "<video>"}, {}
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(tokenizer, model_type="llama"), image_grid_pinpoints=PINPOINTS,
        vision_config=_vision("clip_vision_model", 28, 14, projection_dim=32), **more,
        **_ids(tokenizer, "_index", **tokens),
    )  # fmt: skip
    processor = getattr(transformers, f"{name}Processor")
    return config, processor(*parts, chat_template=tokenizer.chat_template, **LLAVA), tokenizer


def _tiny(family: str):
    """One that the package builds itself."""
    tokenizer = build_tokenizer(family=family)
    config = tiny_config(family, tokenizer, tie_embeddings=False)
    return config, build_processor(family, tokenizer), tokenizer


STOCK: dict[str, Callable] = {
    **{family: partial(_tiny, family) for family in VISION_FAMILIES},
    "llava": partial(_llava_like, transformers.LlavaConfig, {}, {}),
    "pixtral": _pixtral,
    "qwen3_vl_moe": partial(_qwen_like, transformers.Qwen3VLMoeConfig, _experts, deepstack_visual_indexes=[0]),
    "qwen3_5": partial(_qwen_like, transformers.Qwen3_5Config, _delta_nets),
    "gemma3": _gemma3,
    "llava_onevision": _llava_onevision,
    "smolvlm": _smolvlm,
    "mistral3": _mistral3,
    "vipllava": _vipllava,
    "qwen3_5_moe": partial(
        _qwen_like, transformers.Qwen3_5MoeConfig,
        partial(_delta_nets, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
                num_experts_per_tok=2),
    ),
    "gemma4": _gemma4,
    **{name: partial(_glm, name) for name in ("glm4v", "glm4v_moe", "glm46v")},
    "idefics3": partial(_tiled, "Idefics3"),
    "minicpmv4_6": _minicpmv4_6,
    "kimi_k25": _kimi_k25,
    "llava_next": _llava_next,
}  # fmt: skip


# --- types without an adapter ---


def _patches() -> tuple[Qwen2Tokenizer, dict[str, Any]]:
    """A tokenizer whose template writes an image as Qwen does, and the ids of its placeholders."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return tokenizer, _ids(tokenizer, image_token="<|image_pad|>", video_token="<|video_pad|>")


def _deepseek_vl():
    tokenizer = _plain_tokenizer("<image_placeholder>", image_token="<image_placeholder>")
    images = transformers.DeepseekVLImageProcessor(size=SIDE, min_size=14)
    config = transformers.DeepseekVLConfig(
        text_config=_text(tokenizer, model_type="llama"), vision_config=_vision("siglip_vision_model", 28, 14),
        image_token_id=tokenizer.image_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    return config, transformers.DeepseekVLProcessor(images, tokenizer, num_image_tokens=4)


def _exaone4_5():
    tokenizer, ids = _patches()
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_key_value_heads": 1,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    text = _text(tokenizer, model_type="exaone4")
    config = transformers.Exaone4_5_Config(text_config=text, vision_config=tower, **ids)
    images, videos = transformers.Qwen2VLImageProcessor(size=GRID), transformers.Qwen2VLVideoProcessor()
    return config, transformers.Exaone4_5_Processor(images, tokenizer, videos)


def _video_llama_3():
    tokenizer, ids = _patches()
    config = transformers.VideoLlama3Config(
        text_config=_text(tokenizer, model_type="qwen2"), vision_config=_vision("video_llama_3_vision", 0, 14), **ids
    )
    images, videos = transformers.VideoLlama3ImageProcessor(size=GRID), transformers.VideoLlama3VideoProcessor()
    return config, transformers.VideoLlama3Processor(images, tokenizer, videos)


def _idefics2():
    tokenizer = _plain_tokenizer("<image>", image_token="<image>", image_boundary_token="<fake_token_around_image>")
    images = transformers.Idefics2ImageProcessor(
        do_image_splitting=False, size={"shortest_edge": 28, "longest_edge": 56}
    )
    processor = transformers.Idefics2Processor(images, tokenizer, image_seq_len=4)
    perceiver = {
        "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 32,
        "num_key_value_heads": 1,
    }  # fmt: skip
    config = transformers.Idefics2Config(
        text_config=_text(tokenizer, model_type="mistral"), vision_config=_vision("idefics2_vision", 56, 14),
        perceiver_config=perceiver, image_token_id=tokenizer.image_token_id,
    )  # fmt: skip
    return config, processor


def _lfm2_vl():
    named = {
        "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }  # fmt: skip
    tokenizer = _plain_tokenizer("<image>", **named)
    tokenizer.add_tokens([f"<|img_row_{i}_col_{j}|>" for i in (1, 2, 3) for j in (1, 2, 3)], special_tokens=True)
    images = transformers.Lfm2VlImageProcessor(
        tile_size=64, encoder_patch_size=8, max_image_tokens=16, min_image_tokens=4, max_tiles=4, max_num_patches=64
    )
    text = _text(tokenizer, model_type="lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    text.pop("head_dim")
    config = transformers.Lfm2VlConfig(
        text_config=text, vision_config=_vision("siglip2_vision_model", 0, 8, num_patches=64),
        image_token_id=tokenizer.image_token_id, projector_hidden_size=64,
    )  # fmt: skip
    return config, transformers.Lfm2VlProcessor(images, tokenizer)


def _lighton_ocr():
    named = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
    tokenizer = _plain_tokenizer("<|image_pad|>", **named)
    images = transformers.PixtralImageProcessor(**PIXTRAL)
    config = transformers.LightOnOcrConfig(
        text_config=_text(tokenizer, model_type="qwen3"), spatial_merge_size=2, image_token_id=tokenizer.image_token_id,
        vision_config=_vision("pixtral", 112, 14, head_dim=32),
    )  # fmt: skip
    return config, transformers.LightOnOcrProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def _ovis2():
    tokenizer = _plain_tokenizer("<image>")
    marks = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer.add_tokens(["<IMG_ATOM>", *marks], special_tokens=True)
    text = _text(tokenizer, model_type="qwen2")
    tower = _vision("ovis2", 28, 14, vocab_size=32, num_visual_indicator_tokens=5, hidden_stride=2)
    tower.pop("model_type")
    config = transformers.Ovis2Config(
        text_config=text, vision_config=tower, vocab_size=text["vocab_size"], hidden_size=64, tie_word_embeddings=False,
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(marks), **_ids(tokenizer, image_token="<IMG_ATOM>"),
    )  # fmt: skip
    images = transformers.Ovis2ImageProcessor(size=SIDE, max_patches=4)
    return config, transformers.Ovis2Processor(images, tokenizer, image_seq_length=1)


# Of types without an adapter, which the general one runs right.
PLAIN: dict[str, Callable] = {
    "deepseek_vl": _deepseek_vl, "exaone4_5": _exaone4_5, "idefics2": _idefics2, "lfm2_vl": _lfm2_vl,
    "lighton_ocr": _lighton_ocr, "llava_next_video": partial(_llava_next, "LlavaNextVideo"), "ovis2": _ovis2,
    "video_llama_3": _video_llama_3,
}  # fmt: skip


def stock(model_type: str, attention: str = "sdpa", **text) -> Stock:
    """Weights are scaled up, so that no prediction is near uniform and positions and images matter."""
    torch.manual_seed(0)
    config, processor, *_ = (STOCK | PLAIN)[model_type](**text)
    config._attn_implementation = attention
    model = build_tiny_model(config).eval()
    perturb(model, 0, 0.1)
    return Stock(model, processor, processor.tokenizer)


def stock_checkpoint(folder: Path, model_type: str, **text) -> Checkpoint:
    """The same as a folder, opened as a run opens one."""
    built = stock(model_type, **text)
    kind, weights = built.model.config.model_type, built.model.state_dict()
    if kind in TRANSPOSED:  # transformers reads either form, but where ranks divide the weights this one alone
        weights = {name: as_published(kind, name, weight) for name, weight in weights.items()}
        built.model.save_pretrained(folder, state_dict=weights, save_original_format=False)
    else:
        built.model.save_pretrained(folder)
    renamed = transformers.CLIPVisionModel, transformers.SiglipVisionModel
    if isinstance(getattr(built.model.model, "vision_tower", None), renamed):
        _rename(folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    built.tokenizer.save_pretrained(folder)
    built.processor.save_pretrained(folder)
    return open_checkpoint(str(folder), ModelConfig(), DataConfig())


# What the tests show of each family, from which docs/models.md is written.
TABLE = json.loads(Path(__file__).with_name("families.json").read_text())


def claimed(form: str) -> list[str]:
    """The families for which the table says so."""
    return [name for name, entry in TABLE.items() if form in entry["proven"]]


def stock_prompts(checkpoint: Checkpoint) -> PromptBatch:
    """Text alone, one image, two of other sizes."""
    image = checkpoint.family.placeholders(checkpoint.processor)["image"]
    images = [picture(0, 90, 60), picture(1, 40, 130), picture(2, 64, 64)]
    texts = ["what is 1 plus 2?", f"{image}\nwhich shape is it?", f"first {image}\nsecond {image}\nhow many?"]
    return PromptBatch.of(texts, [[], images[:1], images[1:]])


def grouped_samples(checkpoint: Checkpoint) -> tuple[ModelInputs, ModelInputs]:
    """Three answers to each of text alone, one image and two images, in turn: padded and packed."""
    samples = []
    for turn in range(3):
        for each in probe.made_up_samples(checkpoint, 0):
            ids = each.ids.clone()
            ids[-each.actions :] = (ids[-each.actions :] + 7 * turn) % 50 + 20
            samples.append(replace(each, own=each.own | {"input_ids": ids[None]}))
    numbers = torch.arange(len(samples))
    groups = {"sample_ids": numbers, "group_ids": numbers % 3}
    return replace(probe._padded(samples), **groups), replace(probe._packed(samples), **groups)


def _rename(file: Path, start: str, other: str) -> None:
    """As checkpoints of the hub name these weights, which were saved before transformers' own names changed."""
    weights = {
        re.sub(rf"(^|\.){re.escape(start)}", rf"\1{other}", name): each for name, each in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
