"""Chunked log-probs and entropy: closed forms, equality with the plain form, gradients, and what is kept in memory."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import Operations

from lightrft_visual.models import logprobs
from lightrft_visual.models.logprobs import LogProbLinear, linear_log_probs


def plain_log_probs(hidden, weight, targets, *, temperature=1.0, banned_ids=None, bias=None, soft_cap=None):
    """What `linear_log_probs` computes in chunks, by its definition: (log_probs (N), entropy (N))."""
    logits = hidden.float() @ weight.float().t()
    if bias is not None:
        logits = logits + bias.float()
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    logits = logits / torch.as_tensor(temperature).expand(len(hidden)).unsqueeze(1)
    if banned_ids is not None:
        logits = logits.index_fill(1, banned_ids, float("-inf"))
    log_probs = logits.log_softmax(dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)
    # 0 * -inf is NaN; a banned token has probability 0 and adds nothing to the entropy.
    terms = logits if banned_ids is None else logits.index_fill(1, banned_ids, 0.0)
    return log_probs, logits.logsumexp(dim=1) - (logits.softmax(dim=1) * terms).sum(dim=1)


def problem(rows=13, width=6, vocab=17, seed=0, dtype=torch.float32):
    """hidden, weight, bias (leaves), and targets that are never among the banned ids 1 and 3."""
    make = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (torch.randn(*shape, generator=make) / width**0.5).to(dtype).requires_grad_()
        for shape in ((rows, width), (vocab, width), (vocab,))
    )
    return hidden, weight, bias, torch.randint(4, vocab, (rows,), generator=make)


def values_and_gradients(function, inputs, targets, **options):
    hidden, weight, bias = inputs
    log_probs, entropy = function(hidden, weight, targets, bias=bias, **options)
    make = torch.Generator().manual_seed(7)
    left, right = (torch.randn(len(targets), generator=make) for _ in range(2))
    gradients = torch.autograd.grad((log_probs * left + entropy * right).sum(), inputs)
    return [log_probs, entropy, *gradients]


class TestValues:
    def test_banned_ids_renormalise_over_the_rest(self):
        banned, weight, targets = torch.tensor([0, 2, 3]), torch.randn(8, 4), torch.tensor([1, 0])
        log_probs, entropy = linear_log_probs(torch.zeros(2, 4), weight, targets, banned_ids=banned)
        assert log_probs.tolist() == pytest.approx([-math.log(5), -math.inf])
        torch.testing.assert_close(entropy, torch.full((2,), math.log(5)))

    def test_two_tokens_by_hand(self):
        # Logits 0 and 2 at temperature 2: probabilities 1 / (1 + e) and e / (1 + e).
        inputs, p = (torch.ones(1, 1), torch.tensor([[0.0], [2.0]]), torch.tensor([1])), math.e / (1 + math.e)
        log_probs, entropy = linear_log_probs(*inputs, temperature=2.0)
        assert log_probs.item() == pytest.approx(math.log(p))
        assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))

    def test_no_rows(self):
        hidden, weight, _, _ = problem()
        log_probs, entropy = linear_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
        assert log_probs.shape == entropy.shape == (0,)
        gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
        assert not any(gradient.any() for gradient in gradients)


class TestGradients:
    def test_closer_to_float64_than_the_plain_form(self):
        """Cold, peaked distributions, whose entropy is a small difference of large numbers."""
        *inputs, targets = problem(rows=40, vocab=60)

        def exact(hidden, weight, targets, bias, temperature):
            spread = torch.distributions.Categorical(logits=(hidden @ weight.t() + bias) / temperature)
            return spread.log_prob(targets), spread.entropy()

        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        truth = values_and_gradients(exact, doubles, targets, temperature=0.1)
        chunked = values_and_gradients(linear_log_probs, inputs, targets, temperature=0.1)
        plain = values_and_gradients(plain_log_probs, inputs, targets, temperature=0.1)
        for got, other, expected in zip(chunked, plain, truth):
            error, other_error = ((each - expected).abs().max().item() for each in (got, other))
            assert error <= max(1.5 * other_error, 1e-6)

    @settings(deadline=None, max_examples=40)
    @given(
        rows=st.integers(1, 12),
        vocab=st.integers(6, 30),
        chunk=st.integers(1, 15),
        temperature=st.sampled_from([0.5, 1.0, 3.0, "per row"]),
        banned=st.sampled_from([None, [1], [1, 3]]),
        soft_cap=st.sampled_from([None, 0.5, 30.0]),
        seed=st.integers(0, 1000),
    )
    def test_equal_to_the_plain_form(self, rows, vocab, chunk, temperature, banned, soft_cap, seed):
        *inputs, targets = problem(rows=rows, vocab=vocab, seed=seed)
        if temperature == "per row":
            temperature = torch.linspace(0.5, 2.0, rows)
        options = {"temperature": temperature, "banned_ids": None if banned is None else torch.tensor(banned)}
        options["soft_cap"] = soft_cap
        with patch.object(logprobs, "CHUNK_ELEMENTS", chunk * vocab):
            chunked = values_and_gradients(linear_log_probs, inputs, targets, **options)
        plain = values_and_gradients(plain_log_probs, inputs, targets, **options)
        for got, expected in zip(chunked, plain):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("frozen", [0, 1, 2])
    def test_what_is_frozen_gets_no_gradient_and_the_rest_does(self, frozen):
        *inputs, targets = problem()
        inputs[frozen].requires_grad_(False)
        hidden, weight, bias = inputs
        linear_log_probs(hidden, weight, targets, bias=bias)[0].sum().backward()
        assert [each.grad is None for each in inputs] == [index == frozen for index in range(3)]

    def test_banned_target_gives_finite_gradients_when_masked(self):
        hidden, weight, _, targets = problem(rows=3)
        targets[1] = 3
        log_probs, _ = linear_log_probs(hidden, weight, targets, banned_ids=torch.tensor([3]))
        torch.where(torch.tensor([True, False, True]), log_probs, 0.0).sum().backward()
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
        assert hidden.grad[1].abs().sum() == 0 and weight.grad[3].abs().sum() == 0

    def test_bfloat16_inputs_are_computed_in_float32(self, monkeypatch):
        *inputs, targets = problem(rows=9, width=32, vocab=40, dtype=torch.bfloat16)
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * 40)
        chunked = values_and_gradients(linear_log_probs, inputs, targets)
        plain = values_and_gradients(plain_log_probs, inputs, targets)
        assert chunked[0].dtype == torch.float32 and chunked[2].dtype == chunked[3].dtype == torch.bfloat16
        torch.testing.assert_close(chunked[0], plain[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(chunked[3], plain[3])

    def test_autocast_does_not_lower_the_precision(self):
        hidden, weight, _, targets = problem(width=64, vocab=50)
        expected, _ = plain_log_probs(hidden, weight, targets)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, _ = linear_log_probs(hidden, weight, targets)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


class TestMemory:
    def test_no_tensor_of_rows_times_vocabulary(self, monkeypatch):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 8 * 100)
        *inputs, targets = problem(rows=64, width=4, vocab=100)
        with Operations() as chunked:
            values_and_gradients(linear_log_probs, inputs, targets)
        with Operations() as plain:
            values_and_gradients(plain_log_probs, inputs, targets)
        assert plain.largest == 64 * 100
        assert chunked.largest == 8 * 100

    def test_the_parameter_is_read_again_in_backward(self):
        """ZeRO-3 frees a parameter's data after forward and gathers it before backward."""
        hidden, _, _, targets = problem()
        head = LogProbLinear(6, 17, bias=False)
        expected = torch.autograd.grad(plain_log_probs(hidden, head.weight, targets)[0].sum(), hidden)
        log_probs, _ = head(hidden, targets)
        data = head.weight.data
        head.weight.data = torch.empty(0)
        head.weight.data = data.clone()
        torch.testing.assert_close(torch.autograd.grad(log_probs.sum(), hidden), expected)


class TestLogProbLinear:
    def test_adopted_head_keeps_weights_and_logits(self):
        linear = nn.Linear(6, 17)
        hidden = torch.randn(2, 5, 6)
        logits, weight = linear(hidden), linear.weight
        head = LogProbLinear.adopt(linear)
        assert head is linear and head.weight is weight
        torch.testing.assert_close(head(hidden), logits)
        LogProbLinear.adopt(head)

    def test_shapes_follow_the_targets(self):
        head, hidden = LogProbLinear(6, 17), torch.randn(2, 5, 6)
        targets = torch.randint(0, 17, (2, 5))
        temperature = torch.full((2, 5), 2.0)
        log_probs, entropy = head(hidden, targets, temperature=temperature, banned_ids=None)
        expected = (head(hidden) / 2).log_softmax(-1)
        torch.testing.assert_close(log_probs, expected.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
        alone, none = head(hidden, targets, temperature=temperature, with_entropy=False)
        assert none is None and torch.equal(alone, log_probs)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), head.weight) for each in (alone, log_probs)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.long)}, "targets"),
        ({"weight": torch.zeros(17, 5)}, "weight"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    hidden, weight, _, targets = problem()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**arguments)
