"""Remote scorers work while samples are generated: the same requests as afterwards, each as soon as it can leave."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import lightrft_visual.rewards.engine as reward_engine
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout
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
        self.columns = batch.columns
        values = torch.tensor([float(len(text)) for text in batch.responses], dtype=torch.float64)
        return Scores(values, torch.zeros(len(batch), dtype=torch.bool))


def rollouts(count: int, n: int, labels=None) -> list[Rollout]:
    labels = labels or [None] * count
    prompts = [PromptFeatures("p", [1], group_id=i, reference="x", label=labels[i]) for i in range(count)]
    return [Rollout(prompts[i // n], [3], None, "x" * i, False, sample_id=i) for i in range(count * n)]


def test_a_request_leaves_when_its_samples_are_finished_and_holds_what_it_would_hold_later():
    early_source, late_source = Lengths(), Lengths()
    made = rollouts(4, 2)
    late = RewardComputationEngine(reward_model=late_source).score_rollouts(made, 3)
    engine = RewardComputationEngine(reward_model=early_source, columns={"level"})
    early = engine.begin([None] * 8, 3)
    for prompt in (1, 0, 3):
        early.add(2 * prompt, made[2 * prompt : 2 * prompt + 2])
    assert [future.done() for future in early._parts] == [True, False, True]  # samples 0-2, 3-5, 6-7
    early.add(4, made[4:6])
    found = engine.score_rollouts(made, 3, early=early)
    assert early_source.seen == late_source.seen == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert early_source.calls == 1 and torch.equal(found.score, late.score)
    assert early_source.columns == {"level"}
    assert found.score.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_finished_prompt_asks_about_its_own_requests_alone(monkeypatch):
    asked = []

    class Watched(Future):
        def done(self):
            asked.append(self)
            return super().done()

    monkeypatch.setattr(reward_engine, "Future", Watched)
    engine, made = RewardComputationEngine(reward_model=Lengths()), rollouts(30, 2)
    early = engine.begin([None] * 60, 3)
    for prompt in range(30):
        early.add(2 * prompt, made[2 * prompt : 2 * prompt + 2])
    assert len(asked) == 20 and all(future.result() for future in early._parts)
    assert engine.score_rollouts(made, 3, early=early).score.tolist() == list(range(60))


def test_only_the_samples_that_a_recipe_names_are_waited_for():
    source = Lengths()
    recipe = {"far": [("model", "0", 1.0)], "near": [("rule", "exact", 1.0)]}
    engine = RewardComputationEngine(reward_model=source, reward_recipe=recipe)
    made = rollouts(3, 2, labels=["near", "far", "near"])
    early = engine.begin([rollout.prompt.label for rollout in made], 8)
    early.add(2, made[2:4])
    assert all(future.done() for future in early._parts)
    engine.score_rollouts(made, 8, early=early)
    assert source.seen == [[2, 3]]


def test_samples_that_will_not_come_are_not_waited_for():
    engine = RewardComputationEngine(reward_model=Lengths())
    early = engine.begin([None] * 2, 2)
    early.cancel()
    ((_, (scores,)),) = early._asked.values()
    with pytest.raises(BaseException):  # noqa: B017 a CancelledError, which is no Exception of its own
        scores.result(timeout=30)


def relabelled(made: list[Rollout]) -> list[Rollout]:
    return [replace(made[0], prompt=replace(made[0].prompt, label="far")), *made[1:]]


@pytest.mark.parametrize("change", [lambda made: made[::-1], lambda made: made[2:], relabelled])
def test_samples_that_are_not_those_that_a_scorer_was_given_are_scored_anew(change, caplog):
    source = Lengths()
    recipe = {"far": [("model", "0", 1.0)], "*": [("model", "0", 2.0)]}
    engine = RewardComputationEngine(reward_model=source, reward_recipe=recipe)
    made = rollouts(3, 2)
    early = engine.begin([None] * 6, 4)
    early.add(0, made)
    changed = change(made)
    found = engine.score_rollouts(changed, 4, early=early)
    weights = [1.0 if each.prompt.label == "far" else 2.0 for each in changed]
    assert found.score.tolist() == [weight * len(each.text) for weight, each in zip(weights, changed)]
    assert source.calls == 2 and "a hook changed rollouts that it has already" in caplog.text


def test_a_remote_scorer_streams_and_beside_functions_alone_there_is_nothing_to_begin():
    remote = RewardComputationEngine(reward_model=Lengths(), custom_reward_func=lambda completions: [0.0])
    local = RewardComputationEngine(custom_reward_func=lambda completions: [0.0])
    assert remote.streams and not local.streams and local.begin([None] * 4, 2) is None
