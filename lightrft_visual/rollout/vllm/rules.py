"""Sampling rules inside vLLM's sampler: tokens that may never be drawn, and FIRE's hot first token (arXiv 2410.21236).

Both are done by one processor, the scaling first: a finite logit bias would be shrunk by it and let banned tokens
through, and vLLM's own temperature stops at 2. vLLM divides by the ordinary temperature afterwards. vLLM has two model
runners, each with its own kind of logits processor. Requests' seeds are vLLM's own affair on both.
"""

import copyreg
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

FIRST_TOKEN_SCALE = "first_token_scale"  # SamplingParams.extra_args: temperature / first-token temperature


def sampling_rules(banned_ids: list[int], second_runner: bool) -> type:
    """A vLLM logits processor class that bans `banned_ids` and scales the logits of each request's first token."""
    return (_second_runners_rules if second_runner else _first_runners_rules)(banned_ids)


class _MadeClass(ABCMeta):
    """Metaclass of a class that a function makes, which processes that vLLM starts make anew: pickle knows a class by
    its module's name alone. made_by: (function of a module, its arguments)."""

    made_by: tuple[Callable[..., type], tuple]


copyreg.pickle(_MadeClass, lambda made: made.made_by)


class _Rules:
    """What both kinds do alike."""

    banned_ids: list[int]
    banned: torch.Tensor | None = None  # on the device since the first use: what is made while a model loads sleeps too

    def _without_banned(self, logits: torch.Tensor) -> torch.Tensor:
        if self.banned is None:
            self.banned = torch.tensor(self.banned_ids, dtype=torch.long, device=logits.device)
        return logits.index_fill_(1, self.banned, float("-inf")) if self.banned_ids else logits


def _scale_of(sampling_params: Any) -> float | None:
    """What a request's first logits are multiplied by; None for a request that asks for nothing."""
    return (sampling_params.extra_args or {}).get(FIRST_TOKEN_SCALE)


def _first_runners_rules(banned_ids: list[int]) -> type:
    """Of the runner that tells its processors of rows that come, go and move."""
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

    class SamplingRules(_Rules, LogitsProcessor, metaclass=_MadeClass):
        made_by = _first_runners_rules, (banned_ids,)

        def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
            self.banned_ids = banned_ids
            self.hot: dict[int, tuple[float, list[int]]] = {}  # row -> scale, tokens drawn so far

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                self.hot.pop(index, None)
            for index, params, _, output_ids in batch_update.added:
                scale = _scale_of(params)
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
            return self._without_banned(logits)

    return SamplingRules


def _second_runners_rules(banned_ids: list[int]) -> type:
    """Of the runner whose requests keep a slot while rows are reordered every step."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

    class SamplingRules(_Rules, LogitsProcessor, metaclass=_MadeClass):
        made_by = _second_runners_rules, (banned_ids,)

        def __init__(self, vllm_config, req_states: LogitsProcRequestState):
            self.banned_ids = banned_ids
            self.prompt_len = req_states.prompt_len
            self.host_scale = np.ones(req_states.max_num_reqs, dtype=np.float32)  # by slot; 1 asks for nothing
            self.scale = torch.ones(req_states.max_num_reqs, device=req_states.device)
            self.staged = False

        def add_request(self, req_idx: int, sampling_params) -> bool:
            scale = _scale_of(sampling_params)
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
            return self._without_banned(logits)

    return SamplingRules
