"""Episodes in metrics, records, console and report."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.rollouts import (
    Episode,
    PromptFeatures,
    Rollout,
    Rollouts,
    SamplingSettings,
    Turn,
    collate,
    release_media,
    release_vision,
)
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.observe.console import spoken
from lightrft_visual.observe.images import save_image
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.observe.recorder import records_from_rollouts
from lightrft_visual.observe.report.data import Thumbnails
from lightrft_visual.observe.report.examples import card
from lightrft_visual.rewards.batch import InvalidTally
from lightrft_visual.rollout.parity import ParityGate, RolloutCheck
from lightrft_visual.trainer.features.episodes import EpisodesHook, add_episode_metrics, build
from lightrft_visual.trainer.vl.evaluation import Evaluation
from lightrft_visual.trainer.vl.updates import token_names


def image(colour: str) -> Image.Image:
    return Image.new("RGB", (40, 40), colour)


def episode() -> Episode:
    seen = [{"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "<b>closer</b>"}]}]
    turns = [Turn("zoom in", 0.0, seen, [("zoom", None), ("crop", "no such tool")], {"at": 3, "odd": object()})]
    return Episode([*turns, Turn("a dog", 1.5)], [0, 0, -1, -1, -1, 1], images=[image("green")], gamma=1.0)


def rollout(**more) -> Rollout:
    prompt = PromptFeatures("what is it?", [1, 2], 7, images=[image("red")])
    own = {"reward": 1.5, "episode": episode(), "components": {"environment": 1.5}}
    return Rollout(prompt, [5] * 6, [-1.0, -1.0, 0.0, 0.0, 0.0, -1.0], "a dog", False, **{"sample_id": 3} | own | more)


class WithoutText:
    def __str__(self):
        raise RuntimeError("no text")


def test_what_an_environment_tells_besides_ends_no_run():
    told = {"odd": WithoutText(), "long": 10**6000, "tool_errors": 10**400, "at": 3}
    own, metrics = Episode([Turn("a", info=told)], [0] * 6), MetricsAccumulator()
    (record,) = records_from_rollouts([rollout(episode=own)])
    info = record["turns"][0]["info"]
    assert "raised RuntimeError: no text" in info["odd"] and "ValueError" in info["long"] and info["at"] == 3
    json.dumps(info)
    add_episode_metrics(metrics, [own])
    assert metrics.reduce()["tool_errors"] == 10**6


def test_metrics_count_turns_tokens_calls_and_failures():
    metrics, failed = MetricsAccumulator(), Episode([], [-1], failure="raised KeyError")
    raised = Episode([Turn("zoom", calls=[("zoom", None)] * 3, info={"tool_errors": 2})], [0], failure=None)
    add_episode_metrics(metrics, [episode(), episode(), failed, raised])
    assert metrics.reduce() == {
        "turns": 5 / 4, "observation_tokens_share": 7 / 14, "environment_errors": 1.0, "tool_errors": 4.0,
        "tool_calls/zoom": 5.0,
    }  # fmt: skip


def test_a_record_holds_the_conversation_with_its_images_and_the_report_shows_it(tmp_path):
    (record,) = records_from_rollouts([rollout()])
    assert record["response_length"] == 3 and len(record["images"]) == 2
    assert record["turns"][0]["calls"] == [["zoom", None], ["crop", "no such tool"]]
    assert record["turns"][0]["info"]["at"] == 3 and isinstance(record["turns"][0]["info"]["odd"], str)
    assert spoken(record) == "zoom in ⏎ (image) <b>closer</b> ⏎ a dog"
    saved = {**record, "images": [save_image(tmp_path, each) for each in record["images"]]}
    shown = card(saved, Thumbnails(10**6), tmp_path, 0.0, 2.0)
    (own,), (first, seen, last) = shown["images"], shown["conversation"]
    assert [said["who"] for said in (first, seen, last)] == ["answer", "tool", "answer"]
    assert len(seen["images"]) == 1 and seen["images"][0]["uri"] != own["uri"]
    assert first["notes"] == ["zoom", "crop: no such tool"]
    assert shown["response"] is None and "2 turns" in shown["facts"]


def test_images_of_observations_leave_the_memory_with_those_of_prompts():
    kept, left = rollout(), rollout(sample_id=4)
    assert release_media([kept, left], {3}) >= 4 * 40 * 40 * 2
    assert left.episode.images == [None] and kept.episode.images != [None]
    assert kept.images[0] is not None and left.images == [None, None]
    pixels = [VisionTensors([{"pixel_values": torch.zeros(4, 3)}]) for _ in range(2)]
    left.prompt.vision, left.episode.vision = pixels[0], [pixels[1]]
    assert release_vision([left, left]) == 2 * 4 * 3 * 4
    assert not left.vision.names and left.episode.vision == []


def test_the_gate_names_the_turn_and_the_token_that_differ():
    batch = collate([rollout()], 0, vision=False)
    ours = batch.rollout_log_probs.clone()
    ours[0, 5] += 0.5
    gate = ParityGate(None, None, None, None, 0, False, torch.device("cpu"), tolerance=1e-4)
    check = RolloutCheck(gate, None)
    check.add(ours, batch.rollout_log_probs, batch.action_mask, token_names(batch, 6))
    with pytest.raises(RolloutError, match="most in sample 3, turn 2, token 6 of this rank"):
        check.settle()
    assert math.isclose(check.largest, 0.5, rel_tol=1e-6)


def test_a_step_whose_environments_mostly_fail_ends_the_run_with_the_reasons(caplog):
    hook = EpisodesHook(None, most_failures=0.5)
    lines = '\n  File "a.py", line 3, in reset\n    go()\n  File "a.py", line 9, in go\n    raise OSError("no server")'
    lines += '\n  after it raised OSError: no\n  File "urllib3/connection.py", line 7, in connect\n    c()'
    broken = rollout(episode=Episode([], [-1], failure=f"reset raised OSError: no server{lines}", failed=True))
    assert len(hook.on_rollouts(Rollouts([rollout(), broken]))) == 2
    assert caplog.messages == [
        'environments failed: reset raised OSError: no server, File "a.py", line 9, in go (1 of 2 episodes)'
    ]
    with pytest.raises(RolloutError, match="2 of 3 environments failed .*no server"):
        hook.on_rollouts(Rollouts([rollout(), broken, broken]))


def test_a_step_most_of_whose_episodes_are_invalid_by_a_limit_goes_on_as_no_environment_failed(caplog):
    over, metrics = Episode([Turn("a")], [0] * 6, limit="turns", failed=True), MetricsAccumulator()
    EpisodesHook(None, most_failures=0.5).on_rollouts(Rollouts([rollout(episode=over)] * 3))
    add_episode_metrics(metrics, [over])
    assert caplog.messages == ["3 of 3 episodes are invalid: it reached its limit of turns"]
    assert metrics.reduce()["environment_errors"] == 0.0
    (record,) = records_from_rollouts([rollout(episode=over)])
    assert record["failure"] == "it reached its limit of turns"


def test_ranks_meet_behind_episodes_before_the_first_collective_of_a_step_or_evaluation(monkeypatch):
    done = []
    monkeypatch.setattr("lightrft_visual.runtime.collectives.meet", lambda: done.append("met"))
    monkeypatch.setattr("lightrft_visual.runtime.collectives.all_reduce_sum", lambda own: done.append("sum") or own)
    EpisodesHook(None, most_failures=0.5).on_rollouts(Rollouts([rollout()]))
    maker = SimpleNamespace(
        sample=lambda *_: done.append("drawn") or [], judge=lambda *_: done.append("judged"),
        settings=SimpleNamespace(micro_batch_size=1), rewards=None,
    )  # fmt: skip
    prompts = SimpleNamespace(labels=[], captions=[])
    sampled = SamplingSettings(n=1)
    Evaluation(maker, prompts, sampled, sampled, 0, 0)._rollouts(prompts, [], sampled, InvalidTally(0), None)
    assert done == ["met", "sum", "drawn", "met", "judged"]


def test_a_step_whose_failures_end_episodes_with_their_reward_goes_on(caplog):
    ended = rollout(episode=Episode([Turn("a", 0.5)], [0], failure="step raised KeyError"))
    assert len(EpisodesHook(None, most_failures=0.5).on_rollouts(Rollouts([ended, ended]))) == 2
    assert "KeyError (2 of 2 episodes)" in caplog.text


def test_a_first_step_whose_ended_episodes_have_no_reward_is_told_once_where_the_run_has_no_other(caplog):
    unrewarded, rewarded = (
        rollout(episode=Episode([Turn("a")], [0])),
        rollout(episode=Episode([Turn("a", 1.0)], [0], rewarded=True)),
    )
    cut = rollout(episode=Episode([Turn("a")], [0], limit="turns"))
    EpisodesHook(None, 0.5).on_rollouts(Rollouts([unrewarded]))
    EpisodesHook(None, 0.5, only_reward=True).on_rollouts(Rollouts([unrewarded, rewarded]))
    hook = EpisodesHook(None, 0.5, only_reward=True)
    hook.on_rollouts(Rollouts([cut, cut]))
    assert not caplog.messages
    for _ in range(2):
        hook.on_rollouts(Rollouts([unrewarded, cut]))
    (told,) = caplog.messages
    assert told.startswith("no episode of this step got a reward") and "reward_fn or reward.components" in told


@pytest.mark.parametrize(
    ("named", "alone"),
    [
        ({"components": {"environment": 1.0}}, True),
        ({"components": {"environment": 1.0, "exact": 1.0}}, False),
        ({"components": {"environment": 1.0}, "reward_fn": "mine.py:f"}, False),
    ],
)
def test_the_environment_is_the_only_reward_where_no_other_is_named(named, alone, caplog):
    config = SimpleNamespace(episodes=SimpleNamespace(used=True), reward=RewardConfig(**named))
    maker = SimpleNamespace(rollout_stage=SimpleNamespace(host=None))
    hook, step = (
        build(SimpleNamespace(config=config, maker=maker)),
        Rollouts([rollout(episode=Episode([Turn("a")], [0]))]),
    )
    hook.on_rollouts(step)
    assert bool(caplog.messages) == alone


def test_a_run_says_once_why_most_calls_of_tools_fail_malformed_ones_included(caplog):
    off_thread = "error: ask raised ValueError: signal only works in main thread"
    failed = Turn("a", calls=[("ask", None)] * 2, info={"tool_errors": 2, "tool_error": off_thread})
    worked, malformed = Turn("a", calls=[("ask", None)] * 2), Turn("a", calls=[("ask", "not valid JSON")])
    hook = EpisodesHook(None, most_failures=0.5)
    hook.on_rollouts(Rollouts([rollout(episode=Episode([failed, worked], [0]))]))
    assert caplog.text == ""
    for _ in range(2):
        hook.on_rollouts(Rollouts([rollout(episode=Episode([failed, malformed, worked], [0]))]))
    (told,) = caplog.messages
    assert told.startswith(f"3 of 5 calls of tools failed in a step; most often: {off_thread}")
    EpisodesHook(None, 0.5).on_rollouts(Rollouts([rollout(episode=Episode([malformed], [0]))]))
    assert "most often: not valid JSON" in caplog.text
