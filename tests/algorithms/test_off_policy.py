"""DPPO, VESPO, the off-policy sequence mask and the weighed k3: values and gradients by hand."""

import math

import pytest
import torch

from lightrft_visual.algorithms.policy_losses import LossDenominators, LossInputs, policy_loss
from lightrft_visual.config.vl import AlgorithmConfig


def token(probability, drawn, advantage, recomputed=None):
    """One token: the policy's probability, the engine's, and the trainer's before the first update."""
    log_probs = torch.tensor([[math.log(probability)]], requires_grad=True)
    old = torch.tensor([[math.log(drawn if recomputed is None else recomputed)]])
    engine = torch.tensor([[math.log(drawn)]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    return LossInputs(log_probs, old, torch.tensor([[advantage]]), mask, rollout_log_probs=engine)


def slope_of(inputs, **config):
    """(d loss / d log-prob, clip fraction) of one token."""
    outputs = policy_loss(inputs, AlgorithmConfig(**config), LossDenominators(1, 1, 1))
    outputs.loss.backward()
    return inputs.log_probs.grad.item(), outputs.metrics["clip_frac"].item()


@pytest.mark.parametrize(
    ("probability", "drawn", "advantage", "slope", "clipped"),
    [
        (0.010, 0.001, 2.0, -2 * 10, 0),  # a rare token: tenfold ratio, but only 0.009 of probability
        (0.100, 0.001, 2.0, -2 * 10, 0),  # hundredfold: the weight is held at 10
        (0.300, 0.100, 1.0, 0.0, 1),  # 0.2 up, more than 0.15
        (0.300, 0.100, -1.0, 3.0, 0),  # up, but this advantage takes it down
        (0.800, 0.990, -1.0, 0.0, 1),  # 0.19 down, though its ratio is 0.81
        (0.800, 0.990, 1.0, -0.8 / 0.99, 0),
        (0.300, 0.100, 0.0, 0.0, 0),
        (0.100, 0.300, 0.0, 0.0, 0),
    ],
)
def test_dppo_tv_by_hand(probability, drawn, advantage, slope, clipped):
    found = slope_of(token(probability, drawn, advantage), policy_loss="dppo_tv", eps_clip=0.15)
    assert found == pytest.approx((slope, clipped), rel=1e-4)


@pytest.mark.parametrize(("probability", "drawn"), [(0.5, 0.2), (0.2, 0.5), (0.9, 0.95), (0.02, 0.001)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_dppo_kl_by_hand(probability, drawn, advantage):
    p, q = probability, drawn
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    away = (p > q) == (advantage > 0)
    for bound, cut in ((0.99 * divergence, away), (1.01 * divergence, False)):
        slope = 0.0 if cut else -advantage * min(p / q, 10)
        found = slope_of(token(p, q, advantage), policy_loss="dppo_kl", eps_clip=bound)
        assert found == pytest.approx((slope, float(cut)), rel=1e-4)


@pytest.mark.parametrize(
    ("probability", "drawn", "advantage", "bound", "slope", "clipped"),
    [(0.5, 1.0, -1.0, 0.69, 0.0, 1), (0.5, 1.0, -1.0, 0.70, 0.5, 0), (1.0, 1.0, 1.0, 0.1, -1.0, 0)],
)
def test_dppo_kl_of_a_certain_token_is_finite(probability, drawn, advantage, bound, slope, clipped):
    """Of one drawn with certainty the divergence is log 2 at probability 1/2."""
    found = slope_of(token(probability, drawn, advantage), policy_loss="dppo_kl", eps_clip=bound)
    assert found == pytest.approx((slope, clipped))


def test_the_bound_on_each_side_is_its_own():
    for side, advantage in ((0.3, 1.0), (0.1, -1.0)):
        wide = slope_of(token(side, 0.2, advantage), policy_loss="dppo_tv", eps_clip=0.15, eps_clip_high=0.15)
        up = slope_of(token(side, 0.2, advantage), policy_loss="dppo_tv", eps_clip=0.15, eps_clip_high=0.05)
        assert wide[1] == 0 and up[1] == (advantage > 0)


def test_dppo_measures_from_the_engine_and_without_it_from_the_trainer():
    inputs = token(0.3, 0.1, 1.0, recomputed=0.29)
    assert slope_of(inputs, policy_loss="dppo_tv", eps_clip=0.15)[1] == 1
    inputs.rollout_log_probs, inputs.log_probs.grad = None, None
    assert slope_of(inputs, policy_loss="dppo_tv", eps_clip=0.15) == pytest.approx((-0.3 / 0.29, 0), rel=1e-4)


def sequences(log_ratios, advantages, mask):
    """Rows of tokens with these log-ratios to the policy that drew them."""
    log_probs = torch.tensor(log_ratios, requires_grad=True)
    return LossInputs(log_probs, torch.zeros_like(log_probs), torch.tensor(advantages), torch.tensor(mask).bool())


@pytest.mark.parametrize(("advantage", "k", "decay"), [(2.0, 2.0, 3.0), (-2.0, 3.0, 2.0)])
def test_vespo_by_hand(advantage, k, decay):
    """phi of the product of the ratios: (e^0.2)^k exp(lambda (1 - e^0.2)); the hole takes no part."""
    inputs = sequences([[0.3, 7.0, -0.1]], [[advantage] * 3], [[1, 0, 1]])
    outputs = policy_loss(inputs, AlgorithmConfig(policy_loss="vespo"), LossDenominators(2, 1, 3))
    outputs.loss.backward()
    weight = math.exp(0.2)
    phi = weight**k * math.exp(decay * (1 - weight))
    assert outputs.loss.item() == pytest.approx(-phi * advantage * 0.2 / 2, rel=1e-5)
    assert inputs.log_probs.grad[0].tolist() == pytest.approx([-phi * advantage / 2, 0.0, -phi * advantage / 2])
    assert outputs.metrics["clip_frac"].item() == (phi < 0.5)


def test_vespo_lets_go_of_sequences_that_are_far_off():
    for far in (4.0, -9.0):
        inputs = sequences([[far]], [[1.0]], [[1]])
        slope, clipped = slope_of(inputs, policy_loss="vespo")
        assert abs(slope) < 1e-6 and clipped == 1


def test_off_policy_mask_by_hand():
    """Means of log q - log p: 0.4 and -0.4, of tokens that count; only the first one's negative tokens go."""
    inputs = sequences(
        [[-0.5, -0.3, 50.0], [0.5, 0.3, -50.0]],
        [[-1.0, 2.0, -1.0], [-1.0, 2.0, -1.0]],
        [[1, 1, 0], [1, 1, 0]],
    )
    kept = policy_loss(inputs, AlgorithmConfig(off_policy_delta=0.41, eps_clip=10), LossDenominators(4, 2, 3))
    cut = policy_loss(inputs, AlgorithmConfig(off_policy_delta=0.39, eps_clip=10), LossDenominators(4, 2, 3))
    assert (kept.metrics["off_policy_frac"], cut.metrics["off_policy_frac"]) == (0, 0.25)
    assert (kept.loss - cut.loss).item() == pytest.approx(math.exp(-0.5) / 4)
    cut.loss.backward()
    assert inputs.log_probs.grad[0, 0] == 0 and (inputs.log_probs.grad[:, 1] != 0).all()


def test_off_policy_mask_and_that_of_large_entropy_keep_what_both_keep():
    inputs = sequences([[-0.5, -0.3], [0.5, 0.3]], [[-1.0, 2.0], [-1.0, 2.0]], [[1, 1], [1, 1]])
    inputs.policy_mask = torch.tensor([[True, False], [False, True]])
    policy_loss(inputs, AlgorithmConfig(off_policy_delta=0.39, eps_clip=10), LossDenominators(4, 2, 2)).loss.backward()
    assert (inputs.log_probs.grad != 0).tolist() == [[False, False], [False, True]]


def test_off_policy_mask_leaves_the_kl_loss_and_the_denominators_alone():
    inputs = sequences([[-2.0]], [[-1.0]], [[1]])
    inputs.ref_log_probs = torch.tensor([[-2.5]])
    config = AlgorithmConfig(off_policy_delta=1.0, use_kl_loss=True, kl_estimator="k2", init_kl_coef=0.1)
    assert policy_loss(inputs, config, LossDenominators(1, 1, 1)).loss.item() == pytest.approx(0.1 * 0.125)


def test_k3_unbiased_has_the_gradient_of_the_kl_whatever_drew_the_tokens():
    """Three tokens drawn by q with weights q: the mean loss and gradient over them are those of KL(p || reference)."""
    make = torch.Generator().manual_seed(5)
    logits, drawing, reference = (torch.randn(3, generator=make, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    q, ref = torch.log_softmax(drawing, 0), torch.log_softmax(reference, 0)
    p = torch.log_softmax(logits, 0)
    exact = (p.exp() * (p - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    config = AlgorithmConfig(use_kl_loss=True, kl_estimator="k3_unbiased", init_kl_coef=1.0)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(3):
        rows = (each[number].reshape(1, 1) for each in (torch.log_softmax(logits, 0), q, ref))
        log_probs, old, base = rows
        inputs = LossInputs(log_probs, old, torch.zeros(1, 1), torch.ones(1, 1).bool(), ref_log_probs=base)
        total = total + q[number].exp() * policy_loss(inputs, config, LossDenominators(1, 1, 1)).loss
    (found,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(exact.item(), abs=1e-6)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
