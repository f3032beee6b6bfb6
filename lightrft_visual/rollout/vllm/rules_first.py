"""The sampling rules for vLLM's first model runner, which tells its processors of rows that come, go and move."""

from __future__ import annotations

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from .first_token import check_scale, first_token_scale
from .made_class import MadeClass


def rules_class(banned_ids: list[int]) -> type[LogitsProcessor]:
    """See `rules.sampling_rules`."""

    class SamplingRules(LogitsProcessor, metaclass=MadeClass):
        made_by = rules_class, (banned_ids,)

        def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
            self.banned = torch.tensor(banned_ids, dtype=torch.long, device=device)
            self.hot: dict[int, tuple[float, list[int]]] = {}  # row -> scale, tokens drawn so far

        @classmethod
        def validate_params(cls, sampling_params) -> None:
            check_scale(sampling_params)

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                self.hot.pop(index, None)
            for index, params, _, output_ids in batch_update.added:
                scale = first_token_scale(params)
                self.hot.pop(index, None)
                if scale is not None:
                    self.hot[index] = (scale, output_ids)
            for source, target, direction in batch_update.moved:
                moved, displaced = self.hot.pop(source, None), self.hot.pop(target, None)
                if moved is not None:
                    self.hot[target] = moved
                if direction == MoveDirectionality.SWAP and displaced is not None:
                    self.hot[source] = displaced

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for index, (scale, drawn) in self.hot.items():
                if not drawn:
                    logits[index] *= scale
            if self.banned.numel():
                logits.index_fill_(1, self.banned, float("-inf"))
            return logits

    return SamplingRules
