"""Exports that other tools load: Hugging Face model folders and peft adapters. safetensors only.

Every function here takes a state dict that was already gathered on the calling rank, and writes from that rank alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

from ...errors import CheckpointError
from ..files import GIVEN, cache_root, follow_umask
from .manifest import is_adapted, plain_name

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)
StateDict = Mapping[str, torch.Tensor]
ALL_KEPT = 0.9
PARTS = 64  # of a weight, which as fp32 would be large


@dataclass
class KeptShare:
    """How much of what adapters change is in the sums with their weights: in half precision a change of less than half
    a step of its weight is rounded away. Sums over weights: changes squared, and times what is kept of them."""

    squares: torch.Tensor | float = 0.0
    kept: torch.Tensor | float = 0.0

    @torch.no_grad()
    def sum(self, weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """Of a weight and what its adapter changes, counted here."""
        joined = weight + change.to(weight.dtype)
        for wanted, old, new in zip(*(each.chunk(PARTS) for each in (change, weight, joined))):
            self.squares = self.squares + wanted.float().square().sum()
            self.kept = self.kept + (wanted.float() * (new - old).float()).sum()
        return joined

    def warn(self, way: str) -> None:
        """Where it is less than ALL_KEPT. way: what to do then."""
        squares = float(self.squares)
        if squares > 0 and float(self.kept) < ALL_KEPT * squares:
            told = "half precision keeps %.0f %% of what the adapters change in their weights: %s"
            log.warning(told, 100 * float(self.kept) / squares, way)


def check_gathered(state_dict: StateDict) -> None:
    """CheckpointError when weights are missing their content, as ZeRO-3's partitioned parameters do."""
    empty = [name for name, tensor in state_dict.items() if tensor.numel() == 0]
    if empty:
        raise CheckpointError(f"{len(empty)} weights hold no elements ({empty[0]}, …): gather them before an export")
    if not state_dict:
        raise CheckpointError("there are no weights to export")


def check_complete(model: PreTrainedModel, state_dict: StateDict) -> None:
    """CheckpointError when a weight of the model is absent; one of each tied pair is enough.

    peft may have put its layers into the model: their base weights count under their own names, the adapter's not.
    """
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    expected = [plain_name(name) for name in model.state_dict() if ".lora_" not in name]
    missing = [name for name in expected if name not in state_dict and name not in tied]
    if missing:
        raise CheckpointError(f"{len(missing)} weights of the model are not in the export: {', '.join(missing[:3])}")


def export_hf(model: PreTrainedModel, processor: Any, folder: str | Path, state_dict: StateDict | None = None) -> Path:
    """Write config, weights as safetensors and the processor: a folder for transformers and vLLM.

    Args:
        model: without DeepSpeed's or peft's wrapping.
        processor: or tokenizer, with `save_pretrained`; None: none is written.
        folder: where to write.
        state_dict: the model's gathered weights; None: its own.

    Raises:
        CheckpointError: for weights that are absent or not gathered.
    """
    if is_adapted(model):
        raise CheckpointError("export_hf takes the unwrapped model with merged weights; export_lora takes the adapter")
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    check_gathered(weights)
    check_complete(model, weights)
    weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    kind, plain = model.config.model_type, {}
    if kind in TRANSPOSED:
        weights = {name: as_published(kind, name, tensor) for name, tensor in weights.items()}
        plain["save_original_format"] = False  # transformers would turn them back
    generation = model.generation_config
    try:
        if isinstance(generation, GenerationConfig):  # transformers refuses to save some that it has loaded
            model.generation_config = GenerationConfig()
        model.save_pretrained(str(folder), state_dict=dict(weights), **plain)  # it empties the dict that it gets
    finally:
        model.generation_config = generation
    note_dtype(Path(folder) / "config.json", weights)
    if isinstance(generation, GenerationConfig):
        generation.to_json_file(Path(folder) / "generation_config.json")
    if processor is not None:
        processor.save_pretrained(str(folder))
    follow_umask(Path(folder))
    return Path(folder)


# Weights that published checkpoints hold with their last two dimensions the other way round than transformers' modules.
TRANSPOSED = {"qwen3_vl_moe": (".experts.gate_up_proj", ".experts.down_proj")}


def as_published(model_type: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight of a transformers module as published checkpoints of its type hold it, and vLLM's loader reads it.

    Args:
        model_type: of the model's config.
        name: of the weight in the module.
        tensor: the weight.
    """
    turned = name.endswith(TRANSPOSED.get(model_type, ()))
    return tensor.transpose(-1, -2).contiguous() if turned else tensor


def note_dtype(path: Path, weights: StateDict) -> None:
    """Write the type that was exported into config.json, where transformers puts the type of the model in memory."""
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_lora(model: PeftModel, folder: str | Path, state_dict: StateDict) -> Path:
    """Write adapter_model.safetensors and adapter_config.json, for peft and for vLLM's LoRA loading.

    Args:
        model: with the adapter.
        folder: where to write.
        state_dict: gathered weights under the model's own names, of which only the adapter's are needed.
    """
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(model, dict(state_dict), save_embedding_layers=False)
    check_gathered(adapter)
    config = copy(model.peft_config["default"])
    config.inference_mode, config.base_model_name_or_path = True, _named_base(config.base_model_name_or_path)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in adapter.items()}
    save_file(copies, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    follow_umask(folder)
    return folder


def _named_base(path: str | None) -> str | None:
    """How an adapter names the model that it belongs to: a folder by its whole path; None for the copy of a model that
    a program gave, which is removed with its run."""
    if not path or Path(path).is_relative_to(cache_root() / GIVEN):
        return None
    return os.path.abspath(path) if os.path.isdir(path) else path
