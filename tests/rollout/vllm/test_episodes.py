"""Episodes by vLLM: each goes on by itself, and every turn is what the trainer scores."""

import time
from dataclasses import replace

import pytest
from engine_rig import enders, vllm_rig
from episode_rig import Scripted, batch_of, most_begun, stage_of
from tiny_models import IMAGE, checkpoint_of, inputs_of

from lightrft_visual.experience.rollouts import SamplingSettings, collate
from lightrft_visual.rollout.episodes import EpisodeLimits

SETTINGS = SamplingSettings(n=3, max_new_tokens=12)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"])
def rig(request, root):
    checkpoint = checkpoint_of(root, request.param)
    with vllm_rig(checkpoint, enders(checkpoint)) as rig:
        yield rig


def episodes_of(rig, turns, images=True):
    batch = batch_of(turns, images)
    if rig.checkpoint.config.model_type == "internvl":
        batch.prompts = [text.replace(IMAGE, "<IMG_CONTEXT>\n") for text in batch.prompts]
    return batch


def test_log_probs_of_every_turn_are_the_trainers(rig):
    """check_prompt_ids holds at every turn, or generation raises."""
    rollouts = stage_of(rig).generate(episodes_of(rig, [1, 2, 4, 3]), SETTINGS)
    assert {len(rollout.episode.turns) for rollout in rollouts} >= {1, 2, 3}
    assert not any(rollout.episode.failure for rollout in rollouts)
    assert rig.apart(rollouts, SETTINGS) <= 1e-5
    theirs = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
    if rig.checkpoint.family.unproven is None:
        packed = inputs_of(rig.checkpoint, rollouts, packed=True)
        difference = rig.score(packed, SETTINGS.scoring) - theirs.rollout_log_probs
        assert difference[theirs.action_mask].abs().max() <= 1e-5


def test_one_turn_is_the_plain_path(rig):
    batch, settings = episodes_of(rig, [1, 1]), replace(SETTINGS, n=4)
    plain, episodes = rig.stage.generate(batch, settings), stage_of(rig).generate(batch, settings)
    assert [each.token_ids for each in plain] == [each.token_ids for each in episodes]
    assert [each.truncated for each in plain] == [each.truncated for each in episodes]


def test_the_engine_goes_on_as_before_after_an_episode_that_stops_the_call(rig):
    class Breaks(Scripted):
        def step(self, action):
            raise KeyError("x")

    stage = stage_of(rig, Breaks, limits=EpisodeLimits(6, 400, "stop"))
    with pytest.raises(Exception, match="on_environment_error stop"):
        stage.generate(episodes_of(rig, [2] * 4), SETTINGS)
    assert rig.apart(stage_of(rig).generate(episodes_of(rig, [2, 3]), SETTINGS), SETTINGS) <= 1e-5


def test_no_more_environments_than_the_limit_are_begun_and_episodes_are_the_same(rig):
    batch, finished = episodes_of(rig, [1, 2, 4, 3]), []
    stage = stage_of(rig, limits=EpisodeLimits(6, 400, environments=5))
    begun = most_begun(stage)
    few = stage.draw(
        stage.requests(batch), SETTINGS, finished=lambda first, group: finished.append((first, len(group)))
    )
    assert begun == [5, 0]
    assert [each.token_ids for each in few] == [each.token_ids for each in stage_of(rig).generate(batch, SETTINGS)]
    assert sorted(finished) == [(0, 3), (3, 3), (6, 3), (9, 3)]


class Slow(Scripted):
    """Steps take 50 ms, and one in sixteen 2 s."""

    def step(self, action):
        time.sleep(2.0 if (self.seed + self.turn) % 16 == 0 else 0.05)
        self.waited = getattr(self, "waited", 0.0) + (2.0 if (self.seed + self.turn) % 16 == 0 else 0.05)
        LONGEST.append(self.waited)
        return super().step(action)


LONGEST: list[float] = []


@pytest.mark.slow
def test_slow_environments_do_not_hold_others_up(rig):
    if rig.checkpoint.config.model_type != "qwen2_vl":
        pytest.skip("one engine shows it")
    batch, settings = episodes_of(rig, [1, 2, 3, 4, 5, 6, 6, 6] * 2, images=False), replace(SETTINGS, n=4)
    limits = EpisodeLimits(6, 600)
    stage_of(rig, limits=limits).generate(batch, settings)  # once, to be warm

    def seconds(environment) -> float:
        started = time.monotonic()
        assert len(stage_of(rig, environment, limits=limits).generate(batch, settings)) == 64
        return time.monotonic() - started

    quick, took = seconds(Scripted), seconds(Slow)
    told = f"{took:.2f} s, the longest environment {max(LONGEST):.2f} s, without waiting {quick:.2f} s"
    assert took <= 1.3 * (max(LONGEST) + quick), told
