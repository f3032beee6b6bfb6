"""The guard over a run's metrics: which signals it raises, once each, and that it goes on alike after a resume."""

import pytest

from lightrft_visual.config.shared import GuardConfig
from lightrft_visual.observe.guard import watch
from lightrft_visual.observe.guard.divergence import PairedScores
from lightrft_visual.observe.guard.watch import Guard, repetition, text_statistics


def look_at(step, reward, gold):
    """Of eight prompts that differ in what they are worth, alike in reward and gold."""
    worth = [each / 10 for each in range(-4, 4)]
    return PairedScores(step, list(range(8)), [each + reward for each in worth], [each + gold for each in worth])


def walk(guard, steps, first=1):
    """Alarms of (metrics) a step, as (step, signal)."""
    told = []
    for step, metrics in enumerate(steps, start=first):
        look = look_at(step, metrics["reward_mean"], metrics["gold"]) if "gold" in metrics else None
        told += guard.after_step(step, metrics, look)
    return [(alarm.step, alarm.signal) for alarm in told]


def lengths(*values):
    return [{"reward_mean": 0.5, "response_length": float(value)} for value in values]


def test_a_signal_is_told_once_each_time_that_it_leaves():
    guard = Guard(GuardConfig(), learn_steps=4)
    steps = lengths(10, 10, 10, 10, 20, 20, 20, 10, 20, 20)
    assert walk(guard, steps) == [(6, "response_length"), (10, "response_length")]
    assert walk(Guard(GuardConfig(watch=False), learn_steps=4), steps) == []
    unreadable = lengths(4, 4, float("nan"), float("inf")) + [{"reward_mean": float("nan")}, {}]
    assert walk(Guard(GuardConfig(), learn_steps=2), unreadable) == []


ENTROPIES = [1.0] * 8 + [0.2] * 6


@pytest.mark.parametrize("gold", [True, False])
def test_entropy_may_fall_while_gold_rises_or_where_there_is_none_the_reward(gold):
    rising = [
        {"reward_mean": 0.1 * i, "entropy": e} | ({"gold": 0.05 * i} if gold else {}) for i, e in enumerate(ENTROPIES)
    ]
    level = [each | ({"gold": 0.3} if gold else {"reward_mean": 0.3}) for each in rising]
    assert walk(Guard(GuardConfig(), learn_steps=8), rising) == []
    assert walk(Guard(GuardConfig(), learn_steps=8), level) == [(10, "entropy")]


def test_until_gold_is_looked_at_again_the_reward_says_it():
    """Gold of evaluations alone, of which the first was before training."""
    guard = Guard(GuardConfig(), learn_steps=8)
    guard.after_evaluation(0, {"eval_gold": 0.3}, look_at(0, 0.0, 0.3))
    assert walk(guard, [{"reward_mean": 0.1 * i, "entropy": e} for i, e in enumerate(ENTROPIES)]) == []
    guard.after_evaluation(14, {"eval_gold": 0.3}, look_at(14, 1.3, 0.3))
    assert walk(guard, [{"reward_mean": 1.4, "entropy": 0.2}] * 2, first=15) == [(15, "entropy")]


def test_images_that_come_to_show_the_same_thing_may_vary_less():
    """Half of the variety goes where half of the images show the right thing at first, and all of them in the end."""
    falling = [{"reward_mean": i / 40, "image_diversity": 0.21 - 0.1 * i / 40} for i in range(40)]
    assert walk(Guard(GuardConfig()), falling) == []
    gone = falling + [{"reward_mean": 1.0, "image_diversity": 0.08}] * 2
    assert walk(Guard(GuardConfig()), gone) == [(42, "image_diversity")]


def test_form_without_content_is_a_component_that_parts_from_the_whole():
    steps = [
        {"reward_mean": 0.3 + i / 50, "reward/form": 0.1 + i / 40, "reward/exact": 0.5 - max(0, i - 10) * 0.02}
        for i in range(30)
    ]
    guard = Guard(GuardConfig(), learn_steps=8)
    guard.paying = ["form", "exact"]
    told = walk(guard, steps)
    assert [signal for _, signal in told] == ["reward/exact"] and told[0][0] < 22


