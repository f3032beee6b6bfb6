"""Weights that a model's own library keeps in fp32 stay in fp32 in a run in bf16."""

import logging
import re

import torch
from torch import nn

from . import collectives

logger = logging.getLogger(__name__)
_NAMED_BY = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # diffusers; transformers in bf16


def named_for_fp32(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the parts that models of diffusers and transformers inside a module name for fp32, by name.

    Wan names its norms, time embedding and modulation tables, mixtures of experts their routers. Which of them were
    loaded in fp32 says their type: transformers loads some in bf16 where the run is in bf16.
    """
    found = {}
    for prefix, part in module.named_modules():
        names = [name for attribute in _NAMED_BY for name in getattr(part, attribute, None) or ()]
        if names:
            wanted = re.compile("|".join(rf"(?:^|\.){name}(?:\.|$)" for name in names))
            own = part.named_parameters(prefix=prefix)
            found |= {name: weight for name, weight in own if wanted.search(name.removeprefix(f"{prefix}."))}
    return found


class FP32Kept:
    """The weights of a module that stay in fp32 while DeepSpeed casts all others: made before, `restore` after.

    divided: the run divides weights (ZeRO-3), and its optimizer holds all that it trains in one precision: those that
    train are not kept then, and `warn` says so.
    """

    def __init__(self, module: nn.Module, divided: bool) -> None:
        self._named, self._divided = named_for_fp32(module), divided
        kept = (weight for weight in self._named.values() if weight.dtype == torch.float32)
        self._kept = [weight for weight in kept if not (divided and weight.requires_grad)]
        self._ids = {id(weight) for weight in self._kept}
        self._values = [] if divided else [weight.detach() for weight in self._kept]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids

    def restore(self) -> None:
        """Give the weights their fp32 values back, where they are now. Divided ones were not cast."""
        for weight, value in zip(self._kept, self._values):
            weight.data = value.to(weight.device)
        self._values.clear()

    def warn(self, dtype: torch.dtype) -> None:
        """Say once which named weights compute in the run's precision `dtype`, as it divides them: they train, or were
        loaded to."""
        cast = {name: weight.requires_grad for name, weight in self._named.items() if weight.dtype == dtype}
        if self._divided and cast and dtype != torch.float32 and collectives.is_rank_0():
            frozen = " So does --trainable_models without the networks that do not train here."
            logger.warning(
                "%d weights that the model keeps in fp32 (%s) compute in %s, as ZeRO-3 has one precision for all that "
                "it trains; the optimizer has them in fp32. --zero_stage 2, --lora_rank and a run without --bf16 leave "
                "them as they are.%s",
                len(cast),
                ", ".join([*cast][:3]) + (", ..." if len(cast) > 3 else ""),
                str(dtype).removeprefix("torch."),
                "" if all(cast.values()) else frozen,
            )
