"""Losses on finished samples against their papers' formulas, for flow matching and for DDIM models."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.algorithms.diffusion.awm import AWM
from lightrft_visual.algorithms.diffusion.context import (
    LossContext,
    asked,
    forward_noise,
    scaled_error,
    squared_error,
)
from lightrft_visual.algorithms.diffusion.crd import CenteredReward
from lightrft_visual.algorithms.diffusion.diffusion_dpo import PAIR, ranked_pairs
from lightrft_visual.algorithms.diffusion.nft import DiffusionNFT
from lightrft_visual.algorithms.diffusion.preference import GroupPreference, sums_of_groups
from lightrft_visual.algorithms.diffusion.rwr import RewardWeighted
from lightrft_visual.config.algorithm import DiffusionAlgorithmConfig

SHAPE = (3, 2, 2)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(kind, *more, **settings):
    """A loss by these settings of the algorithm. more: what else it is made with."""
    own = DiffusionAlgorithmConfig(**{"beta": 0.0, "clip_range": 1.0} | settings)
    return kind(SimpleNamespace(algorithm=own, sampling=SimpleNamespace(guidance_scale=1.0), offline=False), *more)


class Answers:
    """A policy whose three sets of weights answer with tensors of their own."""

    def __init__(self, count, prediction="flow"):
        self.own = normal(count, *SHAPE, seed=11).requires_grad_(True)
        self.kept = {"base": normal(count, *SHAPE, seed=12), "old": normal(count, *SHAPE, seed=13)}
        self.family, self.weights, self.asked = SimpleNamespace(prediction=prediction), "own", []

    def __call__(self, latents, timesteps, conditions, guidance_scale):
        self.asked.append(latents)
        return self.own if self.weights == "own" else self.kept[self.weights]

    @contextmanager
    def lent(self, name):
        self.weights = name
        yield
        self.weights = "own"

    def context(self):
        self.reference = lambda: self.lent("base")
        return LossContext(self, self, SimpleNamespace(swapped=lambda: self.lent("old")), seed=5)


def rows(advantages, sigma=0.6, groups=None, valid=None):
    count = len(advantages)
    return SimpleNamespace(
        data=normal(count, *SHAPE), sigma=torch.full((count,), sigma, dtype=torch.float64), conditions={},
        timesteps=torch.full((count,), 1000 * sigma), steps=torch.ones(count, dtype=torch.long),
        advantages=torch.tensor(advantages, dtype=torch.float64), sample_id=torch.arange(count),
        group_id=torch.zeros(count, dtype=torch.long) if groups is None else torch.tensor(groups),
        valid=torch.tensor(valid or [True] * count), coupling=None,
    )  # fmt: skip


def gradient_where_equal(found, expected, policy):
    """Of both losses, which are equal as their gradients are."""
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad(each, policy.own, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(mine, theirs)
    return mine


# -- the forward process -----------------------------------------------------------------------------------------


def told(batch, prediction):
    """(the samples with noise, what the model should answer)."""
    (mixed, *_), target = asked(Answers(2, prediction).context(), batch, 1.0)
    return mixed, target


def test_forward_process_of_each_prediction():
    batch = rows([0.0] * 2)
    data, noise = batch.data, forward_noise(5, batch)
    flow, target = told(batch, "flow")
    ddim, ddim_target = told(batch, "epsilon")
    torch.testing.assert_close(flow, 0.4 * data + 0.6 * noise)
    assert torch.equal(target, noise - data) and torch.equal(ddim_target, noise)
    torch.testing.assert_close(ddim, 0.8 * data + 0.6 * noise)
    # the flow target takes the noise out again: x - sigma v = data
    torch.testing.assert_close(flow - 0.6 * target, data)


def test_noise_is_a_samples_own_or_its_groups():
    batch = rows([0.0] * 4, groups=[7, 7, 9, 9])
    own, shared = forward_noise(3, batch), forward_noise(3, batch, shared=True)
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4
    assert torch.equal(shared[0], shared[1]) and torch.equal(shared[2], shared[3])
    assert not torch.equal(shared[0], shared[2])
    assert torch.equal(own, forward_noise(3, batch)) and not torch.equal(own, forward_noise(4, batch))


def test_no_error_over_its_own_size_is_none():
    predicted = normal(2, *SHAPE).requires_grad_()
    found = scaled_error(predicted, predicted.detach())
    found.sum().backward()
    assert found.tolist() == [0, 0] and not predicted.grad.any()


# -- AWM ---------------------------------------------------------------------------------------------------------


def test_weightings_by_hand():
    error, sigma = torch.tensor([0.0016, 16.0]).double(), torch.tensor([0.5, 0.25]).double()
    assert of(AWM, awm_weighting="uniform").log_prob(error, sigma).tolist() == pytest.approx([-0.0016, -16])
    assert of(AWM, awm_weighting="time").log_prob(error, sigma).tolist() == pytest.approx([-0.0008, -4])
    assert of(AWM, awm_weighting="time_squared").log_prob(error, sigma).tolist() == pytest.approx([-0.0004, -1])
    tiny = 1e-10**0.25
    huber = [-0.5 * (0.2 - tiny) / 0.25, -0.25 * (2 - tiny) / 0.25]
    assert of(AWM).log_prob(error, sigma).tolist() == pytest.approx(huber, rel=1e-6)


@pytest.mark.parametrize("prediction", ("flow", "epsilon"))
@pytest.mark.parametrize("clip", (1e-3, 10.0))
def test_awm_loss_by_the_papers_formula(prediction, clip):
    """max(-A r, -A clip(r)) + beta |v - v_ref|² + old_beta |v - v_old|², r = exp(-w |v - u|² + w |v_old - u|²)."""
    policy, batch = Answers(3, prediction), rows([10.0, -1.0, 2.0], valid=[True, True, False])
    context = policy.context()
    loss = of(AWM, awm_weighting="time", clip_range=clip, beta=0.2, old_beta=0.3)
    found = loss.loss(context, batch, 2.0)
    target = asked(context, batch, 1.0)[1]

    def error(v, u):
        return ((v - u) ** 2).flatten(1).mean(1)

    v, base, old = policy.own, policy.kept["base"], policy.kept["old"]
    ratio = (-0.6 * error(v, target) + 0.6 * error(old, target)).exp()
    advantage = torch.tensor([1.0, -0.2, 0.4]).double()  # clamped to 5, over 5
    terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    terms = terms + 0.2 * error(v, base) + 0.3 * error(v, old)
    torch.testing.assert_close(found.loss, terms[:2].sum() / 2)
    decided = (advantage * (ratio - ratio.clamp(1 - clip, 1 + clip)) > 0)[:2]
    assert float(found.means["clip_fraction"]) == float(decided.float().mean())
    assert float(found.means["kl"]) == pytest.approx(float(error(v.detach(), base)[:2].mean()))
    assert all(torch.equal(policy.asked[0], other) for other in policy.asked)  # three answers to one question


def test_awm_at_the_rollout_policy_is_pretrainings_gradient_times_the_advantage():
    policy, batch = Answers(2), rows([5.0, -2.5])
    policy.kept["old"] = policy.own.detach().clone()
    context = policy.context()
    of(AWM, awm_weighting="uniform").loss(context, batch, 1.0).loss.backward()
    expected = torch.autograd.grad(
        (torch.tensor([1.0, -0.5]).double() * squared_error(policy.own, asked(context, batch, 1.0)[1])).sum(),
        policy.own,
    )[0]
    torch.testing.assert_close(policy.own.grad, expected)


@pytest.mark.parametrize("loss", (AWM, CenteredReward, DiffusionNFT))
def test_losses_ask_for_the_rollout_policy(loss):
    policy = Answers(1)
    with pytest.raises(ValueError, match="rollout policy"):
        of(loss).loss(LossContext(policy, policy), rows([1.0]), 1.0)


# -- reward-weighted regression ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ("flow", "epsilon"))
def test_reward_weighted_regression_by_hand(prediction):
    policy, batch = Answers(2, prediction), rows([1.0, -0.5])
    context = policy.context()
    found = of(RewardWeighted, rwr_temperature=0.5, beta=0.1).loss(context, batch, 2.0)
    target = asked(context, batch, 1.0)[1]
    error = ((policy.own - target) ** 2).flatten(1).mean(1)
    kl = ((policy.own - policy.kept["base"]) ** 2).flatten(1).mean(1)
    expected = (torch.tensor([math.exp(2), math.exp(-1)]).double() * error + 0.1 * kl).sum() / 2
    torch.testing.assert_close(found.loss, expected)


# -- preferences: DGPO and Diffusion-DPO -------------------------------------------------------------------------


def group_loss(policy, context, batch, beta, size, against="base"):
    """-log sigmoid(-S) of every group, straight from the papers, averaged over groups."""
    target = asked(context, batch, 1.0, shared=True)[1]
    gained = ((policy.own - target) ** 2 - (policy.kept[against] - target) ** 2).flatten(1).mean(1)
    total = 0
    groups = batch.group_id.unique()
    for group in groups:
        mine = batch.group_id == group
        total = total - torch.nn.functional.logsigmoid(-beta / size * (batch.advantages * gained)[mine].sum())
    return total / len(groups)


@pytest.mark.parametrize("prediction", ("flow", "epsilon"))
@pytest.mark.parametrize("against", ("base", "old"))
def test_dgpo_is_the_papers_loss_and_gradient(prediction, against):
    policy = Answers(6, prediction)
    batch = rows([1.0, -0.25, -0.75, 2.0, -1.5, -0.5], groups=[4, 4, 4, 2, 2, 2])
    context = policy.context()
    found = of(GroupPreference, 3, 1 / 3.0, dpo_beta=3.0, dpo_reference=against).loss(context, batch, 6.0).loss
    expected = group_loss(policy, context, batch, 3.0, 3, against) / 3.0
    assert gradient_where_equal(found, expected, policy).abs().max() > 1e-3


@pytest.mark.parametrize("prediction", ("flow", "epsilon"))
def test_diffusion_dpo_is_the_authors_form(prediction):
    """-log sigmoid(-beta / 2 (model difference - reference difference)) of mean squared errors."""
    policy, batch = Answers(4, prediction), rows([1.0, -1.0, -1.0, 1.0], groups=[0, 0, 1, 1])
    context = policy.context()
    found = of(GroupPreference, PAIR, dpo_beta=5.0, beta=0.5).loss(context, batch, 4.0)
    target = asked(context, batch, 1.0, shared=True)[1]

    def error(v):
        return ((v - target) ** 2).flatten(1).mean(1)

    model, base = error(policy.own), error(policy.kept["base"])
    inside = [-0.5 * 5.0 * ((model[good] - model[bad]) - (base[good] - base[bad])) for good, bad in ((0, 1), (3, 2))]
    preference = -torch.nn.functional.logsigmoid(torch.stack(inside)).mean()
    kl = ((policy.own - policy.kept["base"]) ** 2).mean()
    gradient_where_equal(found.loss, preference + 0.5 * kl, policy)
    assert float(found.means["preference_accuracy"]) == sum(float(each.detach()) > 0 for each in inside) / 2


# -- CRD ---------------------------------------------------------------------------------------------------------


def crd_loss(policy, context, batch, beta, adv_max, kl_beta):
    """The formula of the module's docstring, group by group, over valid samples."""
    target = asked(context, batch, 1.0)[1]

    def error(v):
        return ((v - target) ** 2).flatten(1).mean(1) / (v - target).detach().abs().flatten(1).mean(1)

    implicit = error(policy.kept["old"]) - error(policy.own)
    reward = (batch.advantages / adv_max / 2 + 0.5).clamp(0, 1)
    total = 0.0
    for group in batch.group_id.unique():
        mine = (batch.group_id == group) & batch.valid
        r, a = implicit[mine], reward[mine]
        total = total + ((beta * (r - r.mean().detach()) - (a - a.mean())) ** 2).sum() * adv_max / beta
    kl = ((policy.own - policy.kept["base"]) ** 2).flatten(1).mean(1)
    least = min(1e-4 / kl_beta, 1.0)
    return total + (kl_beta * (least + reward * (1 - least)) * kl)[batch.valid].sum()


