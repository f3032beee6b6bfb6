"""Overlong penalty, running moments, and the reward of each token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft_visual.algorithms.kl import RunningMoments, compute_reward, overlong_penalty


def test_overlong_penalty_by_hand():
    penalty = overlong_penalty(torch.tensor([0, 80, 90, 100]), max_new_tokens=100, buffer_len=20, factor=0.5)
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5])


class TestRunningMoments:
    @given(st.lists(st.lists(st.floats(-100, 100, width=32), max_size=5), min_size=1, max_size=5))
    def test_equal_to_the_moments_of_everything_seen(self, batches):
        running = RunningMoments()
        for batch in batches:
            running.update(torch.tensor(batch))
        seen = torch.tensor([value for batch in batches for value in batch], dtype=torch.float64)
        assert running.seen.count == len(seen)
        if len(seen) >= 2 and seen.std() > 1e-2:
            assert running.seen.mean == pytest.approx(seen.mean().item(), abs=1e-3)
            assert running.std == pytest.approx(seen.std().item(), rel=1e-3, abs=1e-3)

    def test_normalize_with_and_without_the_mean(self):
        running = RunningMoments()
        running.update(torch.tensor([1.0, 3.0]))
        assert running.normalize(torch.tensor([3.0]), minus_mean=False).item() == pytest.approx(3 / 2**0.5)
        assert running.normalize(torch.tensor([3.0]), minus_mean=True).item() == pytest.approx(1 / 2**0.5)

    def test_nothing_seen_or_no_spread_divides_by_one(self):
        running = RunningMoments()
        assert running.normalize(torch.tensor([4.0]), minus_mean=True).item() == 4.0
        running.update(torch.tensor([2.0, 2.0, 2.0]))
        assert running.normalize(torch.tensor([4.0]), minus_mean=True).item() == 2.0


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
