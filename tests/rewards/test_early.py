"""Remote scorers work while samples are generated: the same requests as afterwards, each as soon as it can leave."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from lightrft_visual.batches.rollouts import PromptFeatures, Rollout
from lightrft_visual.rewards.batch import Scores, StreamingSource
from lightrft_visual.rewards.engine import RewardComputationEngine


class Lengths(StreamingSource):
    """Scores by the length of the response; notes the samples of each part as it comes."""

    name = "lengths"

    def __init__(self):
        self.seen: list[list[int]] = []
        self.calls = 0

    def submit_parts(self, parts, call):
        self.calls += 1
        pool = ThreadPoolExecutor(1)
        return [pool.submit(self._part, part) for part in parts]

    def _part(self, part: Future) -> Scores:
        batch = part.result(timeout=30)
        self.seen.append(batch.ids)
        values = torch.tensor([float(len(text)) for text in batch.responses], dtype=torch.float64)
        return Scores(values, torch.zeros(len(batch), dtype=torch.bool))


def rollouts(count: int, n: int, labels=None) -> list[Rollout]:
    prompts = [
        PromptFeatures("p", [1], group_id=i, reference="x", label=labels[i] if labels else None) for i in range(count)
    ]
    return [
        Rollout(prompt, [3], None, "x" * (n * i + k), False, sample_id=n * i + k)
        for i, prompt in enumerate(prompts)
        for k in range(n)
    ]


def test_a_request_leaves_when_its_samples_are_finished_and_holds_what_it_would_hold_later():
    early_source, late_source = Lengths(), Lengths()
    made = rollouts(4, 2)
    late = RewardComputationEngine(reward_model=late_source).score_rollouts(made, 3)
    engine = RewardComputationEngine(reward_model=early_source)
    early = engine.begin([None] * 8, 3)
    for prompt in (1, 0, 3):
        early.add(2 * prompt, made[2 * prompt : 2 * prompt + 2])
    part = early._parts
    assert [future.done() for _, future in part] == [True, False, True]  # samples 0-2, 3-5, 6-7
    early.add(4, made[4:6])
    found = engine.score_rollouts(made, 3, early=early)
    assert early_source.seen == late_source.seen == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert early_source.calls == 1 and torch.equal(found.score, late.score)
    assert found.score.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_only_the_samples_that_a_recipe_names_are_waited_for():
    source = Lengths()
    recipe = {"far": [("model", "0", 1.0)], "near": [("rule", "exact", 1.0)]}
    engine = RewardComputationEngine(reward_model=source, reward_recipe=recipe)
    made = rollouts(3, 2, labels=["near", "far", "near"])
    early = engine.begin([rollout.prompt.label for rollout in made], 8)
    early.add(2, made[2:4])
    assert all(future.done() for _, future in early._parts)
    engine.score_rollouts(made, 8, early=early)
    assert source.seen == [[2, 3]]


def test_without_a_remote_scorer_there_is_nothing_to_begin():
    engine = RewardComputationEngine(reward_fn=lambda completions: [1.0] * len(completions))
    assert engine.begin([None] * 4, 2) is None


def test_samples_that_will_not_come_are_not_waited_for():
    engine = RewardComputationEngine(reward_model=Lengths())
    early = engine.begin([None] * 2, 2)
    early.cancel()
    (scores,) = early.scores.values()
    assert not early.answered(0, 1)
    with pytest.raises(BaseException):  # noqa: B017 a CancelledError, which is no Exception of its own
        scores.result(timeout=30)


def test_the_rewards_of_some_samples_are_those_that_they_get_with_the_rest():
    recipe = {"far": [("model", "0", 2.0)], "near": [("model", "1", 1.0), ("model", "0", 0.5)]}
    engine = RewardComputationEngine(reward_model=[Lengths(), Lengths()], reward_recipe=recipe)
    assert engine.streams and engine.streams_all
    made = rollouts(4, 2, labels=["near", "far", "far", "near"])
    early = engine.begin([rollout.prompt.label for rollout in made], 3)
    early.add(0, made[:6])
    part = engine.score_answered(
        made[2:4], 2, early
    )  # of a request of source 0 with samples 0 to 2, and one with 3 to 5
    assert not early.answered(4, 8)
    early.add(6, made[6:])
    whole = engine.score_rollouts(made, 3, early=early)
    assert early.answered(0, 8)
    assert part.score.tolist() == whole.score[2:4].tolist() == [4.0, 6.0] and part.valid.all()
    again = engine.score_answered(made[5:], 5, early)
    assert again.score.tolist() == whole.score[5:].tolist() == [10.0, 9.0, 10.5]
    for name, values in again.weights.items():
        assert values.tolist() == whole.weights[name][5:].tolist()


def test_a_scorer_that_runs_here_or_a_sum_by_hand_is_told_apart():
    rule = RewardComputationEngine(reward_model=Lengths(), custom_reward_func=lambda completions: [0.0])
    by_hand = RewardComputationEngine(reward_model=Lengths(), reward_fn=lambda model_reward_list: model_reward_list[0])
    assert rule.streams and by_hand.streams and not rule.streams_all and not by_hand.streams_all
