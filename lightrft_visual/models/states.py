"""Packed rows in layers that carry a state along the tokens: linear attention, as Qwen3.5's gated delta nets have it.

Such a layer reads a row from its start, by a state and by a short convolution, and knows no borders in it. Here it gets
the segments of the row as a padded batch, with the mask that it knows of padded samples, and its results go back into
the row. All else of the model stays packed. A segment that continues another one stands behind it: in these layers a
shared prompt is computed for each of its completions.

Flash-linear-attention's kernels take the ends of segments themselves. That path is left alone: without one of its two
packages, or with another layout, the layer would ignore the ends and mix the samples without a word.
"""

from typing import Any

import torch
import torch.nn as nn

T = torch.Tensor


def divide_segments(text: nn.Module) -> None:
    """Let the layers with a state among the text layers of a transformers model take `segments`; calls without stay as
    they were, and a second call does nothing."""
    for layer in getattr(text, "layers", ()):
        state = getattr(layer, "linear_attn", None)
        if state is not None and _divide not in state._forward_pre_hooks.values():
            state.register_forward_pre_hook(_divide, with_kwargs=True)
            state.register_forward_hook(_join, with_kwargs=True)


@torch.compiler.disable  # other segments in every batch
def _divide(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """hidden_states (1, tokens, H) -> (samples, longest, H)."""
    if kwargs.get("segments") is None:
        return None
    tokens, real, _ = kwargs["segments"].samples
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].squeeze(0)[tokens], "attention_mask": real}


@torch.compiler.disable
def _join(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: T) -> T:
    """(samples, longest, H) -> (1, tokens, H)."""
    if kwargs.get("segments") is None:
        return output
    return output.flatten(0, 1)[kwargs["segments"].samples[2]].unsqueeze(0)
