"""Advantage estimators: hand-computed values, grouping by id over uneven micro-batches, invalid samples, whitening."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.algorithms.advantages import (
    assign_advantages,
    distillation_gain,
    finish_advantages,
    finished_gae,
    get_advantage_calculator,
    get_advantages_and_returns,
    get_cumulative_returns,
    rewards_at_turns,
    turn_ends,
)
from lightrft_visual.config import registry
from lightrft_visual.config.vl import AlgorithmConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.experience.types import Experience

ESTIMATORS = [each.name for each in registry.advantage_estimators if not each.components]
GROUPED = [name for name in ESTIMATORS if registry.advantage_estimators[name].grouped]
KWARGS = {"gamma": 1.0, "lambd": 0.95, "max_new_tokens": 10}


def experience(groups, lengths=None, valid=None, width=4, values=None, kl=None):
    """A micro-batch: one sample for each group id, with `lengths` real action tokens out of `width`."""
    lengths = torch.tensor(lengths or [width] * len(groups))
    mask = torch.arange(width) < lengths.unsqueeze(1)
    return Experience(
        sequences=torch.ones(len(groups), width + 2, dtype=torch.long),
        action_log_probs=None, base_action_log_probs=None, values=values, returns=None, advantages=None,
        attention_mask=None, action_mask=mask, info={}, kl=kl, group_id=torch.tensor(groups),
        valid=None if valid is None else torch.tensor(valid),
    )  # fmt: skip


def calculator_of(name, **config):
    return get_advantage_calculator(name, AlgorithmConfig(**config))


def final_rewards(name, rewards, experiences, **config):
    return calculator_of(name, **config).preprocess_rewards(rewards, experiences, max_new_tokens=10)[1]


def assigned(name, batch, rewards, kl_coef=0.0, **config):
    """A micro-batch with its advantages."""
    assign_advantages(calculator_of(name, **config), [batch], torch.tensor(rewards), kl_coef, KWARGS)
    return batch


@pytest.mark.parametrize(
    "config", [None, {"gamma": 0.5}, SimpleNamespace(gamma=0.5), type("Own", (), {"gamma": 0.5})()]
)
def test_what_a_config_of_another_system_lacks_is_at_its_default(config):
    calculator, batch = get_advantage_calculator("grpo", config), experience([0, 0])
    calculator.preprocess_rewards(torch.tensor([1.0, 0.0]), [batch], max_new_tokens=10)
    assert calculator.config.gamma == (1.0 if config is None else 0.5)


@pytest.mark.parametrize("name", ["reinforce", "dr_grpo"])
def test_a_rank_without_experiences_has_no_advantages_to_whiten(name):
    """Others may have some, and wait for its part of the moments."""
    assert assign_advantages(calculator_of(name, advantages_norm=True), [], [], 0.0, KWARGS) == []


def whitened(values):
    return (values - values.mean()) / (values.std() + 1e-6)


class TestOverTime:
    def test_gae_by_hand(self):
        values, rewards = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.0, 5.0]])
        advantages, returns = get_advantages_and_returns(values, rewards, torch.ones(1, 3), gamma=0.9, lambd=0.5)
        third = 5.0 - 3.0
        second = 0.9 * 3.0 - 2.0 + 0.45 * third
        first = 0.9 * 2.0 - 1.0 + 0.45 * second
        torch.testing.assert_close(advantages, torch.tensor([[first, second, third]]))
        torch.testing.assert_close(returns, advantages + values)

    @pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2), (2, 3)])
    def test_gae_of_another_shape_is_refused(self, shape):
        with pytest.raises(ValueError, match="must be of one shape"):
            get_advantages_and_returns(torch.zeros(2, 2), torch.ones(shape), torch.ones(2, 2), 1.0, 1.0)

    def test_gae_over_turns_by_hand(self):
        """Two turns of two and one tokens, two tokens of an observation between them that hold garbage."""
        mask = torch.tensor([[True, True, False, False, True]])
        values = torch.tensor([[1.0, 2.0, math.nan, 9.0, 3.0]])
        batch = experience([0], width=5, values=values)
        batch.action_mask = mask
        batch.info = {
            "turn_ids": [torch.tensor([0, 0, -1, -1, 1])],
            "turn_gamma": torch.tensor([0.5]),
            "turn_rewards": [torch.tensor([1.0, 4.0])],
        }
        given = torch.tensor([1.0 + 0.5 * 4.0 + 0.5 * 6.0])  # of both turns, and 6 of a reward function at the end
        assign_advantages(
            calculator_of("gae", init_kl_coef=0.0), [batch], given, 0.0,
            {"gamma": 0.9, "lambd": 0.8, "max_new_tokens": 9},
        )  # fmt: skip
        third = 10.0 - 3.0
        second = 1.0 + 0.45 * 3.0 - 2.0 + 0.45 * 0.8 * third
        first = 0.9 * 2.0 - 1.0 + 0.9 * 0.8 * second
        torch.testing.assert_close(batch.advantages, torch.tensor([[first, second, 0.0, 0.0, third]]))
        torch.testing.assert_close(batch.returns[mask], torch.tensor([first + 1.0, second + 2.0, third + 3.0]))

    @pytest.mark.parametrize(
        "gamma, count, other, kept",
        [(0.9, 64, 0.0, 0.0), (0.5, 20, 0.0, 0.0), (0.5, 32, 0.0, 0.0), (0.9, 64, 0.7, 0.7), (1.0, 64, 0.7, 0.7),
         (0.5, 32, 0.7, 0.0)],  # the last one is less than the rounding of the sum
    )  # fmt: skip
    def test_many_turns_keep_their_rewards(self, gamma, count, other, kept):
        """The final reward is float32: by turn 32 its rounding, undiscounted, would be more than the last reward."""
        own = torch.linspace(1.0, 0.3, count)
        info = {"turn_ids": [torch.arange(count)], "turn_gamma": torch.tensor([gamma]), "turn_rewards": [own]}
        batch = SimpleNamespace(info=info, action_mask=torch.ones(1, count, dtype=torch.bool))
        discounts = float(torch.tensor(gamma)) ** torch.arange(count, dtype=torch.float64)
        final = float((own.double() * discounts).sum() + other * discounts[-1])
        token_rewards = torch.zeros(1, count)
        token_rewards[0, -1] = final
        spread = rewards_at_turns(batch, token_rewards)[0]
        torch.testing.assert_close(spread[:-1], own[:-1])
        assert abs(spread[-1] - own[-1] - kept) < 1e-6 + kept * 1e-6 / discounts[-1]

    def test_the_last_turn_ends_before_the_padding(self):
        batch = experience([0, 0], lengths=[3, 4])
        batch.info = {"turn_ids": [torch.tensor([0, 1, 1]), torch.zeros(4, dtype=torch.long)]}
        assert turn_ends(batch).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]

    @pytest.mark.parametrize("gamma", [1.0, 0.5])
    def test_turns_change_grouped_estimators_in_nothing(self, gamma):
        plain, turns = (experience([0, 0, 1, 1], lengths=[4, 3, 2, 4]) for _ in range(2))
        turns.info = {
            "turn_ids": [torch.tensor([0, 0, -1, 1]), torch.tensor([0, 1, 1]), torch.tensor([0, 0]), torch.arange(4)],
            "turn_gamma": torch.full((4,), gamma),
            "turn_rewards": [torch.ones(2), torch.ones(2), torch.ones(1), torch.ones(4)],
        }
        turns.action_mask = turns.action_mask.clone()
        turns.action_mask[0, 2] = False
        for batch in (plain, turns):
            assigned("group_norm", batch, [1.0, 0.0, 3.0, 4.0])
        kept = turns.action_mask
        assert torch.equal(plain.advantages[kept], turns.advantages[kept]) and not turns.advantages[~kept].any()

    def test_gamma_is_that_of_the_generation_s_arguments_where_none_is_given(self):
        batch, rewards = experience([0], width=3, values=torch.zeros(1, 3)), torch.tensor([[0.0, 0.0, 1.0]])
        compute = calculator_of("reinforce").compute
        for gamma, keywords, first in ((None, {"gamma": 0.5}, 0.25), (None, {}, 1.0), (1.0, {"gamma": 0.5}, 1.0)):
            assert compute(batch, rewards, gamma, keywords)[0][0, 0] == first

    def test_gae_with_lambda_one_is_the_return_minus_the_value(self):
        make = torch.Generator().manual_seed(0)
        values, rewards = torch.randn(3, 6, generator=make), torch.randn(3, 6, generator=make)
        mask = torch.arange(6) < torch.tensor([[6], [3], [0]])
        advantages, returns = get_advantages_and_returns(values, rewards, mask, gamma=0.8, lambd=1.0)
        expected = get_cumulative_returns(rewards, mask, gamma=0.8)
        torch.testing.assert_close(returns, expected)
        torch.testing.assert_close(advantages, torch.where(mask, expected - values, 0.0))

    @pytest.mark.parametrize("length", [1, 2, 31, 33, 97])
    def test_gae_is_the_recursion_from_the_last_action_back(self, length):
        make = torch.Generator().manual_seed(length)
        values, rewards, discounts = torch.randn(3, 2, length, generator=make, dtype=torch.float64)
        mask = torch.rand(2, length, generator=make) < 0.7
        found = get_advantages_and_returns(values, rewards, mask, 0.97, 0.9, discounts)[0]
        for row in range(2):
            following = next_value = 0.0
            for step in reversed(mask[row].nonzero().flatten().tolist()):
                discount = 0.97 * float(discounts[row, step])
                delta = float(rewards[row, step]) + discount * next_value - float(values[row, step])
                following, next_value = delta + discount * 0.9 * following, float(values[row, step])
                assert float(found[row, step]) == pytest.approx(following, abs=1e-5)

    def test_gae_does_not_change_with_the_padding(self):
        make = torch.Generator().manual_seed(0)
        values, rewards = torch.randn(2, 3, 13, generator=make)
        mask = torch.rand(3, 13, generator=make) < 0.8
        own = get_advantages_and_returns(values, rewards, mask, 0.97, 0.9)[0]
        padded = [torch.nn.functional.pad(each, (3, 29)) for each in (values, rewards, mask)]
        assert torch.equal(get_advantages_and_returns(*padded, 0.97, 0.9)[0][:, 3:16], own)

    def test_padding_and_holes_are_no_steps(self):
        mask = torch.tensor([[1, 0, 1, 0]])
        rewards = torch.tensor([[1.0, math.nan, 4.0, math.nan]])
        values = torch.tensor([[0.5, math.nan, 2.0, math.nan]])
        dense_mask, dense = torch.ones(1, 2), (slice(None), [0, 2])
        for gamma in (1.0, 0.5):
            returns = get_cumulative_returns(rewards, mask, gamma)
            assert returns.tolist() == [[1 + gamma * 4, 0, 4, 0]]
            sparse = get_advantages_and_returns(values, rewards, mask, gamma, 0.9)[0]
            compact = get_advantages_and_returns(values[dense], rewards[dense], dense_mask, gamma, 0.9)[0]
            assert sparse[0, [0, 2]].tolist() == pytest.approx(compact.flatten().tolist())
            assert sparse[0, [1, 3]].tolist() == [0, 0]


class TestGroups:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("rloo", [1 - 3 / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]),
            ("dr_grpo", [0.0, -1.0, -1.0, 2.0]),
            ("reinforce_baseline", [0.0, -1.0, -1.0, 2.0]),
            ("group_norm", [0.0, -1 / 2**0.5, -1 / 2**0.5, 2 / 2**0.5]),
            ("cpgd", [0.0, -1 / 1.5**0.5, -1 / 1.5**0.5, 2 / 1.5**0.5]),
            ("reinforce", [1.0, 0.0, 0.0, 3.0]),
            ("gae", [1.0, 0.0, 0.0, 3.0]),
        ],
    )
    def test_one_group_by_hand(self, name, expected):
        batch = experience([5, 5, 5, 5])
        (final,) = final_rewards(name, self.rewards, [batch])
        assert name in GROUPED or set(batch.info) == {"shaped_reward"}
        assert final.tolist() == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize("name", GROUPED)
    def test_uneven_micro_batches_and_interleaved_groups(self, name):
        groups = [7, 2, 7, 9, 2, 7, 9]
        rewards = torch.tensor([1.0, 5.0, 2.0, 8.0, 1.0, 6.0, 3.0])
        (whole,) = final_rewards(name, rewards, [experience(groups)])
        parts = [experience(groups[:1]), experience(groups[1:5]), experience(groups[5:])]
        split = final_rewards(name, rewards, parts)
        assert [len(part) for part in split] == [1, 4, 2]
        torch.testing.assert_close(torch.cat(split), whole)
        torch.testing.assert_close(torch.cat(final_rewards(name, list(rewards.split([1, 4, 2])), parts)), whole)
        for group in (2, 7, 9):
            members = torch.tensor(groups) == group
            (alone,) = final_rewards(name, rewards[members], [experience([group] * int(members.sum()))])
            torch.testing.assert_close(whole[members], alone)

    @pytest.mark.parametrize("name", GROUPED)
    def test_invalid_samples_leave_the_statistics(self, name):
        rewards = torch.tensor([1.0, math.nan, 0.0, 99.0])
        batch = experience([1, 1, 1, 1], valid=[True, False, True, False])
        (final,) = final_rewards(name, rewards, [batch])
        (expected,) = final_rewards(name, torch.tensor([1.0, 0.0]), [experience([1, 1])])
        assert final[[0, 2]].tolist() == expected.tolist() and final[[1, 3]].tolist() == [0, 0]
        assert batch.info["comparable"].tolist() == [1, 0, 1, 0]

    @pytest.mark.parametrize("name", GROUPED)
    def test_a_lone_valid_sample_contributes_nothing(self, name):
        kl = torch.ones(3, 4)
        batch = experience([1, 1, 2], valid=[True, False, True], kl=kl)
        assert (assigned(name, batch, [3.0, 4.0, 5.0], 0.1).advantages == 0).all()

    @pytest.mark.parametrize("name", GROUPED)
    @pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6])
    def test_equal_rewards_give_exactly_zero(self, name, reward):
        (final,) = final_rewards(name, torch.full((7,), reward), [experience([1] * 7)])
        assert final.tolist() == [0.0] * 7


class TestShaping:
    def test_order_penalty_norm_clip(self):
        batch = experience([1, 1], lengths=[4, 2])
        (final,) = final_rewards(
            "reinforce", torch.tensor([3.0, 1.0]), [batch],
            overlong_buffer=True, overlong_buffer_len=8, overlong_buffer_penalty_factor=2.0, reward_running_norm=True,
            reward_running_norm_minus_mean=True, reward_clip=0.5,
        )  # fmt: skip
        # Lengths 4 and 2 with 10 - 8 = 2 free: penalties -0.5 and 0; 2.5 and 1 then whiten to +-0.707.
        assert batch.info["overlong_penalty"].tolist() == [-0.5, 0.0]
        assert batch.info["reward_clipped"].tolist() == [1.0, 1.0]
        assert final.tolist() == [0.5, -0.5] and batch.info["shaped_reward"].tolist() == [0.5, -0.5]

    def test_the_overlong_penalty_of_an_episode_counts_the_observations_between_its_answers(self):
        batch = experience([1, 1], width=6)
        batch.action_mask = torch.tensor([[1, 0, 0, 0, 1, 0], [0] * 6]).bool()
        final_rewards("reinforce", torch.ones(2), [batch], overlong_buffer=True, overlong_buffer_len=8)
        assert batch.info["overlong_penalty"].tolist() == [-0.375, 0.0]  # 5 tokens of 10, 2 of them free

    def test_drawn_images_have_no_overlong_penalty(self):
        batch = experience([1, 1])
        batch.info["loss_part"] = torch.tensor([0.0, 1.0])
        final_rewards("reinforce", torch.ones(2), [batch], overlong_buffer=True, overlong_buffer_len=8)
        assert batch.info["overlong_penalty"].tolist() == [-0.25, 0.0]

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"reward_clip": 3.0}, [1.0, 2.0]),  # 6 becomes 3
            ({"reward_running_norm": True}, [2 / 8**0.5, 4 / 8**0.5]),  # of 6 and 2
            ({"reward_running_norm": True, "reward_clip": 1.0}, [1 / 3, 2 / 3]),
            ({"reward_running_norm": True, "reward_running_norm_minus_mean": True}, [2 / 8**0.5, 0.0]),
        ],
    )
    def test_rewards_of_turns_are_shaped_as_their_sum_is(self, settings, expected):
        batch = experience([0, 1], lengths=[2, 1], width=2)
        turns = {
            "turn_ids": [torch.arange(2), torch.arange(1)],
            "turn_rewards": [torch.tensor([2.0, 4]), torch.ones(1)],
        }
        batch.info = turns | {"turn_gamma": torch.ones(2)}
        (final,) = final_rewards("reinforce", torch.tensor([6.0, 2.0]), [batch], **settings)
        placed = torch.zeros(2, 2)
        placed[0, 1], placed[1, 0] = final
        assert rewards_at_turns(batch, placed)[0].tolist() == pytest.approx(expected)

    def test_running_norm_is_of_answers_and_of_drawings_apart(self):
        config = AlgorithmConfig(reward_running_norm=True, reward_running_norm_minus_mean=True)
        calculator = get_advantage_calculator("reinforce", config)
        mixed, answers = experience([1, 2, 1, 2, 1], valid=[True] * 4 + [False]), experience([3])
        mixed.info["loss_part"], answers.info["loss_part"] = torch.tensor([0.0, 1, 0, 1, 0]), torch.zeros(1)
        _, (final,) = calculator.preprocess_rewards(torch.tensor([1.0, 10, 3, 30, math.inf]), [mixed], 10)
        assert final.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5, 0])
        resumed = get_advantage_calculator("reinforce", config)
        resumed.load_state_dict(calculator.state_dict())
        for each in (calculator, resumed):  # answers 1, 3 and 5: mean 3, standard deviation 2; drawings stay
            _, (final,) = each.preprocess_rewards(torch.tensor([5.0]), [answers], 10)
            assert final.tolist() == pytest.approx([1.0])
            assert each.state_dict()["running"] == {"count": 3, "mean": 3, "squares": 8}
            assert each.state_dict()["running_drawn"] == {"count": 2, "mean": 20, "squares": 200}

    def test_a_rank_without_samples_and_plain_numbers(self):
        assert final_rewards("dr_grpo", [], []) == []
        config = AlgorithmConfig(reward_running_norm=True)
        assert get_advantage_calculator("reinforce", config).preprocess_rewards([], [], 16) == ([], [])
        ones, scalars = np.array([1.0, 0.0]), [torch.tensor(1), torch.tensor(0)]
        for rewards in ([1.0, 0.0], [1, 0], ones, [ones], [[1, 0]], scalars, [torch.tensor([1, 0]).bfloat16()]):
            assert final_rewards("dr_grpo", rewards, [experience([1, 1])])[0].tolist() == [0.5, -0.5]


class TestCompute:
    def test_every_experience_has_the_same_gamma_and_its_own_mask_and_kwargs_stay(self):
        kwargs = {"gamma": 0.5, "max_new_tokens": 10}
        batches = [experience([1], width=3), experience([1], [2], width=3)]
        assign_advantages(calculator_of("reinforce"), batches, torch.tensor([4.0, 4.0]), 0.0, kwargs)
        assert [batch.returns.tolist() for batch in batches] == [[[1, 2, 4]], [[2, 4, 0]]]
        assert kwargs == {"gamma": 0.5, "max_new_tokens": 10} and batches[0].info["return"].tolist() == [4.0]

    def test_kl_in_the_reward_or_not(self):
        kl = torch.tensor([[1.0, 2.0]])
        for use_kl_loss, expected in ((False, [[3.7, 3.8]]), (True, [[4.0, 4.0]])):
            batch = experience([1], width=2, kl=kl)
            assigned("reinforce", batch, [4.0], 0.1, use_kl_loss=use_kl_loss, kl_estimator="k2")
            torch.testing.assert_close(batch.advantages, torch.tensor(expected))

    def test_what_the_group_says_is_noted_beside_what_the_kl_adds(self):
        batch = experience([1, 1, 2, 2], kl=torch.full((4, 4), 0.5))
        assigned("dr_grpo", batch, [1.0, 0.0, 3.0, 3.0], 0.1)
        assert batch.info["group_advantage"].tolist() == [0.5, -0.5, 0.0, 0.0]
        assert (batch.advantages != 0).all()

    def test_gae_reads_lambda_from_kwargs_and_needs_values(self):
        values = torch.tensor([[1.0, 2.0, 3.0]])
        batch = experience([1], width=3, values=values)
        calculator = get_advantage_calculator("gae", AlgorithmConfig(lambd=0.1))
        advantages, returns, _ = calculator.compute(batch, torch.tensor([5.0]), 0.9, {"lambd": 0.5})
        expected = get_advantages_and_returns(values, torch.tensor([[0, 0, 5.0]]), batch.action_mask, 0.9, 0.5)
        torch.testing.assert_close((advantages, returns), expected)

    @pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"gae"}))
    def test_experience_without_info(self, name):
        batch = experience([1, 1])
        batch.info = None
        calculator = get_advantage_calculator(name, AlgorithmConfig())
        advantages, returns, _ = calculator.compute(batch, torch.tensor([1.0, 0.0]), 1.0, {})
        assert advantages.shape == returns.shape == batch.action_mask.shape

    def test_an_experience_of_lightrft_without_a_discount_is_as_one_of_ours_with_1(self):
        """Without marks of validity, and gamma None."""
        ours = experience([1], width=3, values=torch.ones(1, 3))
        theirs = SimpleNamespace(action_mask=ours.action_mask, values=ours.values, info=None)
        calculator = get_advantage_calculator("gae", AlgorithmConfig())
        found, wanted = (
            calculator.compute(each, torch.tensor([5.0]), g, {}) for each, g in ((theirs, None), (ours, 1))
        )
        torch.testing.assert_close(found, wanted)


class TestDistillation:
    """On-policy distillation: the teacher's log-probs on the policy's own samples."""

    def batch(self):
        batch = experience([1, 1], lengths=[3, 2], valid=[True, False])
        batch.action_log_probs = torch.tensor([[-1.0, -2.0, -3.0, 0], [-1.0, -1.0, 0, 0]])
        batch.teacher_log_probs = torch.tensor([[-1.5, -0.5, -3.0, 0], [-2.0, -2.0, 0, 0]])
        return batch

    def test_rewards_teach_nothing_and_each_token_has_its_own_advantage(self):
        batch = assigned("distillation", self.batch(), [5.0, 9.0], teacher_coef=2.0)
        assert batch.advantages.tolist() == [[-1.0, 3.0, 0.0, 0.0], [0.0] * 4]  # no sum over later tokens

    def test_beside_a_reward_it_is_one_more_term(self):
        batch = self.batch()
        batch.valid = torch.tensor([True, True])
        assigned("dr_grpo", batch, [1.0, 0.0], teacher_coef=0.5)
        assert batch.advantages.tolist() == [[0.25, 1.25, 0.5, 0.0], [-1.0, -1.0, 0.0, 0.0]]

    def test_the_gradient_is_that_of_the_reverse_kl(self):
        """Over all tokens of a vocabulary, each as often as the policy draws it: d KL(policy || teacher) / d logits."""
        make = torch.Generator().manual_seed(0)
        logits = torch.randn(7, generator=make, dtype=torch.float64).requires_grad_()
        teacher = torch.randn(7, generator=make, dtype=torch.float64).log_softmax(0)
        log_probs = logits.log_softmax(0)
        kl = (log_probs.exp() * (log_probs - teacher)).sum()
        (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
        batch = experience([0] * 7, width=1)
        batch.action_log_probs, batch.teacher_log_probs = log_probs.detach().unsqueeze(1), teacher.unsqueeze(1)
        loss = -(log_probs.detach().exp() * distillation_gain(batch)[:, 0] * log_probs).sum()
        (found,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(found, expected)


class TestFinish:
    def batches(self):
        first, second = experience([1, 1], lengths=[3, 1]), experience([1], lengths=[2], valid=[True])
        first.advantages = torch.tensor([[1.0, 2.0, 3.0, 0], [4.0, 0, 0, 0]])
        second.advantages = torch.tensor([[5.0, 9.0, 0, 0]])
        return [first, second]

    def test_whitening_over_all_micro_batches_under_the_mask(self):
        batches = finish_advantages(self.batches(), AlgorithmConfig(advantages_norm=True))
        kept = torch.cat([batch.advantages[batch.action_mask] for batch in batches])
        torch.testing.assert_close(kept, whitened(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])))
        assert all((batch.advantages[~batch.action_mask] == 0).all() for batch in batches)

    def test_whitening_is_of_answers_and_of_drawings_apart(self):
        batches = self.batches()
        batches[0].info["loss_part"], batches[1].info["loss_part"] = torch.tensor([0.0, 1.0]), torch.ones(1)
        finish_advantages(batches, AlgorithmConfig(advantages_norm=True))
        torch.testing.assert_close(batches[0].advantages[0, :3], whitened(torch.tensor([1.0, 2.0, 3.0])))
        kept = torch.cat([batches[0].advantages[1, :1], batches[1].advantages[0, :2]])
        torch.testing.assert_close(kept, whitened(torch.tensor([4.0, 5.0, 9.0])))

    def test_invalid_samples_stay_zero_and_out_of_the_moments(self):
        batches = self.batches()
        batches[1].valid, batches[1].advantages = torch.tensor([False]), torch.zeros(1, 4)
        finish_advantages(batches, AlgorithmConfig(advantages_norm=True))
        kept = batches[0].advantages[batches[0].action_mask]
        torch.testing.assert_close(kept, whitened(torch.tensor([1.0, 2.0, 3.0, 4.0])))
        assert (batches[1].advantages == 0).all()

    def test_clip_fraction_is_measured_before_the_clamp(self):
        batches = finish_advantages(self.batches(), AlgorithmConfig(advantage_clip=2.5))
        assert batches[0].info["advantage_clip_frac"].tolist() == pytest.approx([1 / 3, 1.0])
        assert batches[1].info["advantage_clip_frac"].tolist() == [1.0]
        assert max(batch.advantages.max().item() for batch in batches) == 2.5

    def test_the_clip_share_of_a_critics_advantages_is_over_tokens_and_no_teacher_is_asked(self):
        rewards, mask = torch.tensor([[9.0, 1, 1], [9.0, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
        config = AlgorithmConfig(advantage_clip=2.5, teacher_coef=1.0)
        advantages, _, share = finished_gae(torch.zeros(2, 3), rewards, mask, 0.0, 1.0, config)
        assert advantages.tolist() == [[2.5, 1, 1], [2.5, 0, 0]] and share == 0.5


def packed(batch):
    batch.packed_seq_lens = [3, 3]
    return batch


PAIR = experience([1, 1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: final_rewards("grpo", torch.ones(2), [replace(PAIR, group_id=None)]), ValueError, "group_id"),
        (lambda: final_rewards("reinforce", torch.ones(3), [PAIR]), ValueError, "do not belong"),
        (
            lambda: final_rewards("reinforce", [torch.ones(2), torch.ones(1)], [experience([1]), PAIR]),
            ValueError,
            "do not belong",
        ),
        (lambda: final_rewards("reinforce", torch.tensor([1.0, math.nan]), [PAIR]), RewardError, "finite"),
        (lambda: final_rewards("reinforce", torch.ones(2), [packed(experience([1, 1]))]), ValueError, "packed"),
        (lambda: final_rewards("gdpo", torch.zeros(2), [PAIR]), ConfigError, "rewards with weights"),
        (lambda: assigned("reinforce", experience([1]), [4.0], 0.1), ValueError, "no kl"),
        (lambda: calculator_of("gae").compute(PAIR, torch.ones(2), 1.0, {}), ValueError, "values"),
        (lambda: calculator_of("grop"), ValueError, "group_norm"),
        (
            lambda: finish_advantages([experience([1])], AlgorithmConfig(teacher_coef=1.0)),
            ValueError,
            "teacher_coef needs the log-probs of policy and teacher",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(call, error, words):
    with pytest.raises(error, match=words):
        call()


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_finite_for_any_mix_of_masks_groups_and_validity(data):
    name = data.draw(st.sampled_from(ESTIMATORS))
    batches, rewards = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(1, 4))
        lists = {
            key: data.draw(st.lists(strategy, min_size=size, max_size=size))
            for key, strategy in (
                ("groups", st.integers(0, 2)), ("lengths", st.integers(0, 4)), ("valid", st.booleans()),
                ("rewards", st.floats(-1e4, 1e4, width=32)),
            )
        }  # fmt: skip
        kl, values = torch.full((size, 4), math.nan), torch.full((size, 4), math.nan)
        batch = experience(lists["groups"], lists["lengths"], lists["valid"], values=values, kl=kl)
        batch.kl[batch.action_mask], batch.values[batch.action_mask] = 0.3, 1.5
        batch.action_log_probs, batch.teacher_log_probs = kl.clone(), kl.clone()
        batch.action_log_probs[batch.action_mask], batch.teacher_log_probs[batch.action_mask] = -1.0, -2.0
        batches.append(batch)
        rewards.append(torch.where(torch.tensor(lists["valid"]), torch.tensor(lists["rewards"]), math.nan))
    config = AlgorithmConfig(
        advantage_estimator=name, teacher_coef=data.draw(st.sampled_from([1.0] + [0.0] * (name != "distillation"))),
        advantages_norm=data.draw(st.booleans()), advantage_clip=5.0,
        reward_running_norm=data.draw(st.booleans()), overlong_buffer=True, overlong_buffer_len=4, reward_clip=10.0,
    )  # fmt: skip
    assign_advantages(get_advantage_calculator(name, config), batches, rewards, 0.1, KWARGS)
    for batch in batches:
        counted = batch.action_mask & batch.valid.unsqueeze(1)
        assert batch.advantages.isfinite().all() and batch.returns.isfinite().all()
        assert (batch.advantages[~counted] == 0).all()
        assert all(value.isfinite().all() and len(value) == len(batch.valid) for value in batch.info.values())


class TestGDPO:
    """Two groups; the format reward never varies in the second, where only some samples have a length reward."""

    groups = [4, 4, 4, 9, 9]
    components = {
        "right": torch.tensor([10.0, 0.0, 0.0, 10.0, 0.0]),
        "format": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]),
        "length": torch.tensor([math.nan, math.nan, math.nan, 2.0, 4.0]),
    }
    weights = {
        "right": torch.full((5,), 1.0),
        "format": torch.full((5,), 0.5),
        "length": torch.tensor([0, 0, 0, 1.0, 1]),
    }

    def scored(self, parts=(5,), valid=None):
        made, start = [], 0
        for size in parts:
            part = slice(start, start + size)
            each = experience(self.groups[part], valid=None if valid is None else valid[part])
            each.info = {
                "reward": torch.zeros(size),
                "reward_metrics": {name: values[part].clone() for name, values in self.components.items()},
                "reward_weights": {name: values[part] for name, values in self.weights.items()},
            }
            made.append(each)
            start += size
        return made

    def sums(self):
        """By hand: z-scores of each reward in its group (n - 1), times the weights."""
        first = [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]  # of one 1 and two 0, whatever their scale
        half = 1 / 2**0.5
        return torch.tensor([
            first[0] + 0.5 * first[1], first[1] + 0.5 * first[0], first[2] + 0.5 * first[2], half - half, -half + half
        ])  # fmt: skip

    @pytest.mark.parametrize("parts", [(5,), (2, 1, 2)])
    def test_rewards_are_normalised_apart_then_summed_then_over_the_batch(self, parts):
        final = torch.cat(final_rewards("gdpo", torch.zeros(5), self.scored(parts)))
        sums = self.sums()
        torch.testing.assert_close(final, (sums - sums.mean()) / sums.std(), rtol=1e-4, atol=1e-4)

    def test_the_norm_over_the_batch_is_of_answers_and_of_drawings_apart(self):
        batches = self.scored((3, 2))
        batches[1].info["loss_part"] = torch.ones(2)
        batches[1].info["reward_metrics"] = {name: torch.tensor([1.0, 3.0]) for name in self.components}
        answers, drawings = final_rewards("gdpo", torch.zeros(5), batches)
        sums = self.sums()[:3]
        torch.testing.assert_close(answers, (sums - sums.mean()) / sums.std(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drawings, torch.tensor([-(0.5**0.5), 0.5**0.5]), rtol=1e-4, atol=1e-4)

    def test_invalid_samples_enter_no_statistic(self):
        final = torch.cat(final_rewards("gdpo", torch.zeros(5), self.scored(valid=[True, True, False, True, True])))
        half = 1 / 2**0.5
        sums = torch.tensor([half - 0.5 * half, -half + 0.5 * half, 0.0, 0.0])
        assert final[2] == 0
        torch.testing.assert_close(final[[0, 1, 3, 4]], sums / sums.std(), rtol=1e-4, atol=1e-4)

    def test_a_reward_that_a_micro_batch_does_not_know_compares_none_of_its_samples(self):
        parts = self.scored((4, 1))
        for known in ("reward_metrics", "reward_weights"):
            del parts[1].info[known]["length"]
        final = torch.cat(final_rewards("gdpo", torch.zeros(5), parts))
        half = 1 / 2**0.5
        sums = torch.cat([self.sums()[:3], torch.tensor([half, -half])])
        torch.testing.assert_close(final, whitened(sums), rtol=1e-4, atol=1e-4)

    def test_the_overlong_penalty_is_a_reward_of_its_own(self):
        plain, cut = self.scored(), self.scored()
        for each in (plain, cut):
            each[0].action_mask = torch.arange(10) < torch.tensor([[10], [2], [2], [2], [2]])
        config = {"overlong_buffer": True, "overlong_buffer_len": 4}
        left = torch.cat(final_rewards("gdpo", torch.zeros(5), plain))
        right = torch.cat(final_rewards("gdpo", torch.zeros(5), cut, **config))
        assert right[0] < left[0] and right[1] > left[1]

    def test_a_group_that_says_nothing_has_exactly_no_advantage(self):
        """Others look for it: selective replay, forward passes that are left out."""
        made = self.scored()
        for values in made[0].info["reward_metrics"].values():
            values[3:] = 0.3
        final = torch.cat(final_rewards("gdpo", torch.zeros(5), made))
        assert (final[3:] == 0).all() and (final[:3] != 0).all()

    def test_weights_that_are_all_zero_teach_nothing(self):
        made = self.scored()
        made[0].info["reward_weights"] = {name: torch.zeros(5) for name in self.weights}
        made[0].info["reward_metrics"] = {}  # what weighs nothing is not scored
        assert (torch.cat(final_rewards("gdpo", torch.zeros(5), made)) == 0).all()