@pytest.mark.parametrize("name", ["penalty", "time", "errors", "format/failures", "format", "host:80/reward"])
def test_what_a_reward_reports_beside_its_score_may_fall_and_components_may_not(name):
    steps = [{"reward_mean": i / 30, "reward/exact": i / 30, f"reward/{name}": 1 - i / 40} for i in range(30)]
    guard = Guard(GuardConfig(), learn_steps=8)
    guard.paying = ["exact", "format", "host:80/reward", "unseen"]
    assert [signal for _, signal in walk(guard, steps)] == [f"reward/{name}"] * (name in guard.paying)


def test_gold_between_evaluations_and_images_far_from_the_base():
    guard = Guard(GuardConfig(), learn_steps=8)
    rows = [(0, 0.3, 0.4, None), (10, 0.5, 0.6, 0.1), (20, 0.7, 0.5, 0.2), (30, 0.8, 0.5, 0.5)]
    told = []
    for step, reward, gold, drift in rows:
        metrics = {"eval_reward": reward, "eval_gold": gold, "eval_image_diversity": 0.2}
        look = look_at(step, reward, gold)
        told += guard.after_evaluation(step, metrics | ({"eval_drift": drift} if drift else {}), look)
    assert [(alarm.step, alarm.signal, alarm.since) for alarm in told] == [
        (20, "eval_gold", 10),
        (30, "eval_drift", 30),
    ]
    assert guard.best == (0.6, 10)


def test_it_goes_on_alike_after_a_resume():
    steps = [
        {"reward_mean": 0.1 * i, "gold": 0.5 - 0.04 * abs(i - 12), "response_length": 5.0 + (i > 15) * 9}
        for i in range(25)
    ]
    whole, first, second = (Guard(GuardConfig(), learn_steps=8) for _ in range(3))
    first.after_evaluation(0, {"eval_reward": 0.1, "eval_gold": 0.2})
    expected, told = walk(whole, steps), walk(first, steps[:13])
    state = first.state_dict()
    second.load_state_dict(state)
    assert state["partings"] and told + walk(second, steps[13:], first=14) == expected and len(expected) == 2
    assert second.best == (0.2, 0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], 0), ([1], 0), ([1, 1], 0), ([1, 1, 1], 0.5), ([1, 2, 1, 2, 1], 0.5), ([1, 2, 3, 4], 0)],
)
def test_repetition(tokens, expected):
    assert repetition(tokens) == expected


def test_same_answers_within_and_between_groups():
    found = text_statistics([[1], [1], [1], [2], [1], [1]], [0, 0, 0, 0, 7, 7])
    assert found == {"repetition": 0, "identical_share": (0.75 + 1.0) / 2, "common_answer": 1.0}
    found = text_statistics([[1], [1], [2], [2]], [0, 0, 1, 1])
    assert found["common_answer"] == 0.5 and found["identical_share"] == 1.0
    for tokens, groups in (([[1], [2]], [0, 1]), ([[1], [1]], [0, 0])):  # nothing to compare
        assert text_statistics(tokens, groups) == {"repetition": 0}


def test_each_rank_has_the_statistics_of_all_also_with_no_group_to_compare(monkeypatch):
    tokens, groups = [[1, 1, 1], [1, 1, 1], [2], [3], [1, 1, 1], [4]], [0, 0, 1, 1, 2, 2]
    whole = text_statistics(tokens, groups)
    assert whole == {"repetition": 0.25, "identical_share": pytest.approx(2 / 3), "common_answer": pytest.approx(2 / 3)}
    assert text_statistics([], []) == {}
    sent: list = []
    monkeypatch.setattr(watch, "all_gather_object", lambda own: sent.append(own) or [own])
    for part in (slice(0, 2), slice(2, 2), slice(2, 6)):
        text_statistics(tokens[part], groups[part])
    monkeypatch.setattr(watch, "all_gather_object", lambda _: sent)
    assert text_statistics([], []) == whole
