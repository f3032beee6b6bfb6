"""`compile` of vision-language runs: the blocks of policy, critic and reference as programs of torch.compile.

Between its matrix products a block makes many small operations: norms, rotary positions, gates, residuals, the sums of
adapters. On an accelerator each of them is a kernel that the host starts and that reads and writes a whole activation.
A program makes a few of them. Attention stays outside: its segments differ in every batch, and has kernels of its own.

Lengths and batch sizes are left open, so that all micro-batches share programs. A forward with gradients and one
without are other programs: their log-probs agree to rounding, no longer bit for bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError
from ...models.vlm.actor import Actor, Critic
from ...runtime.start_up import log_stage
from ...runtime.vendor_patches import program_limit

# Two kinds of blocks, in parts around their attention, with and without gradients and adapters; torch gives up after 8.
PROGRAMS_A_BLOCK = 64
BEHIND = ("visual.merger", "model.norm")  # modules behind the last block: the tower's head, the text's last norm


def build(parts: Any) -> None:
    """No step asks anything of it. Raises ConfigError as `compile_blocks`."""
    if parts.config.model.compile:
        trained = [engine.module for engine in (parts.actor, parts.critic) if engine is not None]
        count = sum(compile_blocks(model) for model in (*trained, parts.reference_module) if model is not None)
        log_stage(f"torch.compile makes programs of {count} blocks; the first forwards wait for it")


def compile_blocks(model: Actor | Critic, backend: str = "inductor") -> int:
    """Let torch.compile make programs of the repeated blocks and of what stands behind them; the number of blocks.

    Steps of a generation, which have a cache, stay as they are. backend: of torch.compile. Raises ConfigError for
    another attention than PyTorch's, a family that is not proven, experts, which are noted between operations, and
    linear attention, a program for each number of its chunks.
    """
    backbone = model.backbone
    if not backbone.by_segments or backbone.routers is not None or backbone.family.carries_state:
        found = "a mixture of experts" if backbone.routers is not None else f"a {backbone.config.model_type} like this"
        raise ConfigError(f"compile takes proven models with PyTorch's attention alone, without experts, not {found}")
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    behind = [module for name, module in model.named_modules() if name.endswith(BEHIND)]
    for block in blocks:  # behind the hooks and the checkpoints of the block
        block.forward = _program_of(block.forward, backend, lambda given: given.get("past_key_values") is None)
    for module in behind:  # which are not told of a cache
        module.forward = _program_of(module.forward, backend, lambda _: torch.is_grad_enabled())
    return len(blocks)


def _program_of(plain: Callable[..., Any], backend: str, taken: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    program = torch.compile(plain, backend=backend, dynamic=True, **program_limit(PROGRAMS_A_BLOCK))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (program if taken(kwargs) else plain)(*args, **kwargs)

    return forward
