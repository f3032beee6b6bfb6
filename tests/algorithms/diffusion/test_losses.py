"""Exact facts about the diffusion losses."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.algorithms.diffusion.advantages import (
    decoupled_group_advantages,
    gathered_group_advantages,
    group_advantages,
    group_metrics,
)
from lightrft_visual.algorithms.diffusion.context import LossContext
from lightrft_visual.algorithms.diffusion.ddpo import DDPO, DPOK
from lightrft_visual.algorithms.diffusion.flow_dppo import FlowDPPO
from lightrft_visual.algorithms.diffusion.flow_grpo import FlowGRPO, gaussian_kl, guarded_log_ratio
from lightrft_visual.algorithms.diffusion.nft import nft_loss, old_policy_decay, optimality
from lightrft_visual.algorithms.diffusion.opd import OnPolicyDistillation
from lightrft_visual.algorithms.diffusion.temp_flow_grpo import TempFlowGRPO
from lightrft_visual.algorithms.policy_losses import clipped_surrogate
from lightrft_visual.rollout.diffusion_sampler import sde_step, transition


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- advantages --------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    rewards, groups = torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([9, 2, 9, 2])
    advantages = group_advantages(rewards, groups, torch.ones(4, dtype=torch.bool))
    unit = 1 / (1 + 1e-4)
    assert advantages.tolist() == pytest.approx([-unit, -unit, unit, unit])
    wide = group_advantages(rewards, groups, torch.ones(4, dtype=torch.bool), global_std=True)
    assert wide.tolist() == pytest.approx([-1 / (5**0.5 + 1e-4)] * 2 + [1 / (5**0.5 + 1e-4)] * 2)


def test_invalid_rewards_enter_no_statistic_and_get_no_advantage():
    rewards = torch.tensor([1.0, 3.0, float("nan"), 4.0])
    valid = torch.tensor([True, True, False, True])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 1]), valid)
    assert advantages.tolist() == pytest.approx([-1 / 1.0001, 1 / 1.0001, 0.0, 0.0])
    wide = group_advantages(rewards, torch.tensor([0, 0, 0, 1]), valid, global_std=True)
    unit = 1 / ((14 / 9) ** 0.5 + 1e-4)  # of 1, 3 and 4
    assert wide.tolist() == pytest.approx([-unit, unit, 0.0, 0.0])
    found = group_metrics(rewards, torch.tensor([0, 0, 0, 1]), valid)
    assert (found["group_size"], found["zero_std_ratio"], found["mean_reward_100"]) == (1.5, 0.5, 3.0)
    for whole in (False, True):
        none = group_advantages(rewards, torch.tensor([0, 0, 0, 1]), torch.zeros(4).bool(), global_std=whole)
        assert (none == 0).all()


def test_advantages_are_clamped():
    rewards = torch.zeros(64)
    rewards[0] = 1.0
    advantages = group_advantages(
        rewards, torch.zeros(64, dtype=torch.long), torch.ones(64, dtype=torch.bool), clip=2.0
    )
    assert advantages[0] == 2.0


def test_decoupled_rewards_are_gdpo_over_the_batch():
    groups, valid = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True] * 5 + [False])
    components = {"a": torch.tensor([3.0, 0, 0, 1, 1, 9]), "b": torch.tensor([0.0, 0.1, 0, math.nan, math.nan, 5])}
    weights = {"a": torch.ones(6), "b": torch.full((6,), 2.0)}
    high, low = 2**0.5, -(0.5**0.5)  # z-scores of one larger than two equal ones
    sums = torch.tensor([high + 2 * low, low + 2 * high, low + 2 * low, 0.0, 0.0])
    expected = (sums - sums.mean()) / sums.std(unbiased=False)
    found = decoupled_group_advantages(components, weights, groups, valid, clip=0)
    torch.testing.assert_close(found[:5], expected, rtol=1e-2, atol=1e-2)  # eps 1e-4 beside a std of 0.047
    assert found[5] == 0
    gathered, _ = gathered_group_advantages(torch.zeros(6), groups, valid, decoupled=(components, weights), clip=0)
    assert torch.equal(gathered, found)


def test_a_group_that_says_nothing_has_exactly_no_advantage():
    groups, valid = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, dtype=torch.bool)
    components = {"a": torch.tensor([0.1, 0.7, 0.3, 0.5, 0.5]), "b": torch.tensor([0.2, 0.2, 0.9, 0.4, 0.4])}
    weights = {"a": torch.ones(5), "b": torch.full((5,), 0.3)}
    found = decoupled_group_advantages(components, weights, groups, valid)
    assert (found[3:] == 0).all() and (found[:3] != 0).all()
    nothing = {"a": torch.zeros(5)}  # all weigh nothing
    for scored in ({}, components):
        assert (decoupled_group_advantages(scored, nothing, groups, valid) == 0).all()


# -- clipped loss, KL, guard -------------------------------------------------------------------------------------


def test_surrogate_clips_each_sign_on_its_own_side():
    log_ratios = torch.tensor([0.1, 0.1, -0.1, -0.1]).log1p()
    losses = clipped_surrogate(log_ratios.exp(), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.01, 0.01).values
    assert losses.tolist() == pytest.approx([-1.01, 1.1, -0.9, 0.99])


def test_kl_is_the_closed_form_and_the_forms_differ_by_dt():
    mean, reference = normal(3, 2, 4), normal(3, 2, 4, seed=1)
    std, dt = torch.full((3, 1, 1), 0.3, dtype=torch.float64), torch.tensor([-0.1, -0.2, -0.05], dtype=torch.float64)
    full = gaussian_kl(mean, reference, std, dt)
    closed = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, 0.3), torch.distributions.Normal(reference, 0.3)
    )
    torch.testing.assert_close(full, closed.flatten(1).mean(1), rtol=1e-12, atol=0)
    assert torch.equal(gaussian_kl(mean, reference, std, dt, "published"), full * dt.abs())


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_guard_leaves_the_noise_times_the_shift_of_the_mean(reduction):
    x, v_old, v, noise = (normal(3, 2, 4, seed=seed) for seed in range(4))
    old = sde_step(x, v_old, 0.6, 0.5, 0.7, noise=noise, reduction=reduction)
    new = sde_step(x, v, 0.6, 0.5, 0.7, prev_sample=old.prev, reduction=reduction)
    guarded = guarded_log_ratio(new.log_prob - old.log_prob, new.mean, old.mean, new.std, reduction)
    product = -(noise * (old.mean - new.mean)).flatten(1)
    torch.testing.assert_close(guarded, product.mean(1) if reduction == "mean" else product.sum(1))


class StandingStill:
    """A policy whose velocity is given, and whose reference has another one."""

    def __init__(self, v, v_reference):
        self.v, self.v_reference, self.base = v, v_reference, False

    def __call__(self, latents, timesteps, conditions, guidance_scale):
        return self.v_reference if self.base else self.v

    @contextmanager
    def reference(self):
        self.base = True
        yield
        self.base = False


@pytest.mark.parametrize("kind", (DDPO, DPOK))
def test_losses_of_ddim_steps_by_hand(kind):
    """DDPO: max(-A r, -A clip(r)); DPOK: -A log p + beta KL; both of the Gaussian of the step."""
    x, v, v_reference, noise, drift = (normal(2, 3, 4, seed=seed) for seed in range(5))
    loss, advantages = kind(noise_level=0.8, clip_range=1e-3, beta=0.01), torch.tensor([1.5, -0.5], dtype=torch.float64)
    old = sde_step(x, v + 0.1 * drift, 0.8, 0.7, 0.8, rule="ddim", noise=noise)
    rows = SimpleNamespace(
        x=x, x_next=old.prev, timesteps=torch.tensor([600.0, 600.0]), sigma=torch.tensor([0.8, 0.8]).double(),
        sigma_next=torch.tensor([0.7, 0.7]).double(), conditions={}, advantages=advantages, log_probs=old.log_prob,
        valid=torch.ones(2, dtype=torch.float64), rollout_means=None, kept=None,
    )  # fmt: skip
    policy = StandingStill(v, v_reference)
    found = loss.loss(LossContext(policy, policy), rows, 2.0).loss
    mean, std = transition(x, v, 0.8, 0.7, 0.8, rule="ddim")
    base, _ = transition(x, v_reference, 0.8, 0.7, 0.8, rule="ddim")
    spread = std.flatten()[0]
    log_prob = torch.distributions.Normal(mean, spread).log_prob(old.prev).flatten(1).mean(1)
    kl = ((mean - base) ** 2 / (2 * spread**2)).flatten(1).mean(1)
    ratio = (log_prob - old.log_prob).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 1e-3, 1 + 1e-3))
    policy_term = clipped if kind is DDPO else -advantages * log_prob
    assert float(found) == pytest.approx(float((policy_term + 0.01 * kl).sum() / 2), rel=1e-5)


def flow_rows(advantages, drift):
    """Rows of a rollout by velocities `v + drift`, and the present v."""
    x, v, noise, other = (normal(len(advantages), 3, 4, seed=seed) for seed in range(4))
    sigma, following = torch.full((len(x),), 0.6).double(), torch.full((len(x),), 0.5).double()
    old = sde_step(x, v + drift * other, sigma, following, 0.7, noise=noise)
    schedule = torch.tensor([1.0, 0.9, 0.6, 0.5, 0.0]).double().expand(len(x), -1)
    rows = SimpleNamespace(
        x=x, x_next=old.prev, timesteps=600 * torch.ones(len(x)), sigma=sigma, sigma_next=following, conditions={},
        advantages=torch.tensor(advantages).double(), log_probs=old.log_prob, rollout_means=old.mean,
        valid=torch.ones(len(x)).double(), steps=torch.full((len(x),), 2), schedule=schedule, kept=None,
    )  # fmt: skip
    return rows, v, old


@pytest.mark.parametrize("guard", [False, True])
def test_clip_fraction_is_the_share_of_samples_that_the_clip_decides(guard):
    """Each ratio is outside the range; only those on their advantage's side are clipped, and none without one."""
    rows, v, old = flow_rows([1.0, -1.0, 1.0, -1.0, 0.0, 2.0], 0.3)
    rows.valid[5] = 0.0
    loss = FlowGRPO(clip_range=1e-9, guard=guard)
    step = loss.replay(lambda *inputs: v, rows)
    raw = step.log_prob.float() - rows.log_probs.float()
    ratios = guarded_log_ratio(raw, step.mean, rows.rollout_means, step.std, loss.log_prob) if guard else raw
    decided = (ratios.expm1() * rows.advantages > 1e-9)[:5]
    assert (ratios.expm1().abs() > 1e-9).all() and 0 < int(decided.sum()) < 5
    found = loss.loss(LossContext(StandingStill(v, v), StandingStill(v, v)), rows, 5.0)
    assert float(found.means["clip_fraction"]) == pytest.approx(float(decided.float().mean()))


