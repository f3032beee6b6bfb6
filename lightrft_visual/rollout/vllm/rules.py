"""Sampling rules inside vLLM's sampler: tokens that may never be drawn, and FIRE's hot first token."""

from __future__ import annotations

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

FIRST_TOKEN_SCALE = "first_token_scale"  # SamplingParams.extra_args: temperature / first-token temperature


def sampling_rules(banned_ids: list[int]) -> type[LogitsProcessor]:
    """A vLLM logits processor class that bans `banned_ids` and scales the logits of each request's first token.

    Both are done here, in this order: a finite logit bias would be shrunk by the scaling and let banned tokens through,
    and vLLM's own temperature stops at 2. vLLM divides by the ordinary temperature afterwards.
    """

    class SamplingRules(LogitsProcessor):
        def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
            self.banned = torch.tensor(banned_ids, dtype=torch.long, device=device)
            self.hot: dict[int, tuple[float, list[int]]] = {}  # row -> scale, tokens drawn so far

        @classmethod
        def validate_params(cls, sampling_params) -> None:
            scale = (sampling_params.extra_args or {}).get(FIRST_TOKEN_SCALE)
            if scale is not None and scale <= 0:
                raise ValueError(f"{FIRST_TOKEN_SCALE} is {scale}; it must be positive")

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is None:
                return
            for row in batch_update.removed:
                self.hot.pop(row, None)
            for row, params, _, output_ids in batch_update.added:
                scale = (params.extra_args or {}).get(FIRST_TOKEN_SCALE)
                self.hot.pop(row, None)
                if scale is not None:
                    self.hot[row] = (scale, output_ids)
            for source, target, direction in batch_update.moved:
                moved, displaced = self.hot.pop(source, None), self.hot.pop(target, None)
                if moved is not None:
                    self.hot[target] = moved
                if direction == MoveDirectionality.SWAP and displaced is not None:
                    self.hot[source] = displaced

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for row, (scale, drawn) in self.hot.items():
                if not drawn:
                    logits[row] *= scale
            if self.banned.numel():
                logits.index_fill_(1, self.banned, float("-inf"))
            return logits

    return SamplingRules
