"""What DGPO and Diffusion-DPO share: one logistic loss a group, on the weighted sum of its samples' matching errors.

With Delta_i = |v - u_i|² - |v_ref - u_i|² of sample i at the noise and the timestep that its group shares, and weights
A that say which samples are preferred (+) and which are not (-), a group of G samples has

    S = beta / G sum_i A_i Delta_i,   loss = -log sigmoid(-S)
    gradient of the loss = sigmoid(S) beta / G sum_i A_i (gradient of |v - u_i|²)

The gradient is a sum over samples, once S is known: a group need not lie in one forward pass, nor on one rank.

DGPO (arXiv 2510.08425): A are the advantages of a prompt's group, which sum to 0, so that the partition function
cancels. No policy gradient, so rollouts are plain ODE samples. The loss is divided by beta, as its authors scale it:
beta sharpens the sigmoid only, and kl_beta keeps its published values.

Diffusion-DPO (arXiv 2311.12908): G = 2 and A = 1, -1: -log sigmoid(-beta / 2 (Delta_preferred - Delta_other)), errors
averaged over latent dimensions, as in its authors' code. Their paper writes beta T omega for the present factor.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import logsigmoid

from ...config.diffusion import DiffusionRunConfig
from ...experience.types import ExperienceDiffusion
from ...runtime import collectives
from ...runtime.host_copies import on_host, to_device
from ..loss_terms import LossOutputs
from .context import ConfiguredLoss, LossContext, asked, squared_error, summed, weighted_mean
from .denoising_batch import DenoisingBatch, batch_at

T = torch.Tensor


class Forward(NamedTuple):
    """Samples, and the steps (B, k) at which they go through the model together.

    experts: names of the networks that serve a sample of any rank there.
    """

    experience: ExperienceDiffusion
    steps: T
    experts: frozenset[str] = frozenset()

    def batch(self) -> DenoisingBatch:
        """Its rows."""
        return batch_at(self.experience, self.steps)


class Coupled(Protocol):
    """A loss whose rows need a sum over their group."""

    def terms(self, context: LossContext, batch: DenoisingBatch) -> T:
        """(M, …) of each row: what the sums of groups are made of."""
        ...


class GroupPreference(ConfiguredLoss):
    """The loss above with beta dpo_beta. scale: what it is multiplied by; dpo_reference: 'base', or 'old' for the
    rollout policy; beta: weight of |v - v_base|²."""

    def __init__(self, config: DiffusionRunConfig, group_size: int, scale: float = 1.0) -> None:
        super().__init__(config)
        self.group_size, self.scale = group_size, scale

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Every sample's share of its group's loss; with `coupling` (M), the sum of A Delta over the group."""
        s, (inputs, target) = self.settings, asked(context, batch, self.guidance_scale, shared=True)
        whole = batch.coupling is None
        base = context.by_reference(inputs) if s.beta > 0 or (whole and s.dpo_reference == "base") else None
        other = context.by_rollouts(inputs) if whole and s.dpo_reference == "old" else base
        v = context.velocity(*inputs)
        error = squared_error(v, target)
        sums = sums_of_groups(self._terms(error.detach(), other, target, batch), batch) if whole else batch.coupling
        exponent = s.dpo_beta / self.group_size * sums
        compared = batch.valid.bool() & (batch.advantages != 0)  # the others are on neither side
        value = torch.where(compared, -logsigmoid(-exponent), 0.0)
        pull = exponent.sigmoid() * s.dpo_beta * batch.advantages
        losses = self.scale * (value + pull * (error - error.detach()))
        means = {
            "preference_loss": weighted_mean(value, compared),
            "preference_accuracy": weighted_mean((exponent < 0).float(), compared),
            "matching_error": weighted_mean(error.detach(), batch.valid),
        }
        kl = squared_error(v, base) if s.beta > 0 else None
        outputs = summed(losses, batch.valid, denominator, means, kl, s.beta)
        outputs.counts = dict.fromkeys(("preference_loss", "preference_accuracy"), compared.sum())
        return outputs

    @torch.no_grad()
    def terms(self, context: LossContext, batch: DenoisingBatch) -> T:
        """(M) A Delta of each row, 0 of an invalid one: what its group's sum is made of."""
        inputs, target = asked(context, batch, self.guidance_scale, shared=True)
        other = context.by_rollouts(inputs) if self.settings.dpo_reference == "old" else context.by_reference(inputs)
        return self._terms(squared_error(context.velocity(*inputs), target), other, target, batch)

    def _terms(self, error: T, other: T, target: T, batch: DenoisingBatch) -> T:
        return batch.advantages * (error - squared_error(other, target)) * batch.valid


def sums_of_groups(terms: T, batch: DenoisingBatch) -> T:
    """(M, …): for every row the sum of the terms (M, …) of its group at its step."""
    keys = torch.stack([batch.group_id, batch.steps.to(batch.group_id.device)], dim=1)
    _, indices = torch.unique(keys, dim=0, return_inverse=True)
    count, indices = int(indices.max()) + 1, to_device(indices, terms.device)
    return terms.new_zeros(count, *terms.shape[1:]).index_add_(0, indices, terms)[indices]


def couplings(loss: Coupled, context: LossContext, forwards: Sequence[Forward]) -> list[T | None]:
    """Sums of groups that lie in several forward passes or ranks. A collective.

    They need the model's and the reference's answers first: one more forward without gradient for each.

    Args:
        loss: whose `terms` are summed.
        context: of the update.
        forwards: the forward passes of this rank's update.

    Returns:
        For each forward the sums of its rows' groups (M, …); None for all of them where every group lies in one
        forward, which then sums itself.
    """
    if groups_are_whole(forwards):
        return [None] * len(forwards)
    parts, found = [forward.batch() for forward in forwards], []
    sums: dict[tuple[int, int], T] = defaultdict(lambda: torch.zeros(()))
    for forward, part in zip(forwards, parts):
        with context.policy.running(forward.experts):
            found.append(loss.terms(context, part))
    terms = torch.cat(found).cpu()  # the device is waited for once
    keys = [key for part in parts for key in _keys(part)]
    for of_rank in collectives.all_gather_object((keys, terms)):
        for key, value in zip(*of_rank):
            sums[key] = sums[key] + value
    whole = [torch.stack([sums[key] for key in _keys(part)]) for part in parts]
    return [to_device(each.to(part.advantages.dtype), part.advantages.device) for each, part in zip(whole, parts)]


def groups_are_whole(forwards: Sequence[Forward]) -> bool:
    """Whether no group of an update is cut by forward passes or ranks. A collective."""
    own = {id(each): Counter(each.group_id[on_host(each.valid).bool()].tolist()) for each, *_ in forwards}
    parts = [each for rank in collectives.all_gather_object([*own.values()]) for each in rank]
    counts: Counter[int] = sum(parts, Counter())
    return all(counts[group] == number for each in parts for group, number in each.items())


def _keys(batch: DenoisingBatch) -> list[tuple[int, int]]:
    return list(zip(batch.group_id.tolist(), batch.steps.tolist()))