def test_ratios_of_the_policy_that_drew_are_exactly_one_whatever_the_replay_rounds():
    rows, v, _ = flow_rows([1.0, -1.0, 0.5], 0.3)
    policy = StandingStill(v, v)
    found = FlowGRPO(clip_range=1e-9).loss(LossContext(policy, policy, on_policy=True), rows, 1.0)
    assert float(found.loss) == -0.5 and float(found.maxima["logp_diff_max"]) > 0
    assert (float(found.means["ratio_mean"]), float(found.means["clip_fraction"])) == (1, 0)


def test_log_ratios_that_an_exponential_cannot_hold_leave_losses_finite():
    """Sums over pixels: a mean drift of .0014 over 65,000 of them is one of 90."""
    rows, v, _ = flow_rows([1.0, -1.0, 0.0], 0.3)
    rows.log_probs = rows.log_probs - 100
    context = LossContext(StandingStill(v, v), StandingStill(v, v))
    for loss in (FlowGRPO(clip_range=1e-4, beta=0.1), FlowDPPO(clip_range=1e-4, beta=0.1)):
        found = loss.loss(context, rows, 3.0)
        assert math.isfinite(found.loss) and float(found.maxima["logp_diff_max"]) > 90


def test_guarded_log_ratios_of_sums_are_those_of_the_whole_ones():
    """The guard adds what the sum of squares takes away: bounded before, nothing of the ratio would be left."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 65536, generator=generator) for _ in range(2))
    sigma, following = torch.full((2,), 0.6), torch.full((2,), 0.5)
    old = sde_step(
        x, v + 0.08, sigma, following, 0.7, reduction="sum", noise=torch.randn(2, 65536, generator=generator)
    )
    rows = SimpleNamespace(
        x=x, x_next=old.prev, timesteps=600 * torch.ones(2), sigma=sigma, sigma_next=following, conditions={},
        advantages=torch.tensor([1.0, -1.0]), log_probs=old.log_prob, rollout_means=old.mean, valid=torch.ones(2),
        steps=torch.full((2,), 2), schedule=torch.tensor([1.0, 0.9, 0.6, 0.5, 0.0]).expand(2, -1), kept=None,
    )  # fmt: skip
    loss = FlowGRPO(clip_range=1e6, guard=True, log_prob="sum")
    step = loss.replay(lambda *inputs: v, rows)
    raw = step.log_prob.float() - rows.log_probs.float()
    assert (raw < -20).all()
    ratios = guarded_log_ratio(raw, step.mean, old.mean, step.std, "sum").clamp(-20, 20).exp()
    found = loss.loss(LossContext(StandingStill(v, v), StandingStill(v, v)), rows, 2.0).loss
    weights = 1 / (sigma - following)
    assert float(found) == pytest.approx(float((-rows.advantages * ratios * weights).sum() / 2), rel=1e-4)


def test_the_kl_of_cps_steps_is_the_squared_distance_of_their_means():
    rows, v, _ = flow_rows([1.0, -1.0], 0.3)
    reference = normal(2, 3, 4, seed=9)
    policy, loss = StandingStill(v, reference), FlowGRPO(rule="cps", beta=0.1)
    found = loss.kl(LossContext(policy, policy), rows, loss.replay(policy, rows))
    mine, base = (transition(rows.x, each, 0.6, 0.5, 0.7, rule="cps")[0] for each in (v, reference))
    torch.testing.assert_close(found, (mine - base).square().flatten(1).mean(1), check_dtype=False)


def test_flow_dppo_masks_what_is_far_and_moves_farther():
    """Divergence (mu - mu_old)² / 2 s²; -A r, but 0 where it is at least delta and (r - 1) A > 0."""
    rows, v, old = flow_rows([1.0, -1.0, 1.0, -1.0, 2.0, -2.0], 0.3)
    policy = StandingStill(v, v)
    new = sde_step(rows.x, v, 0.6, 0.5, 0.7, prev_sample=old.prev)
    ratio = (new.log_prob - old.log_prob).exp()
    normals = torch.distributions.Normal(old.mean, new.std), torch.distributions.Normal(new.mean, new.std)
    divergence = torch.distributions.kl_divergence(*normals).flatten(1).mean(1)
    away = (ratio - 1) * rows.advantages > 0
    for threshold in (1e-9, float(divergence.median()), 1e9):
        found = FlowDPPO(threshold=threshold).loss(LossContext(policy, policy), rows, 6.0)
        dropped = away & (divergence >= threshold)
        expected = torch.where(dropped, 0.0, -rows.advantages * ratio).sum() / 6
        assert float(found.loss) == pytest.approx(float(expected), rel=1e-5)
        assert float(found.means["clip_fraction"]) == pytest.approx(float(dropped.float().mean()))
        assert float(found.means["kl_to_rollout"]) == pytest.approx(float(divergence.mean()), rel=1e-5)
    assert 0 < int(away.sum()) < 6


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_distillation_is_the_kl_of_the_steps(beta):
    """(mu - mu_teacher)² / 2 s² of Flow-GRPO's step, whatever the advantages; an invalid sample teaches nothing."""
    rows, v, old = flow_rows([1.0, 0.0, -9.0], 0.3)
    rows.valid = torch.tensor([1.0, 1.0, 0.0]).double()
    reference, taught = normal(3, 3, 4, seed=8), normal(3, 3, 4, seed=9)
    policy = StandingStill(v.clone().requires_grad_(), reference)
    teacher = StandingStill(taught, taught)
    found = OnPolicyDistillation(beta=beta).loss(LossContext(policy, policy, teacher=teacher), rows, 2.0)
    steps = [sde_step(rows.x, each, 0.6, 0.5, 0.7, prev_sample=old.prev) for each in (v, taught, reference)]
    mine, theirs, base = (torch.distributions.Normal(step.mean, step.std) for step in steps)
    divergence, to_base = (
        torch.distributions.kl_divergence(mine, other).flatten(1).mean(1)[:2] for other in (theirs, base)
    )
    assert float(found.loss.detach()) == pytest.approx(float((divergence + beta * to_base).sum() / 2), rel=1e-5)
    assert float(found.means["teacher_kl"]) == pytest.approx(float(divergence.mean()), rel=1e-5)
    found.loss.backward()
    with pytest.raises(ValueError, match="teacher"):
        OnPolicyDistillation().loss(LossContext(policy, policy), rows, 2.0)


