"""Losses and masks by the distance from the policy that drew the tokens: DPPO, VESPO, the off-policy sequence mask.

That policy is the engine's where the batch has its log-probs, else the trainer's of before the first update. What the
engine computes otherwise than the trainer thus counts as distance too.
"""

import torch

from ..config.vl import AlgorithmConfig
from .policy_losses import MAX_LOG_RATIO, LossInputs, TokenLoss, clip_high, sample_mean

T = torch.Tensor

MAX_WEIGHT = 10.0  # of a token in DPPO, as in its authors' code
TINY = 1e-8  # what is left for all other tokens beside a certain one


def dppo_tv_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """DPPO with binary total variation (arXiv 2602.04879): tokens whose probability moved too far leave the loss.

    For A > 0 the bound is p - q > eps_clip_high, else q - p > eps_clip, with p the policy's and q the drawing policy's
    probability of the token. Rare tokens may so move by a large ratio, frequent ones by a small one.
    """
    shift = _probability(inputs.log_probs.detach()) - _probability(drawn_log_probs(inputs))
    return _masked_gradient(inputs, shift > clip_high(config), -shift > config.eps_clip)


def dppo_kl_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """DPPO with binary KL (arXiv 2602.04879): as `dppo_tv_loss`, by q log(q/p) + (1 - q) log((1 - q)/(1 - p))."""
    log_p, log_q = inputs.log_probs.detach().clamp(max=0), drawn_log_probs(inputs).clamp(max=0)
    other_p, other_q = ((-torch.expm1(each)).clamp(min=TINY) for each in (log_p, log_q))
    divergence = log_q.exp() * (log_q - log_p) + other_q * (other_q / other_p).log()
    up = (divergence > clip_high(config)) & (log_p > log_q)
    return _masked_gradient(inputs, up, (divergence > config.eps_clip) & (log_p < log_q))


def _masked_gradient(inputs: LossInputs, too_high: T, too_low: T) -> TokenLoss:
    """-A * min(ratio, 10) * log p without gradient through the weight; nothing where a token has moved too far."""
    ratio = (inputs.log_probs.detach() - drawn_log_probs(inputs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    left_out = torch.where(inputs.advantages > 0, too_high, too_low) & (inputs.advantages != 0)
    weight = torch.where(left_out, 0.0, ratio.clamp(max=MAX_WEIGHT))
    return TokenLoss(-inputs.advantages * weight * inputs.log_probs, left_out)


def vespo_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """VESPO (arXiv 2602.10693): -phi(W) A log p with phi(W) = W^k exp(lambda (1 - W)), without gradient through phi.

    W is the product of the sequence's ratios, with no mean over its length. k and lambda depend on the sign of the
    sequence's advantage. clipped: the tokens of sequences that keep less than half of their gradient.
    """
    log_ratio = (inputs.log_probs.detach() - drawn_log_probs(inputs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_weight = log_ratio.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    good = sample_mean(inputs.advantages, inputs.action_mask).unsqueeze(1) >= 0
    power = torch.where(good, config.vespo_k_pos, config.vespo_k_neg)
    decay = torch.where(good, config.vespo_lambda_pos, config.vespo_lambda_neg)
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    clipped = (phi < 0.5) & (inputs.advantages != 0)
    return TokenLoss(-phi * inputs.advantages * inputs.log_probs, clipped)


def off_policy_sequences(inputs: LossInputs, config: AlgorithmConfig) -> T:
    """Off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556), for `off_policy_delta`: the tokens that stay.

    Those of negative advantage go where the sequence's mean of log q - log p is above the bound: mistakes that the
    policy would hardly make any more.
    """
    distance = sample_mean(drawn_log_probs(inputs) - inputs.log_probs.detach(), inputs.action_mask)
    return (inputs.advantages >= 0) | (distance <= config.off_policy_delta).unsqueeze(1)


def drawn_log_probs(inputs: LossInputs) -> T:
    """log q (B, A) of the policy that drew the tokens."""
    return inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs


def _probability(log_probs: T) -> T:
    return log_probs.clamp(max=0).exp()
