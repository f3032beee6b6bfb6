"""A tiny Qwen3-VL-MoE, and noise in its routers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from stock_families import STOCK
from tiny_models import perturb

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.models.loading import Checkpoint, open_checkpoint
from lightrft_visual.models.routing import sparse_blocks
from lightrft_visual.models.tiny.vlm import build_tiny_model
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.runtime.checkpoint.export import export_hf

KIND = "qwen3_vl_moe"


def moe_checkpoint(folder: Path) -> Checkpoint:
    """3 of 24 experts, so that some choices hang on rounding. Its vocabulary is an odd one."""
    config, processor, _ = STOCK[KIND]()
    config.text_config.num_experts, config.text_config.num_experts_per_tok = 24, 3
    config.text_config.moe_intermediate_size = 128  # so that no weight of experts is square
    config.text_config.norm_topk_prob = True  # published configurations have it, and vLLM reads it
    torch.manual_seed(0)
    model = build_tiny_model(config)
    perturb(model, 0, 0.1)
    export_hf(model, processor, folder)
    return open_checkpoint(str(folder), ModelConfig(), DataConfig())


@contextmanager
def rounded_routers(actor: Actor) -> Iterator[None]:
    """Inside, routers read what they read in bfloat16, as an engine in another precision would."""
    handles = [
        block.gate.register_forward_pre_hook(lambda module, args: (args[0].bfloat16().to(args[0]),))
        for block in sparse_blocks(actor.backbone.base).values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