def test_temp_flow_weights_steps_by_their_noise_and_not_the_kl():
    """Norm(sigma_t sqrt(dt)): over the mean of the stochastic steps, of which the last is none."""
    rows, v, _ = flow_rows([1.0, -0.5], 0.1)
    level = 0.7
    stds = [
        level * math.sqrt(1.0 / (1 - 0.9) * 0.1),  # at sigma 1 the next sigma divides
        level * math.sqrt(0.9 / 0.1 * 0.3),
        level * math.sqrt(0.6 / 0.4 * 0.1),
    ]
    loss, rows_at = TempFlowGRPO(noise_level=level), SimpleNamespace(steps=torch.tensor([0, 2]), schedule=rows.schedule)
    weights = loss.step_weights(rows_at)
    assert weights.tolist() == pytest.approx([each / (sum(stds) / 3) for each in (stds[0], stds[2])], rel=1e-6)
    rows_at.schedule = torch.cat([rows.schedule, torch.zeros(2, 1)], dim=1)  # as of --sigmas with a last 0
    assert torch.equal(loss.step_weights(rows_at), weights)
    policy = StandingStill(v, normal(2, 3, 4, seed=9))
    plain, with_kl, weighted = (
        kind(noise_level=level, clip_range=0.1, beta=beta).loss(LossContext(policy, policy), rows, 2.0).loss
        for kind, beta in ((FlowGRPO, 0.0), (FlowGRPO, 0.2), (TempFlowGRPO, 0.2))
    )
    assert float(weighted) == pytest.approx(float(plain * weights[1] + (with_kl - plain)), rel=1e-6)
    assert with_kl - plain > 1e-3  # which the authors' code leaves without a weight


