"""Wan 2.2 from the files that its authors publish, as ROLL's `model_paths` names them, in place of a diffusers folder.

A JSON file names four parts: a list in the order of PARTS, or a mapping by these names. A part is a .safetensors or
.pth file, a list of such files (shards), or a folder of them. Weights may have the names of Wan's own code or of
diffusers; sizes are read from the tensors, and from a config.json beside them where there is one.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from ...errors import ConfigError, refused_as

T = torch.Tensor
State = dict[str, T]
Pipeline = WanPipeline | WanImageToVideoPipeline
PARTS = ("high_noise_model", "low_noise_model", "text_encoder", "vae")
TOKENIZER = "google/umt5-xxl"  # the hub's, where no path is given
BOUNDARY = {WanPipeline: 0.875, WanImageToVideoPipeline: 0.9}  # of Wan 2.2
SHIFT = 5.0  # of Wan 2.2 image-to-video and of ROLL's scheduler
HEAD_SIZE = 128  # of all published Wan models; their config.json has the number of heads

# Names in Wan's text encoder -> names in transformers' UMT5, inside a block and outside.
_T5_BLOCK = {
    "norm1": "layer.0.layer_norm",
    "attn": "layer.0.SelfAttention",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_T5 = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}


def parts_of(path: str) -> dict[str, list[Path]]:
    """{name of PARTS: its files}. Relative paths start at the working directory, else at the JSON file's folder.

    Raises ConfigError for a file that is no such list, and for a part whose files are not there.
    """
    file = Path(path)
    with refused_as(ConfigError, f"{path} (model_paths) cannot be read as JSON"):
        named = json.loads(file.read_text())
    if isinstance(named, list) and len(named) == len(PARTS):
        named = dict(zip(PARTS, named))
    if not isinstance(named, dict) or set(named) != set(PARTS):
        raise ConfigError(f"{path} (model_paths) names {', '.join(PARTS)}: a list in this order, or a mapping")
    return {name: _files(f"{path}: {name}", named[name], file.parent) for name in PARTS}


def _files(what: str, given: Any, folder: Path) -> list[Path]:
    found: list[Path] = []
    for entry in given if isinstance(given, list) else [given]:
        path = Path(str(entry)).expanduser()
        path = path if path.exists() or path.is_absolute() else folder / path
        weights = [*path.glob("*.safetensors"), *path.glob("*.pth")] if path.is_dir() else [path]
        if not weights or not weights[0].is_file():
            raise ConfigError(f"{what}: there is no file {path}")
        found += sorted(weights)
    return found


def wan_pipeline_name(path: str) -> str:
    """The class of diffusers' pipelines that the parts make, by the channels of the first expert's input."""
    channels = _shape(parts_of(path)["high_noise_model"], "patch_embedding.weight")[1]
    return "WanPipeline" if channels == 16 else "WanImageToVideoPipeline"


def load_wan_parts(path: str, dtype: torch.dtype, tokenizer: str | None = None) -> Pipeline:
    """The pipeline of the parts. ConfigError for wrong files.

    Args:
        path: the JSON file that names them.
        dtype: of the weights, but for what diffusers keeps in fp32.
        tokenizer: folder or hub id; None for `TOKENIZER`.
    """
    files = parts_of(path)
    kind = WanPipeline if wan_pipeline_name(path) == "WanPipeline" else WanImageToVideoPipeline
    vae, text = (
        {key: value.to(dtype) for key, value in _load(files[name]).items()} for name in ("vae", "text_encoder")
    )
    return kind(
        tokenizer=_tokenizer(tokenizer or TOKENIZER),
        text_encoder=_text_encoder(text),
        vae=_vae(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=_transformer(files["high_noise_model"], dtype),
        transformer_2=_transformer(files["low_noise_model"], dtype),
        boundary_ratio=BOUNDARY[kind],
    )


def _tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer_path: no tokenizer in {name}; name the folder of umt5-xxl's") from error


def _shape(files: list[Path], key: str) -> tuple[int, ...]:
    """Of one tensor, without reading the others. Raises ConfigError where no file has it."""
    for file in files:
        if file.suffix != ".safetensors":
            if key in (tensors := _read(file)):
                return tuple(tensors[key].shape)
            continue
        with refused_as(ConfigError, f"{file}: not a safetensors file"), safe_open(file, "pt") as tensors:
            if key in tensors.keys():  # noqa: SIM118  no mapping
                return tuple(tensors.get_slice(key).get_shape())
    raise ConfigError(f"{files[0]}: not a Wan model, it has no tensor {key}")


def _read(file: Path) -> State:
    with refused_as(ConfigError, f"{file}: cannot be read as weights"):
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # tensors only, no code


def _load(files: list[Path]) -> State:
    return {key: value for file in files for key, value in _read(file).items()}


def _filled(model: nn.Module, state: Mapping[str, T], what: str) -> nn.Module:
    """The model, made without weights, with those of the state. Raises ConfigError where they do not fit."""
    with refused_as(ConfigError, what):
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise ConfigError(f"{what}: {len(missing)} tensors missing ({missing[:2]}), unknown: {unexpected[:2]}")
    return model.eval()


def _transformer(files: list[Path], dtype: torch.dtype) -> WanTransformer3DModel:
    state, beside = _load(files), files[0].with_name("config.json")
    told = json.loads(beside.read_text()) if beside.is_file() else {}
    if any("self_attn" in key for key in state):
        state = convert_wan_transformer_to_diffusers(state)
    patch, table = _of(state, "patch_embedding.weight", files), _of(state, "scale_shift_table", files)
    size = tuple(patch.shape[2:])
    config = {
        "patch_size": size,
        "num_attention_heads": told.get("num_heads") or told.get("num_attention_heads") or table.shape[-1] // HEAD_SIZE,
        "in_channels": patch.shape[1],
        "out_channels": state["proj_out.weight"].shape[0] // math.prod(size),
        "text_dim": state["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        "freq_dim": state["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        "ffn_dim": state["blocks.0.ffn.net.0.proj.weight"].shape[0],
        "num_layers": _blocks(state, "blocks"),
    }
    config["attention_head_dim"] = table.shape[-1] // config["num_attention_heads"]
    if "rope_max_seq_len" in told:
        config["rope_max_seq_len"] = told["rope_max_seq_len"]
    kept = WanTransformer3DModel._keep_in_fp32_modules
    state = {key: value.to(torch.float32 if set(kept) & set(key.split(".")) else dtype) for key, value in state.items()}
    with init_empty_weights():
        model = WanTransformer3DModel(**config)
    return _filled(model, state, str(files[0]))


def _of(state: Mapping[str, T], key: str, files: list[Path]) -> T:
    if key not in state:
        raise ConfigError(f"{files[0]}: not a Wan model, it has no tensor {key}")
    return state[key]


def _blocks(state: Mapping[str, T], prefix: str) -> int:
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", key) for key in state)
    return 1 + max(int(match[1]) for match in found if match)


def _vae(state: State) -> AutoencoderKLWan:
    if "encoder.conv1.weight" in state:
        state = convert_wan_vae_to_diffusers(state)
    if "post_quant_conv.weight" not in state:
        raise ConfigError("model_paths: vae is not Wan's VAE, it has no tensor conv2.weight")
    config = {"base_dim": state["encoder.conv_in.weight"].shape[0], "z_dim": state["post_quant_conv.weight"].shape[0]}
    with init_empty_weights():
        model = AutoencoderKLWan(**config)
    return _filled(model, state, "model_paths: vae")


def _text_encoder(state: State) -> UMT5EncoderModel:
    if "token_embedding.weight" in state:
        state = {_t5_name(key): value for key, value in state.items()}
    if "shared.weight" not in state:
        raise ConfigError("model_paths: text_encoder is not Wan's UMT5, it has no tensor token_embedding.weight")
    first = "encoder.block.0.layer"
    heads = state[f"{first}.0.SelfAttention.relative_attention_bias.weight"].shape
    config = UMT5Config(
        vocab_size=state["shared.weight"].shape[0], d_model=state["shared.weight"].shape[1],
        d_kv=state[f"{first}.0.SelfAttention.q.weight"].shape[0] // heads[1], num_heads=heads[1],
        d_ff=state[f"{first}.1.DenseReluDense.wo.weight"].shape[1], num_layers=_blocks(state, "encoder.block"),
        relative_attention_num_buckets=heads[0], feed_forward_proj="gated-gelu",
    )  # fmt: skip
    state = state | {"encoder.embed_tokens.weight": state["shared.weight"]}
    with init_empty_weights():
        model = UMT5EncoderModel(config)
    filled = _filled(model, state, "model_paths: text_encoder")
    filled.encoder.embed_tokens.weight = filled.shared.weight  # of two, each would take 2 GB of a device
    return filled


def _t5_name(key: str) -> str:
    match = re.match(r"blocks\.(\d+)\.(.+?)\.(?:(q|k|v|o)\.)?weight$", key)
    if match is None:
        return _T5.get(key, key)
    block, part, projection = match.groups()
    return ".".join(filter(None, ("encoder.block", block, _T5_BLOCK.get(part, part), projection, "weight")))
