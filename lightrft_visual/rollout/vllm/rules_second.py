"""The sampling rules for vLLM's second model runner, whose requests keep a slot while rows are reordered every step."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from .first_token import check_scale, first_token_scale
from .made_class import MadeClass


def rules_class(banned_ids: list[int]) -> type[LogitsProcessor]:
    """See `rules.sampling_rules`."""

    class SamplingRules(LogitsProcessor, metaclass=MadeClass):
        made_by = rules_class, (banned_ids,)

        def __init__(self, vllm_config, req_states: LogitsProcRequestState):
            self.banned = torch.tensor(banned_ids, dtype=torch.long, device=req_states.device)
            self.prompt_len = req_states.prompt_len
            self.host_scale = np.ones(req_states.max_num_reqs, dtype=np.float32)  # by slot; 1 asks for nothing
            self.scale = torch.ones(req_states.max_num_reqs, device=req_states.device)
            self.staged = False

        @classmethod
        def validate_params(cls, sampling_params) -> None:
            check_scale(sampling_params)

        def add_request(self, req_idx: int, sampling_params) -> bool:
            scale = first_token_scale(sampling_params)
            self.host_scale[req_idx] = 1.0 if scale is None else scale
            self.staged = True
            return scale is not None or bool(banned_ids)

        def apply_staged_writes(self) -> None:
            if self.staged:
                self.scale.copy_(torch.from_numpy(self.host_scale))
                self.staged = False

        def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
            if (self.host_scale[ctx.idx_mapping_np] != 1).any():
                slots = ctx.expanded_idx_mapping.long()
                # The first token follows the last one of the prompt; `pos` is that of the token before the drawn one.
                first = ctx.pos + 1 == self.prompt_len.gpu[slots]
                logits *= torch.where(first, self.scale[slots], 1.0).unsqueeze(1)
            if self.banned.numel():
                logits.index_fill_(1, self.banned, float("-inf"))
            return logits

    return SamplingRules
