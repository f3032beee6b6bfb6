"""Clip-Cov and KL-Cov ("The entropy mechanism of RL", arXiv 2505.22617): restraint for the tokens that cost entropy.

A step lowers the policy's entropy by the covariance of log-prob and advantage. Few tokens make up most of it. They are
chosen over the whole train batch before its first forward, by the log-probs of the rollouts' policy, so the choice does
not depend on the size of micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..config.vl import AlgorithmConfig
from ..runtime.collectives import all_gather_object, all_reduce_sum
from ..runtime.seeding import derive_seed
from .policy_losses import LossInputs, TokenLoss, old_log_ratio, ppo_loss

T = torch.Tensor
ROUNDING = 1e-3  # log ratio whose sign may say nothing


@dataclass(frozen=True)
class ChoiceInputs:
    """What tokens are chosen by: one entry for each micro-batch of this rank.

    log_probs (B, A) of the rollouts' policy, advantages (B, A), masks (B, A) bool, sample_ids (B). seed: of the train
    batch, the same on every rank. counts: false where another rank of the sequence group counts the same samples.
    """

    log_probs: Sequence[T]
    advantages: Sequence[T]
    masks: Sequence[T]
    sample_ids: Sequence[T]
    seed: int
    counts: bool = True


def clip_cov_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """Clip-Cov: PPO clip, and no gradient through the chosen tokens. Raises ValueError where none were chosen by."""
    chosen, loss = _chosen(inputs, "clip_cov"), ppo_loss(inputs, config)
    return replace(loss, values=torch.where(chosen, 0.0, loss.values), clipped=loss.clipped | chosen)


def kl_cov_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """KL-Cov: -ratio * A without a clip; the chosen tokens pay kl_cov_coef * |log ratio|, below ROUNDING its square
    over that: else the sign of rounding would decide the first update."""
    chosen, log_ratio = _chosen(inputs, "kl_cov"), old_log_ratio(inputs)
    values = -log_ratio.exp() * inputs.advantages
    moved = log_ratio.abs()
    moved = torch.where(moved < ROUNDING, moved.square() / ROUNDING, moved)
    return TokenLoss(values + torch.where(chosen, config.kl_cov_coef * moved, 0.0), chosen)


def clip_cov_tokens(inputs: ChoiceInputs, config: AlgorithmConfig) -> list[T]:
    """cov_share of all tokens, drawn at random from those whose covariance lies between the bounds. A collective.

    A token's chance is made of the seed and its sample's id, so ranks that hold the same sample choose alike.
    """
    low, high = config.clip_cov_low, config.clip_cov_high
    products = _covariances(inputs)
    eligible = [mask & (each > low) & (each < high) for each, mask in zip(products, inputs.masks)]
    return _first(_chances(inputs), eligible, inputs, config.cov_share)


def kl_cov_tokens(inputs: ChoiceInputs, config: AlgorithmConfig) -> list[T]:
    """cov_share of all tokens, those of the largest covariance, as far as it is positive. A collective."""
    products = _covariances(inputs)
    eligible = [mask & (each > 0) for each, mask in zip(products, inputs.masks)]
    return _first([-each for each in products], eligible, inputs, config.cov_share)


def _chosen(inputs: LossInputs, name: str) -> T:
    if inputs.chosen is None:
        raise ValueError(f"policy_loss {name} needs the tokens that were chosen, which this batch does not have")
    return inputs.chosen


def _covariances(inputs: ChoiceInputs) -> list[T]:
    """(log p - mean) * (A - mean) of each token (B, A), with means over all tokens of all ranks. A collective."""
    triples = list(zip(inputs.log_probs, inputs.advantages, inputs.masks))
    own = [torch.stack([p[m].double().sum(), a[m].double().sum(), m.sum().double()]) for p, a, m in triples]
    total = all_reduce_sum(torch.stack(own).sum(dim=0))
    log_prob, advantage = (total[:2] / total[2].clamp(min=1)).tolist()
    return [(p.float() - log_prob) * (a.float() - advantage) for p, a, _ in triples]


def _chances(inputs: ChoiceInputs) -> list[T]:
    found = []
    for ids, mask in zip(inputs.sample_ids, inputs.masks):
        makers = (torch.Generator().manual_seed(derive_seed(inputs.seed, "clip_cov", each)) for each in ids.tolist())
        found.append(torch.stack([torch.rand(mask.shape[1], generator=make) for make in makers]).to(mask.device))
    return found


def _first(keys: Sequence[T], eligible: Sequence[T], inputs: ChoiceInputs, share: float) -> list[T]:
    """Of the eligible tokens the share of all (at least one) with the smallest keys, over all ranks; ties are kept."""
    own = torch.cat([key[each] for key, each in zip(keys, eligible)]).float().cpu()
    tokens = sum(int(mask.sum()) for mask in inputs.masks)
    everywhere = all_gather_object((own, tokens) if inputs.counts else (own[:0], 0))
    candidates = torch.cat([each for each, _ in everywhere])
    count = min(max(1, int(share * sum(number for _, number in everywhere))), len(candidates))
    if count == 0:
        return [torch.zeros_like(mask) for mask in inputs.masks]
    last = candidates.kthvalue(count).values.item()
    return [each & (key <= last) for key, each in zip(keys, eligible)]
