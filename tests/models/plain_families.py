"""Tiny models of types without an adapter, which the general one runs right: each with its processor and tokenizer."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from stock_families import IMAGE_TEMPLATE, Stock, _plain_tokenizer, _text, _vision
from tiny_models import perturb
from transformers import Qwen2Tokenizer

from lightrft_visual.models.tiny.vlm import build_tiny_model, build_tokenizer

SIDE = {"height": 28, "width": 28}
GRID = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def _patches() -> tuple[Qwen2Tokenizer, dict[str, Any]]:
    """A tokenizer whose template writes an image as Qwen does, and the ids of its placeholders."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = IMAGE_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    token = tokenizer.convert_tokens_to_ids
    return tokenizer, {"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")}


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
    tower = _vision("video_llama_3_vision", 28, 14)
    tower.pop("image_size")
    text = _text(tokenizer, model_type="qwen2")
    config = transformers.VideoLlama3Config(text_config=text, vision_config=tower, **ids)
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
    tower = _vision("siglip2_vision_model", 0, 8) | {"num_patches": 64}
    tower.pop("image_size")
    config = transformers.Lfm2VlConfig(
        text_config=text, vision_config=tower, image_token_id=tokenizer.image_token_id, projector_hidden_size=64
    )
    return config, transformers.Lfm2VlProcessor(images, tokenizer)


def _lighton_ocr():
    named = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
    tokenizer = _plain_tokenizer("<|image_pad|>", **named)
    images = transformers.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
    config = transformers.LightOnOcrConfig(
        text_config=_text(tokenizer, model_type="qwen3"), spatial_merge_size=2, image_token_id=tokenizer.image_token_id,
        vision_config=_vision("pixtral", 112, 14) | {"head_dim": 32},
    )  # fmt: skip
    return config, transformers.LightOnOcrProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def _llava_next_video():
    tokenizer = _plain_tokenizer("<image>")
    tokenizer.add_tokens(["<video>"], special_tokens=True)
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size=SIDE, image_grid_pinpoints=pinpoints
    )
    videos = transformers.LlavaNextVideoVideoProcessor(size=SIDE, crop_size=SIDE)
    config = transformers.LlavaNextVideoConfig(
        text_config=_text(tokenizer, model_type="llama"), image_grid_pinpoints=pinpoints,
        vision_config=_vision("clip_vision_model", 28, 14) | {"projection_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )  # fmt: skip
    processor = transformers.LlavaNextVideoProcessor(
        videos, images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


def _ovis2():
    tokenizer = _plain_tokenizer("<image>")
    marks = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer.add_tokens(["<IMG_ATOM>", *marks], special_tokens=True)
    text, token = _text(tokenizer, model_type="qwen2"), tokenizer.convert_tokens_to_ids
    tower = _vision("ovis2", 28, 14) | {"vocab_size": 32, "num_visual_indicator_tokens": 5, "hidden_stride": 2}
    tower.pop("model_type")
    config = transformers.Ovis2Config(
        text_config=text, vision_config=tower, image_token_id=token("<IMG_ATOM>"), vocab_size=text["vocab_size"],
        visual_indicator_token_ids=token(marks), hidden_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.Ovis2ImageProcessor(size=SIDE, max_patches=4)
    return config, transformers.Ovis2Processor(images, tokenizer, image_seq_length=1)


PLAIN: dict[str, Callable] = {
    "deepseek_vl": _deepseek_vl, "exaone4_5": _exaone4_5, "idefics2": _idefics2, "lfm2_vl": _lfm2_vl,
    "lighton_ocr": _lighton_ocr, "llava_next_video": _llava_next_video, "ovis2": _ovis2,
    "video_llama_3": _video_llama_3,
}  # fmt: skip


def plain(model_type: str) -> Stock:
    """With weights scaled up, as `stock_families.stock` does."""
    torch.manual_seed(0)
    config, processor = PLAIN[model_type]()
    model = build_tiny_model(config).eval()
    perturb(model, 0, 0.1)
    return Stock(model, processor, processor.tokenizer)
