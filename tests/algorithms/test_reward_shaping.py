"""The overlong penalty, the norm by all rewards seen, and the reward of each token."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft_visual.algorithms.advantages import get_advantage_calculator
from lightrft_visual.algorithms.kl import compute_reward
from lightrft_visual.config.vl import AlgorithmConfig


def shaped(calculator, rewards, masks, most=1):
    """A step's rewards as the calculator shapes them."""
    batch = SimpleNamespace(action_mask=masks, info={}, valid=None, packed_seq_lens=None)
    return calculator.preprocess_rewards(torch.tensor(rewards), [batch], most)[1][0].tolist()


def calculator_of(**settings):
    return get_advantage_calculator("reinforce", AlgorithmConfig(**settings))


def test_overlong_penalty_by_hand():
    masks = torch.arange(100) < torch.tensor([[0], [80], [90], [100]])
    calculator = calculator_of(overlong_buffer=True, overlong_buffer_len=20, overlong_buffer_penalty_factor=0.5)
    assert shaped(calculator, [0.0] * 4, masks, most=100) == pytest.approx([0.0, 0.0, -0.25, -0.5])


class TestRunningNorm:
    @staticmethod
    def calculator(minus_mean=True):
        return calculator_of(reward_running_norm=True, reward_running_norm_minus_mean=minus_mean)

    @staticmethod
    def normed(calculator, rewards):
        return shaped(calculator, rewards, torch.ones(len(rewards), 1).bool())

    @given(st.lists(st.lists(st.floats(-100, 100, width=32), max_size=5), min_size=1, max_size=5))
    def test_it_is_by_the_moments_of_all_rewards_seen(self, batches):
        calculator = self.calculator()
        for batch in batches:
            self.normed(calculator, batch)
        running = calculator.running["running"]
        seen = torch.tensor([value for batch in batches for value in batch], dtype=torch.float64)
        assert running.count == len(seen)
        if len(seen) >= 2 and seen.std() > 1e-2:
            assert running.mean == pytest.approx(seen.mean().item(), abs=1e-3)
            assert running.sample_variance**0.5 == pytest.approx(seen.std().item(), rel=1e-3, abs=1e-3)

    def test_with_and_without_the_mean(self):
        assert self.normed(self.calculator(False), [1.0, 3.0]) == pytest.approx([1 / 2**0.5, 3 / 2**0.5])
        assert self.normed(self.calculator(), [1.0, 3.0]) == pytest.approx([-1 / 2**0.5, 1 / 2**0.5])

    def test_one_reward_and_no_spread_divide_by_one(self):
        assert self.normed(self.calculator(False), [4.0]) == [4.0]
        assert self.normed(self.calculator(False), [2.0, 2.0, 2.0]) == [2.0] * 3
        calculator = self.calculator()
        assert self.normed(calculator, [2.0, 2.0, 2.0]) == [0.0] * 3
        assert self.normed(self.calculator(), []) == []


class TestComputeReward:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])

    def test_reward_stands_at_the_last_action(self):
        rewards = compute_reward(torch.tensor([2.0, 3.0, 5.0]), 0.0, None, self.mask)
        assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 3, 0], [0, 0, 0, 0]]

    def test_kl_is_subtracted_at_real_tokens(self):
        kl = torch.tensor([[1.0, 2.0, 3.0, float("nan")]] * 3)
        rewards = compute_reward(torch.tensor([2.0, 3.0, 5.0]), 0.1, kl, self.mask)
        expected = torch.tensor([[-0.1, -0.2, 1.7, 0], [-0.1, 0, 2.7, 0], [0, 0, 0, 0]])
        torch.testing.assert_close(rewards, expected)

    def test_clip_range_applies_to_the_reward_only(self):
        kl = torch.full((3, 4), 10.0)
        rewards = compute_reward(torch.tensor([2.0, -3.0, 5.0]), 1.0, kl, self.mask, (-1.0, 1.0))
        assert rewards[0].tolist() == [-10, -10, -9, 0] and rewards[1].tolist() == [-10, 0, -11, 0]

    def test_no_action_columns(self):
        assert compute_reward(torch.tensor([1.0]), 0.0, None, torch.zeros(1, 0)).shape == (1, 0)

    def test_sizes_that_do_not_belong_together(self):
        with pytest.raises(ValueError, match="do not belong"):
            compute_reward(torch.tensor([1.0, 2.0]), 0.0, None, self.mask)
