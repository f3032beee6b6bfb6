"""A tiny Wan 2.2 in the files and names of Wan's own code, where ROLL's example has them."""

import json
import re
from pathlib import Path

import tiny_families
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file

# Names in Wan's code (wan/modules/model.py and t5.py) of the tensors of diffusers and transformers.
TRANSFORMER = [
    *(
        (f"condition_embedder.{kind}_embedder.linear_{i}", f"{kind}_embedding.{2 * i - 2}")
        for kind in ("time", "text")
        for i in (1, 2)
    ),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    ("to_out.0", "o"),
    *((f"to_{name}", name) for name in "qkv"),
    ("proj_out", "head.head"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    (".norm2.", ".norm3."),  # the one with weights
]
TEXT = [
    ("shared", "token_embedding"),
    ("encoder.final_layer_norm", "norm"),
    ("encoder.block", "blocks"),
    ("layer.0.layer_norm", "norm1"),
    ("layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding"),
    ("layer.0.SelfAttention", "attn"),
    ("layer.1.layer_norm", "norm2"),
    ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
    ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
    ("layer.1.DenseReluDense.wo", "ffn.fc2"),
]


def renamed(state: dict[str, torch.Tensor], names: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    def name(key: str) -> str:
        for here, there in names:
            key = key.replace(here, there)
        return re.sub(r"(^|\.)scale_shift_table", r"\1modulation", key).replace("^modulation", "head.modulation")

    found = {name(key): value.contiguous() for key, value in state.items()}
    if "modulation" in found:
        found["head.modulation"] = found.pop("modulation")
    return found


def vae_in_wans_form(vae: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    """By diffusers' own conversion, told the names that Wan's VAE can have."""
    ends = [f"residual.{i}.{what}" for i in (0, 2, 3, 6) for what in ("gamma", "weight", "bias")]
    ends += [f"{part}.{what}" for part in ("shortcut", "resample.1", "time_conv") for what in ("weight", "bias")]
    sides = [("encoder", "downsamples"), ("decoder", "upsamples")]
    keys = [f"{side}.{stack}.{i}.{end}" for side, stack in sides for i in range(20) for end in ends]
    keys += [f"{side}.middle.{i}.{end}" for side, _ in sides for i in (0, 2) for end in ends]
    keys += [f"{side}.middle.1.{end}" for side, _ in sides for end in (
        "norm.gamma", "to_qkv.weight", "to_qkv.bias", "proj.weight", "proj.bias"
    )]  # fmt: skip
    keys += [f"{side}.head.{end}" for side, _ in sides for end in ("0.gamma", "2.weight", "2.bias")]
    keys += [f"{part}.{what}" for part in ("conv1", "conv2", "encoder.conv1", "decoder.conv1")
             for what in ("weight", "bias")]  # fmt: skip
    there = {here: key for key in keys for here in convert_wan_vae_to_diffusers({key: 0})}
    return {there[key]: value.contiguous() for key, value in vae.state_dict().items()}


def tiny() -> WanImageToVideoPipeline:
    torch.manual_seed(0)
    parts = tiny_families.wan_i2v().components
    vae = AutoencoderKLWan(base_dim=4, z_dim=16)  # four sizes of channels, two blocks each, as the published one
    return WanImageToVideoPipeline(**parts | {"vae": vae}, boundary_ratio=0.9)


def write_parts(place: Path) -> None:
    """paths.json, what it names, and the tokenizer's folder umt5-xxl; beside them the same model in diffusers' form."""
    pipeline = tiny()
    pipeline.save_pretrained(place / "pipeline")
    for name, expert in (("high_noise_model", pipeline.transformer), ("low_noise_model", pipeline.transformer_2)):
        (place / name).mkdir()
        save_file(renamed(expert.state_dict(), TRANSFORMER), place / name / "diffusion_pytorch_model.safetensors")
        (place / name / "config.json").write_text(json.dumps({"num_heads": 2, "dim": 24, "rope_max_seq_len": 32}))
    text = pipeline.text_encoder.state_dict()
    text.pop("encoder.embed_tokens.weight", None)
    torch.save(renamed(text, TEXT), place / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save(vae_in_wans_form(pipeline.vae), place / "Wan2.1_VAE.pth")
    pipeline.tokenizer.save_pretrained(place / "umt5-xxl")
    files = [f"{name}/diffusion_pytorch_model.safetensors" for name in ("high_noise_model", "low_noise_model")]
    files += ["models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"]
    (place / "paths.json").write_text(json.dumps([str(place / file) for file in files]))
