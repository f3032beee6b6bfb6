"""Which experts a mixture of experts sends each token to: noted, compared between passes, and used again.

A sparse block chooses by one `torch.topk` over the scores of its experts. While such a block runs, that call goes
through `_Choice`. A choice that is used again thus gets its weights by the model's own formula, with gradients, and
where it is the model's own choice nothing changes, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.utils import set_z3_leaf_module
from torch.overrides import TorchFunctionMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..errors import ConfigError
from ..experience.types import ModelInputs
from ..runtime.host_copies import to_device
from .vlm.positions import real_tokens

T = torch.Tensor
FREE = -1  # in place of an expert: the model chooses for itself
BY_SIGMOID = (  # models of text whose routers score each expert alone
    "afmoe", "axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa", "hy_v3", "hy_v4", "inkling_text", "kimi_linear", "laguna",
    "lfm2_moe", "llama4_text", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "solar_open",
)  # fmt: skip
NO_SOFTMAX = "router_aux_loss_coef: this model's routers do not choose by a softmax; leave it out"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Routers:
    """The sparse blocks of a base model, in the order of its layers; choices are (tokens, layers, k), small integers.

    mode: what a recorded choice is for. Passes compare with it what the model chooses itself; `rollout` and `old` use
    it again, and `old` also notes the choices of passes without gradient, for `Actor`.
    """

    def __init__(self, base: nn.Module, experts: int):
        self.mode, self.balances, self.wanted, self._inside = "off", False, None, False
        self.experts, self._count, self._real, self._softmax = experts, 0, None, False
        self.dtype = torch.uint8 if experts <= 256 else torch.int16
        blocks = sparse_blocks(base)
        self._made: list[T | None] = [None] * len(blocks)
        self._numbers = [int(number) for name in blocks for number in name.split(".") if number.isdigit()]
        self._scores: list[T] = []  # of the last training pass
        self._passes: list[list[T]] = []
        self._counts: list[T] = []  # (choices that differ, choices compared)
        for layer, block in enumerate(blocks.values()):
            choice = _Choice(experts, partial(self._chosen, layer))
            set_z3_leaf_module(block, True)  # ranks use different experts: ZeRO-3 gathers a block as one
            block.register_forward_pre_hook(partial(_entered, choice))
            block.register_forward_hook(partial(_left, choice), always_call=True)
        base.register_forward_pre_hook(self._begun)
        base.register_forward_hook(self._over, always_call=True)

    @classmethod
    def of(cls, base: nn.Module) -> Routers | None:
        """None for a model without sparse blocks."""
        experts = count_experts(base.config)
        return cls(base, experts) if experts and sparse_blocks(base) else None

    def use(self, mode: str, balances: bool = False) -> None:
        """What recorded choices are for, and whether training passes have a `balance`, from here on."""
        self.mode, self.balances = mode, balances

    def notes(self, inputs: ModelInputs) -> bool:
        """Whether the choices of a pass are wanted in its output."""
        return self.mode == "old" and inputs.routing is None and not torch.is_grad_enabled()

    def follow(self, inputs: ModelInputs, width: int, own: slice) -> None:
        """What is known of the next pass. It holds until the one after it: a backward pass may run layers again.

        Args:
            inputs: of the pass, before anything was put behind its rows.
            width: of the rows with it.
            own: the columns that run on this rank.
        """
        table, behind = laid_out(inputs), width - inputs.sequences.shape[1]
        if table is not None:
            if table.shape[2] > len(self._made):  # vLLM counts dense layers too
                table = table[:, :, self._numbers]
            table = F.pad(table, (0, 0, 0, 0, 0, behind), value=FREE)[:, own].flatten(0, 1)
        self.wanted, mask = table, inputs.attention_mask != 0
        self._real = F.pad(mask, (0, behind))[:, own].flatten()

    def balance(self) -> T | None:
        """The load-balancing loss () of the training pass that has just run, as in transformers; else None.

        Raises ConfigError for routers that do not choose by a softmax, which that loss is not for.
        """
        scores, self._scores = self._scores, []
        if not scores:
            return None
        if not self._softmax:
            total = scores[0].detach().sum(dim=1)
            self._softmax = bool(torch.allclose(total, torch.ones_like(total), atol=1e-3))
        if not self._softmax:
            raise ConfigError(NO_SOFTMAX)
        logits = tuple(each.clamp_min(torch.finfo(each.dtype).tiny).log() for each in scores)
        return load_balancing_loss_func(logits, self.experts, self._count, self._real)

    @contextmanager
    def recorded(self) -> Iterator[list[T]]:
        """Inside, the choices of each pass are appended to the list."""
        self._passes.append([])
        try:
            yield self._passes[-1]
        finally:
            self._passes.pop()

    def metrics(self) -> Mapping[str, float]:
        """`routed_otherwise`: of the tokens and layers of training passes whose experts are recorded, the share for
        which the model chose others; nothing without any. Counting begins anew."""
        counts, self._counts = self._counts, []
        differing, compared = torch.stack(counts).sum(dim=0).tolist() if counts else (0, 0)
        return {"routed_otherwise": differing / compared} if compared else {}

    def _chosen(self, layer: int, scores: T, own: Any) -> Any:
        """What stands for torch.topk's `own` answer."""
        if self._inside:
            self._made[layer], self._count = own.indices.to(self.dtype), own.indices.shape[1]
            if self.balances and torch.is_grad_enabled():
                self._scores.append(scores)
        if self._real is None:
            return own
        indices = own.indices
        if self.wanted is not None:
            wanted = self._compared(layer, indices)
            indices = indices if self.mode == "off" else torch.where(wanted != FREE, wanted, indices)
        # What stands in padding decides how an expert's tokens lie beside each other, and so how they are rounded.
        first = torch.arange(indices.shape[1], device=indices.device)
        indices = torch.where(self._real.unsqueeze(1), indices, first)
        return torch.return_types.topk((scores.gather(1, indices), indices))

    def _compared(self, layer: int, own: T) -> T:
        """The record of a layer (tokens, k), counted against the model's own choice. ConfigError where it is of another
        pass or model."""
        fitting = len(own), len(self._made), own.shape[1]
        if self.wanted.shape != fitting:
            told = f"a record of experts has the shape {tuple(self.wanted.shape)}"
            raise ConfigError(f"{told}; (tokens, layers, k) of this pass are {fitting}")
        wanted = self.wanted[:, layer].long()
        if self._inside and torch.is_grad_enabled():
            known = wanted[:, 0] != FREE
            other = (own.sort(dim=1).values != wanted.sort(dim=1).values).any(dim=1)
            self._counts.append(torch.stack([(other & known).sum(), known.sum()]))
        return wanted

    def _begun(self, module: nn.Module, args: Any) -> None:
        self._inside, self._made, self._scores = True, [None] * len(self._made), []

    def _over(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False
        if not torch.is_grad_enabled():  # decoding goes on from here
            self.wanted = self._real = None
        if not self._passes or output is None:  # None: the pass has failed
            return
        if all(each is not None for each in self._made):
            self._passes[-1].append(torch.stack(self._made, dim=1))
        elif self.mode != "off":
            raise ConfigError(f"routing_replay {self.mode}: this model chooses its experts in a way that is not known")


class _Choice(TorchFunctionMode):
    """While a block runs: its choice among `experts` goes through `chosen(scores, torch.topk's own answer)`."""

    def __init__(self, experts: int, chosen: Any):
        super().__init__()
        self.experts, self.chosen = experts, chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in (torch.topk, T.topk):
            return own
        scores = args[0] if args else kwargs["input"]
        return self.chosen(scores, own) if scores.dim() == 2 and scores.shape[1] == self.experts else own


def _entered(choice: _Choice, module: nn.Module, args: Any) -> None:
    choice.__enter__()


def _left(choice: _Choice, module: nn.Module, args: Any, output: Any) -> None:
    choice.__exit__(None, None, None)


def count_experts(config: Any) -> int:
    """That a layer chooses among, by a transformers configuration; 0 of a dense model."""
    text = config.get_text_config()
    return next((getattr(text, name) for name in _COUNTS if getattr(text, name, None)), 0)


def check_balance(config: Any) -> None:
    """Raise ConfigError for a model, by its transformers configuration, that `Routers.balance` is known not to fit."""
    if config.get_text_config().model_type in BY_SIGMOID:
        raise ConfigError(NO_SOFTMAX)


def sparse_blocks(base: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts and what chooses among them, by name."""
    named = base.named_modules()
    return {n: m for n, m in named if hasattr(m, "experts") and (hasattr(m, "gate") or hasattr(m, "router"))}


def laid_out(inputs: ModelInputs) -> T | None:
    """(rows, S, layers, k) int16 of the samples' recorded choices, FREE where there are none; None without any.

    A sample's record is of its first tokens: the last one that was sampled has been through no layer.
    """
    known = [each for each in inputs.routing or () if each is not None]
    if not known:
        return None
    table = known[0].new_full((inputs.sequences.numel(), *known[0].shape[1:]), FREE, dtype=torch.int16)
    for own, tokens in zip(inputs.routing, real_tokens(inputs), strict=True):
        if own is not None:
            count = min(len(own), len(tokens))
            table[to_device(tokens[:count], table.device)] = own[:count].to(torch.int16)
    return table.unflatten(0, tuple(inputs.sequences.shape))


def by_sample(inputs: ModelInputs, choices: T) -> list[T]:
    """Of each sample the choices of its real tokens; choices (rows * S, layers, k) of all."""
    return [choices[to_device(tokens, choices.device)] for tokens in real_tokens(inputs)]


def of_responses(passes: list[T], sizes: list[int], prompts: list[int], lengths: list[int]) -> list[T]:
    """Choices (tokens, layers, k) on the host of R responses behind their prompts, without those of the last token.

    Args:
        passes: of P left-padded prompts, (P * S, layers, k), then of one token after the other, (R, layers, k) each.
        sizes: tokens of each prompt.
        prompts: the prompt of each response.
        lengths: tokens of each response.
    """
    first = passes[0].unflatten(0, (len(sizes), -1)).cpu()
    steps = torch.stack(passes[1:], dim=1).cpu() if passes[1:] else first.new_empty(len(lengths), 0, *first.shape[2:])
    return [
        torch.cat([first[prompt, -sizes[prompt] :], steps[index, : length - 1]])
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