# -- DiffusionNFT ------------------------------------------------------------------------------------------------


def nft_case(r):
    data, noise, v_old = normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    time = torch.tensor([0.3, 0.8], dtype=torch.float64)
    mixed = (1 - time.view(-1, 1, 1)) * data + time.view(-1, 1, 1) * noise
    v = v_old.clone().requires_grad_(True)
    return nft_loss(v, v_old, mixed, data, time, torch.full((2,), r, dtype=torch.float64)), v, v_old, mixed, data, time


@pytest.mark.parametrize("r", (0.0, 0.2, 0.5, 0.9, 1.0))
def test_nft_gradient_at_the_old_policy(r):
    losses, v, v_old, mixed, data, time = nft_case(r)
    torch.testing.assert_close(losses, nft_case(1 - r)[0], rtol=0, atol=1e-15)
    losses.sum().backward()
    when = time.view(-1, 1, 1)
    difference = mixed - when * v_old - data
    weight = difference.abs().flatten(1).mean(1).view(-1, 1, 1)
    expected = (2 * r - 1) * (-2 * when * difference / weight) / 12
    torch.testing.assert_close(v.grad, expected, rtol=1e-10, atol=1e-14)
    if r == 0.5:
        assert not v.grad.abs().gt(1e-15).any()