@pytest.mark.parametrize("prediction", ("flow", "epsilon"))
@pytest.mark.parametrize("kl_beta", (0.1, 5e-5))
def test_crd_is_the_authors_form(prediction, kl_beta):
    """Samples of a group without a valid one have no gradient either."""
    policy = Answers(7, prediction)
    groups, valid = [4, 4, 4, 2, 2, 2, 1], [True] * 5 + [False] * 2
    batch = rows([1.0, -0.25, -9.0, 2.0, -1.5, 0.0, 1.0], groups=groups, valid=valid)
    context = policy.context()
    found = of(CenteredReward, crd_beta=2.0, beta=kl_beta).loss(context, batch, 3.0)
    expected = crd_loss(policy, context, batch, 2.0, 5.0, kl_beta) / 3.0
    mine = gradient_where_equal(found.loss, expected, policy)
    assert mine[:5].flatten(1).abs().max(dim=1).values.min() > 1e-4 and not mine[5].any()


@pytest.mark.parametrize(
    "loss", [of(GroupPreference, 3, 1 / 4.0, dpo_beta=4.0), of(CenteredReward, beta=0.1)], ids=["dgpo", "crd"]
)
def test_a_group_that_is_cut_gives_the_same_gradient(loss):
    """By the sums of whole groups; the reference of preferences is not asked again."""
    preference = not isinstance(loss, CenteredReward)
    whole, batch = Answers(4), rows([1.0, -0.5, 0.3, 2.0], groups=[0, 0, 0, 1], valid=[True, True, preference, True])
    context = whole.context()
    loss.loss(context, batch, 4.0).loss.backward()
    terms = loss.terms(context, batch)
    batch.coupling = sums_of_groups(terms, batch)
    if preference:
        assert batch.coupling[0] == batch.coupling[2] == pytest.approx(float(terms[:3].sum()))
    else:
        assert batch.coupling[:, 1].tolist() == [2, 2, 2, 1]
    parted = Answers(4)
    loss.loss(parted.context(), batch, 4.0).loss.backward()
    torch.testing.assert_close(parted.own.grad, whole.own.grad)
    assert not preference or len(parted.asked) == 1


