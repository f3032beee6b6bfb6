"""KL forms: closed values, unbiasedness, safety; controllers."""

import math

import pytest
import torch

from lightrft_visual.algorithms.kl import AdaptiveKLController, compute_approx_kl, get_kl_controller
from lightrft_visual.config.vl import AlgorithmConfig


def test_forms_by_hand():
    p, q = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert compute_approx_kl(p, q, "k1").item() == pytest.approx(0.5)
    assert compute_approx_kl(p, q, "k2").item() == pytest.approx(0.125)
    assert compute_approx_kl(p, q, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_k1_and_k3_have_the_exact_expectation():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        assert (p * compute_approx_kl(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact, abs=1e-6)


def test_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero():
    logits = torch.tensor([0.1, 0.5, -0.3], requires_grad=True)
    reference = torch.tensor([0.3, 0.3, 0.4]).log()
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    weights = logits.softmax(0).detach()
    for kind, expected in (("k1", torch.zeros(3)), ("k2", exact)):
        estimate = (weights * compute_approx_kl(logits.log_softmax(0), reference, kind)).sum()
        torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


def test_k3_stays_finite_and_not_negative():
    p = torch.tensor([-500.0, -0.0, -1.0], requires_grad=True)
    q = torch.tensor([0.0, -500.0, -1.0])
    kl = compute_approx_kl(p, q, "k3")
    assert kl.tolist() == pytest.approx([math.exp(10) - 11, 499.0, 0.0])
    kl.sum().backward()
    assert p.grad.isfinite().all()


def test_half_precision_is_computed_in_float32():
    assert compute_approx_kl(torch.zeros(1).bfloat16(), torch.zeros(1).bfloat16(), "k1").dtype == torch.float32


def test_adaptive_controller_moves_towards_the_target_and_resumes():
    config = AlgorithmConfig(init_kl_coef=0.1, kl_target=2.0, kl_horizon=100)
    fixed, controller = get_kl_controller(AlgorithmConfig(init_kl_coef=0.02)), get_kl_controller(config)
    fixed.update(100.0, 64)
    assert fixed.value == 0.02
    controller.update(2.2, 50)  # error 0.1
    assert controller.value == pytest.approx(0.1 * 1.05)
    controller.update(100.0, 50)  # error cut to 0.2
    assert controller.value == pytest.approx(0.1 * 1.05 * 1.1)
    resumed = AdaptiveKLController(0.1, 2.0, 100)
    resumed.load_state_dict(controller.state_dict())
    controller.update(0.0, 50)
    resumed.update(0.0, 50)
    assert resumed.value == controller.value == pytest.approx(0.1 * 1.05 * 1.1 * 0.9)
