"""From values per token to one number: aggregation with denominators of the whole train batch.

A train batch is cut into micro-batches and spread over ranks. Were each micro-batch divided by its own token count, the
loss would depend on the cut. So the counts are taken once over everything (`global_denominators`), each micro-batch is
divided by those, and the *sum* over micro-batches and ranks is the loss of the train batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..config import registry
from ..runtime.collectives import all_reduce_sum

T = torch.Tensor


@dataclass
class LossOutputs:
    """What every loss returns for one micro-batch.

    loss: scalar share with gradient; the shares of all micro-batches and ranks add up to the train batch's loss.
    metrics: detached shares that add up likewise. means: means over the micro-batch's valid samples. maxima: combined
    by maximum.
    """

    loss: T
    metrics: dict[str, T] = field(default_factory=dict)
    means: dict[str, T | float] = field(default_factory=dict)
    maxima: dict[str, T | float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossDenominators:
    """Counts over all micro-batches and ranks of one train batch.

    tokens: unmasked action tokens; sequences: samples with at least one of them; max_tokens: the constant length (the
    generation limit) that `seq-mean-token-sum-norm` divides by. Counts of an empty batch are 1, so that its loss is 0.
    """

    tokens: int
    sequences: int
    max_tokens: int


@dataclass(frozen=True)
class PartSettings:
    """Samples whose loss stands for itself, such as answers beside drawings: a few long ones drown no others.

    name: of its metrics; "" where there is one part. weight: of its loss. entropy_coef: of its entropy bonus.
    max_tokens: the longest response.
    """

    name: str
    weight: float
    entropy_coef: float
    max_tokens: int


def global_denominators(masks: Sequence[T], max_tokens: int) -> LossDenominators:
    """Denominators of a train batch from this rank's micro-batch masks [(B, A) bool]; a collective over all ranks.

    Every rank must call it, also one whose masks are all false. `masks` must hold at least one tensor, for its device.
    """
    tokens = torch.stack([mask.bool().sum() for mask in masks]).sum()
    sequences = torch.stack([mask.bool().any(dim=1).sum() for mask in masks]).sum()
    counts = all_reduce_sum(torch.stack([tokens, sequences]))
    return LossDenominators(max(counts[0].item(), 1), max(counts[1].item(), 1), max_tokens)


def masked_sum(values: T, mask: T) -> T:
    """Sum of values where mask is true; what is masked may be NaN or infinite."""
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def token_mean(values: T, mask: T, denominators: LossDenominators) -> T:
    """This micro-batch's share of the mean over all tokens of the train batch."""
    return masked_sum(values, mask) / denominators.tokens


def seq_mean_token_sum(values: T, mask: T, denominators: LossDenominators) -> T:
    """Share of: sum over the tokens of a sequence, mean over sequences."""
    return masked_sum(values, mask) / denominators.sequences


def seq_mean_token_mean(values: T, mask: T, denominators: LossDenominators) -> T:
    """Share of: mean over the tokens of a sequence, mean over sequences."""
    sums = torch.where(mask, values, torch.zeros_like(values)).sum(dim=1)
    return (sums / mask.sum(dim=1).clamp(min=1)).sum() / denominators.sequences


def seq_mean_token_sum_norm(values: T, mask: T, denominators: LossDenominators) -> T:
    """Share of: sum over the tokens of a sequence over a constant length, mean over sequences (Dr. GRPO)."""
    return masked_sum(values, mask) / (denominators.sequences * denominators.max_tokens)


def aggregate(values: T, mask: T, mode: str, denominators: LossDenominators) -> T:
    """One micro-batch's additive share of the aggregated values (B, A) under mask (B, A) bool; a scalar.

    `mode` is a name of the registry. Summed over the micro-batches and ranks that `denominators` counted, the results
    are the aggregate of the whole train batch.
    """
    return registry.aggregations.load(mode)(values, mask, denominators)
