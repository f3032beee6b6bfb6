"""Models of published shapes with random weights, built on the spot: what is measured is speed and memory, not answers.

Sizes are those of the published configurations; tokenizers, and text encoders' depth, are small. Libraries are imported
where they are used: to list the parts needs none.
"""

import contextlib
import gc
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

QWEN_3B_TEXT = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "vocab_size": 151936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
QWEN_7B_TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
QWEN_3B_VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
}  # fmt: skip
SD35_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
WAN_1_3B = {
    "patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30,
}  # fmt: skip
TEXTS = ["How many red circles are there?", "Describe the picture.", "0 1 2 3 4 5 6 7 8 9"]


def qwen_3b(tokenizer):
    """The configuration of Qwen2.5-VL-3B with the special tokens of a small tokenizer."""
    return _qwen(tokenizer, QWEN_3B_TEXT, tied=True)


def qwen_7b(tokenizer):
    """The same of Qwen2.5-VL-7B."""
    return _qwen(tokenizer, QWEN_3B_TEXT | QWEN_7B_TEXT, tied=False)


def _qwen(tokenizer, text: dict[str, Any], tied: bool):
    from transformers import Qwen2_5_VLConfig

    from lightrft_visual.models.tiny.vlm import tiny_config

    small = tiny_config("qwen2_5_vl", tokenizer, tie_embeddings=tied).to_dict()
    ids = {name: value for name, value in small.items() if name.endswith("_token_id")}
    ends = {name: small["text_config"][name] for name in ("bos_token_id", "eos_token_id")}
    vision = QWEN_3B_VISION | {"out_hidden_size": text["hidden_size"]}
    return Qwen2_5_VLConfig(text_config=text | ends, vision_config=vision, tie_word_embeddings=tied, **ids)


def vision_language(folder: Path, size: str, shape: Callable[..., Any] = qwen_3b) -> Path:
    """A Qwen2.5-VL checkpoint of a shape, or with size tiny that of the embedded model."""
    from lightrft_visual.models.tiny.vlm import build_processor, build_tiny_checkpoint, build_tokenizer

    if (folder / "config.json").is_file():
        return folder
    if size == "tiny":
        return build_tiny_checkpoint(folder, "qwen2_5_vl", texts=TEXTS)
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = build_tokenizer(TEXTS)
    config = shape(tokenizer)
    with _on_the_card():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = [config.get_text_config().eos_token_id]
        model.save_pretrained(folder)
        del model
    build_processor("qwen2_5_vl", tokenizer, max_pixels=1280 * 28 * 28).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mixture_of_experts(folder: Path) -> Path:
    """A tiny Qwen3-VL-MoE, 4 of 32 experts a token."""
    import torch
    from transformers import Qwen3VLMoeConfig

    from lightrft_visual.models.tiny.vlm import build_processor, build_tiny_model, build_tokenizer, tiny_config
    from lightrft_visual.runtime.checkpoint.export import export_hf

    if (folder / "config.json").is_file():
        return folder
    tokenizer = build_tokenizer(TEXTS)
    small = tiny_config("qwen3_vl", tokenizer, tie_embeddings=False).to_dict()
    text = small["text_config"] | {
        "model_type": "qwen3_vl_moe_text", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }  # fmt: skip
    vision = small["vision_config"] | {"model_type": "qwen3_vl_moe_vision"}
    ids = {name: value for name, value in small.items() if name.endswith("_token_id")}
    torch.manual_seed(0)
    model = build_tiny_model(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))
    return export_hf(model, build_processor("qwen3_vl", tokenizer), folder)