def test_invalid_samples_pull_nothing():
    policy, batch = Answers(2), rows([1.0, -1.0], groups=[0, 0], valid=[True, False])
    context = policy.context()
    preference = of(GroupPreference, PAIR, dpo_beta=5.0)
    preference.loss(context, batch, 1.0).loss.backward()
    assert policy.own.grad[0].abs().max() > 0 and not policy.own.grad[1].any()
    assert preference.terms(context, batch)[1] == 0


def test_pairs_are_the_best_with_the_worst():
    rewards = torch.tensor([0.1, 5.0, 0.9, 5.0, 0.4, 7.0, 0.2, 9.0])
    groups = torch.tensor([3, 8, 3, 8, 3, 8, 3, 8])
    signs, pairs = ranked_pairs(rewards, groups, torch.ones(8, dtype=torch.bool))
    assert signs.tolist() == [-1, -1, 1, -1, 1, 1, -1, 1]
    assert pairs[2] == pairs[0] and pairs[4] == pairs[6] and pairs[7] == pairs[3] and pairs[5] == pairs[1]
    assert sorted(pairs.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("unknown", [math.nan, -9.0])
def test_ties_and_invalid_samples_make_no_pair(unknown):
    rewards = torch.tensor([unknown, 1.0, 1.0, 1.0, 3.0, 2.0])
    valid = torch.tensor([False, True, True, True, True, True])
    signs, pairs = ranked_pairs(rewards, torch.tensor([0, 0, 0, 0, 1, 1]), valid)
    assert signs.tolist() == [0, 0, 0, 0, 1, -1]
    assert sorted(pairs.tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="even"):
        ranked_pairs(rewards[:3], torch.zeros(3, dtype=torch.long), valid[:3])
