"""Sampling rules inside vLLM's sampler: tokens that may never be drawn, and FIRE's hot first token.

Both are done by one processor, the scaling first: a finite logit bias would be shrunk by it and let banned tokens
through, and vLLM's own temperature stops at 2. vLLM divides by the ordinary temperature afterwards. vLLM has two model
runners, each with its own kind of logits processor: `rules_first` and `rules_second`. Requests' seeds are vLLM's own
affair on both.
"""

from __future__ import annotations

from typing import Any

FIRST_TOKEN_SCALE = "first_token_scale"  # SamplingParams.extra_args: temperature / first-token temperature


def sampling_rules(banned_ids: list[int], second_runner: bool) -> type:
    """A vLLM logits processor class that bans `banned_ids` and scales the logits of each request's first token."""
    if second_runner:
        from .rules_second import rules_class
    else:
        from .rules_first import rules_class
    return rules_class(banned_ids)


def first_token_scale(sampling_params: Any) -> float | None:
    """What a request's first logits are multiplied by; None for a request that asks for nothing."""
    return (sampling_params.extra_args or {}).get(FIRST_TOKEN_SCALE)


def check_scale(sampling_params: Any) -> None:
    """ValueError for a scale that is not positive."""
    scale = first_token_scale(sampling_params)
    if scale is not None and scale <= 0:
        raise ValueError(f"{FIRST_TOKEN_SCALE} is {scale}; it must be positive")