@contextlib.contextmanager
def _on_the_card() -> Iterator[None]:
    """Draw random weights on the device (on the host it takes a minute and more) and leave its memory free."""
    import torch
    from deepspeed.accelerator import get_accelerator

    torch.manual_seed(0)
    with torch.device(get_accelerator().current_device_name()):
        yield
    gc.collect()
    get_accelerator().empty_cache()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside it models are built on meta tensors, and of them only configurations are saved."""
    from unittest.mock import patch

    import torch
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    def saved(model, folder, **_):
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)

    with (
        patch(f"{__name__}._on_the_card", lambda: torch.device("meta")),
        patch.object(PreTrainedModel, "save_pretrained", saved),
        patch.object(ModelMixin, "save_pretrained", lambda model, folder, **_: model.save_config(folder)),
    ):
        yield


def questions(folder: Path, count: int, side: int) -> Path:
    """`count` rows with an image of side x side pixels each; returns the jsonl file."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = []
    for index in range(count):
        image = Image.new("RGB", (side, side), tuple(draw.randrange(256) for _ in range(3)))
        pen = ImageDraw.Draw(image)
        for _ in range(8):
            x, y, r = (draw.randrange(side) for _ in range(3))
            pen.ellipse((x, y, x + r // 3, y + r // 3), fill=tuple(draw.randrange(256) for _ in range(3)))
        image.save(folder / f"{index}.png")
        rows.append({"prompt": "How many circles are there?", "images": [f"{index}.png"], "reference": "8"})
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _clip(tokenizer, width: int):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width, projection_dim=width,
            num_hidden_layers=1, num_attention_heads=width // 64, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
            max_position_embeddings=tokenizer.model_max_length,
        )
    )  # fmt: skip


def stable_diffusion_3(folder: Path, size: str) -> Path:
    """A Stable Diffusion 3 pipeline: the shape of 3.5 medium, or with size tiny the embedded one's, untrained."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import T5Config, T5EncoderModel

    from lightrft_visual.models.tiny.diffusion import (
        TinyDiffusionSettings,
        build_clip_tokenizer,
        build_pipeline,
        build_t5_tokenizer,
    )

    if (folder / "model_index.json").is_file():
        return folder
    if size == "tiny":
        build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder)
        return folder
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    with _on_the_card():
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16, norm_num_groups=32,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, sample_size=1024,
            use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609,
        )  # fmt: skip
        encoder = T5EncoderModel(
            T5Config(vocab_size=len(t5), d_model=4096, d_kv=64, d_ff=1024, num_layers=1, num_heads=64)
        )
        transformer = SD3Transformer2DModel(**SD35_MEDIUM)
        StableDiffusion3Pipeline(
            transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=_clip(clip, 768), text_encoder_2=_clip(clip, 1280), text_encoder_3=encoder,
            tokenizer=clip, tokenizer_2=clip, tokenizer_3=t5,
        ).to(torch.bfloat16).save_pretrained(folder)  # fmt: skip
        del transformer, vae, encoder
    return folder


def wan(folder: Path, size: str) -> Path:
    """A Wan text-to-video pipeline: the shape of 2.1 1.3B, or with size tiny a few thousand weights."""
    import torch
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    from lightrft_visual.models.tiny.diffusion import build_t5_tokenizer

    if (folder / "model_index.json").is_file():
        return folder
    tiny, tokenizer = size == "tiny", build_t5_tokenizer()
    width = 32 if tiny else 4096
    shape = WAN_1_3B
    if tiny:
        shape = shape | {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": width, "freq_dim": 16,
                         "ffn_dim": 32, "num_layers": 1, "rope_max_seq_len": 32}  # fmt: skip
    with _on_the_card():
        vae = (
            AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
            if tiny
            else AutoencoderKLWan()
        )
        encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=width, d_kv=16, d_ff=width, num_layers=1, num_heads=2)
        )
        pipeline = WanPipeline(
            tokenizer=tokenizer, text_encoder=encoder, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=WanTransformer3DModel(**shape),
        )  # fmt: skip
        (pipeline if tiny else pipeline.to(torch.bfloat16)).save_pretrained(folder)
        del pipeline, vae, encoder
    return folder


def prompts(folder: Path, count: int) -> Path:
    """Captions for models that draw, as jsonl."""
    from lightrft_visual.plugins.embedded.drawn_shapes import all_captions

    texts = [caption.text for caption in all_captions()]
    path = folder / "captions.jsonl"
    path.write_text("".join(json.dumps({"prompt": texts[index % len(texts)]}) + "\n" for index in range(count)))
    return path
