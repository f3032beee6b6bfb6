"""What a request asks of its first token: FIRE's scale (arXiv 2410.21236)."""

from __future__ import annotations

from typing import Any

FIRST_TOKEN_SCALE = "first_token_scale"  # SamplingParams.extra_args: temperature / first-token temperature


def first_token_scale(sampling_params: Any) -> float | None:
    """What a request's first logits are multiplied by; None for a request that asks for nothing."""
    return (sampling_params.extra_args or {}).get(FIRST_TOKEN_SCALE)


def check_scale(sampling_params: Any) -> None:
    """ValueError for a scale that is not positive."""
    scale = first_token_scale(sampling_params)
    if scale is not None and scale <= 0:
        raise ValueError(f"{FIRST_TOKEN_SCALE} is {scale}; it must be positive")