def test_nft_loss_by_hand():
    """One number a sample: data 1, noise 3, t 0.5, so xt = 2; v 2.5, v_old 1, beta 0.5, A_max 5, r 0.8."""
    mixed, data = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    found = nft_loss(
        torch.tensor([[2.5]]), torch.tensor([[1.0]]), mixed, data, torch.tensor([0.5]), torch.tensor([0.8]),
        beta=0.5, adv_max=5.0,
    )  # fmt: skip
    # v+ = 1.75, error 2 - .875 - 1 = .125; v- = .25, error 2 - .125 - 1 = .875; an error over its own size is its size
    assert float(found) == pytest.approx((0.8 * 0.125 + 0.2 * 0.875) / 0.5 * 5.0)


def test_optimality_by_mode():
    advantages = torch.tensor([-10.0, -2.5, 0.0, 2.5, 10.0])
    assert optimality(advantages, 5.0).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert optimality(advantages, 5.0, "positive_only").tolist() == [0.5, 0.5, 0.5, 0.75, 1.0]
    assert optimality(advantages, 5.0, "negative_only").tolist() == [0.0, 0.25, 0.5, 0.5, 0.5]
    assert optimality(advantages, 1.0, "one_only").tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert optimality(advantages, 1.0, "binary").tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_decay_types():
    assert [old_policy_decay(step, 0) for step in (0, 1000)] == [0.0, 0.0]
    assert [old_policy_decay(step, 1) for step in (0, 100, 1000)] == [0.0, 0.1, 0.5]
    assert [old_policy_decay(step, 2) for step in (74, 75, 175, 1000)] == [0.0, 0.0, 0.75, 0.999]
    assert [old_policy_decay(step, 3) for step in (0, 100, 300, 1000)] == [0.0, 0.1, 0.3, 0.3]  # AWM's and DGPO's
