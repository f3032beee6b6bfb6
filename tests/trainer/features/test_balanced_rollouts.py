"""Prompts dealt to ranks by expected length, for generation alone."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run_on_ranks
from hypothesis import example, given
from hypothesis import strategies as st

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, Rollouts, SamplingSettings
from lightrft_visual.runtime import collectives
from lightrft_visual.trainer.features.balanced_rollouts import BalancedRolloutsHook, deal
from lightrft_visual.trainer.hooks import Hooks

BENCH = Path(__file__).parents[3] / "scripts" / "bench"
COSTS = st.lists(st.lists(st.floats(1, 256), min_size=3, max_size=3), min_size=1, max_size=4)


@given(COSTS)
@example([[5.0] * 3, [5.0] * 3])
def test_each_prompt_is_dealt_once_and_no_rank_exceeds_the_mean_by_more_than_a_prompt(costs):
    dealt, homes = deal(costs), [[(r, i) for i in range(3)] for r in range(len(costs))]
    assert sorted(pair for each in dealt for pair in each) == sum(homes, [])
    loads = [sum(costs[home][index] for home, index in each) for each in dealt]
    assert max(loads) <= sum(loads) / len(loads) + max(map(max, costs)) + 1e-6
    assert dealt == homes or len({*sum(costs, [])}) > 1  # prompts of one length stay at home


def test_expected_lengths_are_running_means_by_label_and_of_a_new_label_the_mean_of_all():
    hook = BalancedRolloutsHook(longest=99)
    assert hook.expected("a") == 99
    hook._learn([{"a": (10, 2)}, {"a": (20, 1), "b": (40, 2)}])
    assert (hook.expected("a"), hook.expected("b"), hook.expected("c")) == (10, 20, 15)
    hook._learn([{"a": (40, 2)}])
    assert hook.expected("a") == pytest.approx(0.7 * 10 + 0.3 * 20)
    other = BalancedRolloutsHook(longest=99)
    other.load_state_dict(hook.state_dict())
    assert other.means == hook.means


def test_lengths_that_are_saved_do_not_follow_a_later_step():
    """A step may be given up, and be made again from what was saved before it."""
    hook = BalancedRolloutsHook(longest=99)
    hook._learn([{"a": (10, 1)}])
    state = hook.state_dict()
    hook._learn([{"a": (20, 1), "b": (40, 2)}])
    assert state["means"] == {"a": 10}


def test_prompts_go_to_other_ranks_with_what_engines_read_of_them():
    """By the messages vLLM knows that the text has its template's special tokens already."""
    asked = PromptFeatures("p", [1], 0, reference="r", metadata={"c": 1}, messages=[{"role": "user", "content": "p"}])
    (taken,) = BalancedRolloutsHook(9).on_prompts([asked])
    assert taken == replace(asked, reference=None, metadata={}) and taken.messages == asked.messages


def test_lengths_that_another_number_of_ranks_saw_count_once(monkeypatch):
    saved = [{"means": {"a": 4.0}, "seen": {"a": (10, 2)}}, {"means": {"a": 4.0}, "seen": {"a": (2, 2), "b": (6, 1)}}]
    seen, wanted = [], BalancedRolloutsHook(9)
    for first in (True, False, False):
        monkeypatch.setattr(collectives, "is_rank_0", lambda first=first: first)
        hook = BalancedRolloutsHook(9)
        hook.load_state_dict(hook.state_of_ranks(saved))
        seen.append(hook._seen)
    wanted.means = {"a": 4.0}
    wanted._learn([each["seen"] for each in saved])
    hook._learn(seen)
    assert hook.means == wanted.means == {"a": pytest.approx(0.7 * 4 + 0.3 * 3), "b": 6}


def rewritten(requests: list[PromptFeatures]) -> list[PromptFeatures]:
    requests[0].token_ids = [9, 9]
    return requests


@pytest.mark.parametrize(
    "changed",
    [
        lambda requests: requests[1:], lambda requests: requests[::-1], rewritten,
        lambda requests: [replace(each, text="other") for each in requests],
    ],
)  # fmt: skip
def test_prompts_that_a_later_hook_changes_are_refused_as_answers_would_go_to_others(changed):
    """Rewards and tokens of a prompt would be given to the answers to another."""
    hooks, sampling = Hooks([BalancedRolloutsHook(9), SimpleNamespace(on_prompts=changed)]), SamplingSettings(n=2)
    asked = [PromptFeatures(f"p{number}", [number], number) for number in range(2)]

    def answered(requests):
        made = [Rollout(each, [1], None, "", False, 2 * each.group_id + copy) for each in requests for copy in (0, 1)]
        return hooks.on_rollouts(Rollouts(made, sampling))

    with pytest.raises(ConfigError, match="on_prompts of a hook changes prompts .* balance_rollouts"):
        answered(hooks.on_prompts(asked))
    hooks = Hooks([BalancedRolloutsHook(9)])
    assert [each.prompt.text for each in answered(hooks.on_prompts(asked))] == ["p0", "p0", "p1", "p1"]


@pytest.mark.slow
def test_two_ranks_generate_the_same_responses_and_after_one_round_as_many_tokens(tmp_path):
    arguments = [str(tmp_path), "--lengths", "2", "8", "32"]
    run_on_ranks(BENCH / "balanced_rollouts.py", arguments, os.environ | {"OMP_NUM_THREADS": "1"}, 2, 260)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    loads = {name: [[each[name][number]["tokens"] for each in ranks] for number in range(4)] for name in ranks[0]}
    assert all(max(pair) <= 1.1 * sum(pair) / 2 for pair in loads["balanced"][1:])
    assert any(max(pair) > 1.1 * sum(pair) / 2 for pair in loads["plain"][1:])
    for rank in ranks:
        for plain, balanced in zip(rank["plain"], rank["balanced"]):
            assert [each[0::3] for each in balanced["responses"]] == [each[0::3] for each in plain["responses"]]
            assert [each[1] for each in balanced["responses"]] == [each[1] for each in plain["responses"]]
            for ours, theirs in zip(balanced["responses"], plain["responses"]):
                assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
