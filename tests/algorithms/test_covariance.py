"""Clip-Cov and KL-Cov: their losses by hand, and which tokens are chosen."""

import math
from dataclasses import replace

import pytest
import torch

from lightrft_visual.algorithms import covariance
from lightrft_visual.algorithms.covariance import ChoiceInputs, clip_cov_tokens, kl_cov_tokens
from lightrft_visual.algorithms.policy_losses import LossDenominators, LossInputs, policy_loss
from lightrft_visual.config.vl import AlgorithmConfig


def pair(name, advantage=1.0, ratio=1.1, **config):
    """Two tokens of one ratio, the second one chosen: (loss, gradients, clip fraction)."""
    log_probs = torch.full((1, 2), math.log(ratio), requires_grad=True)
    chosen = torch.tensor([[False, True]])
    inputs = LossInputs(log_probs, torch.zeros(1, 2), torch.full((1, 2), advantage), torch.ones(1, 2).bool())
    outputs = policy_loss(
        replace(inputs, chosen=chosen), AlgorithmConfig(policy_loss=name, **config), LossDenominators(2, 1, 2)
    )
    outputs.loss.backward()
    return outputs.loss.item(), log_probs.grad[0].tolist(), outputs.metrics["clip_frac"].item()


def test_clip_cov_by_hand():
    loss, slopes, clipped = pair("clip_cov", 2.0)
    assert loss == pytest.approx(-2.2 / 2) and slopes == pytest.approx([-1.1, 0.0]) and clipped == 0.5
    assert pair("clip_cov", 2.0, eps_clip_high=0.05)[1:] == ([0.0, 0.0], 1.0)  # the clip stays for the others


def test_kl_cov_by_hand():
    loss, slopes, clipped = pair("kl_cov", 2.0, kl_cov_coef=3.0)
    assert loss == pytest.approx((-2.2 + (-2.2 + 3 * math.log(1.1))) / 2)
    assert slopes == pytest.approx([-1.1, (-2.2 + 3) / 2]) and clipped == 0.5


@pytest.mark.parametrize("rounding", [0.0, 2.4e-7, -2.4e-7])
def test_kl_cov_of_samples_of_the_policy_itself_is_the_policy_gradient_whatever_the_rounding(rounding):
    assert pair("kl_cov", 2.0, 1 + rounding)[1] == pytest.approx([-1.0, -1.0], abs=1e-3)


def choices(size=8, junk=0.0):
    """Eight samples of five tokens with a hole each, cut into micro-batches of `size`."""
    make = torch.Generator().manual_seed(2)
    log_probs, advantages = (torch.randn(8, 5, generator=make) for _ in range(2))
    mask = torch.rand(8, 5, generator=make) > 0.3
    log_probs, advantages = (torch.where(mask, each, junk) for each in (log_probs, advantages))
    cut = [each.split(size) for each in (log_probs, advantages, mask, torch.arange(8))]
    return ChoiceInputs(*cut, seed=11)


def covariances():
    inputs = choices()
    log_probs, advantages, mask = inputs.log_probs[0], inputs.advantages[0], inputs.masks[0]
    return (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean()), mask


def test_kl_cov_takes_the_largest_covariances():
    products, mask = covariances()
    found = kl_cov_tokens(choices(), AlgorithmConfig(policy_loss="kl_cov", cov_share=0.2))[0]
    count = int(0.2 * mask.sum())
    assert found.sum() == count and not (found & ~mask).any()
    assert products[found].min() >= products[mask].topk(count).values.min()
    least = kl_cov_tokens(choices(), AlgorithmConfig(policy_loss="kl_cov"))[0]  # a share of less than one token
    assert least.sum() == 1 and products[least].item() == products[mask].max()
    every = kl_cov_tokens(choices(), AlgorithmConfig(policy_loss="kl_cov", cov_share=1.0))[0]
    assert (every == (mask & (products > 0))).all()


def test_clip_cov_draws_among_the_eligible():
    products, mask = covariances()
    eligible = mask & (products > 0.1) & (products < 1.5)
    config = AlgorithmConfig(policy_loss="clip_cov", clip_cov_low=0.1, clip_cov_high=1.5, cov_share=0.1)
    drawn = [clip_cov_tokens(replace(choices(), seed=seed), config)[0] for seed in range(20)]
    assert all(found.sum() == int(0.1 * mask.sum()) and not (found & ~eligible).any() for found in drawn)
    assert torch.stack(drawn).any(dim=0).sum() > int(0.1 * mask.sum())  # not always the same ones
    none = replace(config, clip_cov_low=90.0, clip_cov_high=91.0)
    assert not clip_cov_tokens(choices(), none)[0].any()
    every = replace(config, cov_share=1.0)
    assert (clip_cov_tokens(choices(), every)[0] == eligible).all()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_neither_the_cut_into_micro_batches_nor_what_is_masked_changes_the_choice(name, junk):
    choose = {"clip_cov": clip_cov_tokens, "kl_cov": kl_cov_tokens}[name]
    config = AlgorithmConfig(policy_loss=name, cov_share=0.2, clip_cov_low=0.0)
    wanted = choose(choices(), config)[0]
    assert wanted.any()
    for size in (8, 3, 1):
        assert (torch.cat(choose(choices(size, junk), config)) == wanted).all()


def test_a_batch_without_tokens_chooses_none():
    empty = ChoiceInputs([torch.zeros(1, 2)], [torch.zeros(1, 2)], [torch.zeros(1, 2).bool()], [torch.zeros(1)], 0)
    assert not kl_cov_tokens(empty, AlgorithmConfig(policy_loss="kl_cov"))[0].any()


@pytest.mark.parametrize("choose", [clip_cov_tokens, kl_cov_tokens])
def test_ranks_that_hold_the_same_samples_choose_as_one_rank_does(choose, monkeypatch):
    inputs, config = choices(), AlgorithmConfig(cov_share=0.1, clip_cov_low=-9.0, clip_cov_high=9.0)
    told = []
    monkeypatch.setattr(covariance, "all_gather_object", lambda own: told.append(own) or told)
    alone = choose(inputs, config)
    beside = choose(replace(inputs, counts=False), config)  # the first rank's words are heard again
    assert len(told) == 2 and torch.equal(beside[0], alone[0])
    assert int(choose(inputs, config)[0].sum()) == int(alone[0].sum()) + 1  # had both counted: half of 5 tokens, up
