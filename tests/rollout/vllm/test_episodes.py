"""Episodes by vLLM: each goes on by itself, and every turn is what the trainer scores."""

import threading
from dataclasses import replace

import pytest
from engine_rig import enders, vllm_rig
from episode_rig import Scripted, batch_of, limits_of, most_begun, stage_of
from tiny_models import IMAGE, checkpoint_of, inputs_of

from lightrft_visual.experience.rollouts import SamplingSettings, collate

SETTINGS = SamplingSettings(n=3, max_new_tokens=12)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "internvl"])
def rig(request, root):
    checkpoint = checkpoint_of(root, request.param)
    with vllm_rig(checkpoint, enders(checkpoint)) as rig:
        yield rig


only_one = pytest.mark.parametrize("rig", ["qwen2_5_vl"], indirect=True)


def episodes_of(rig, turns):
    batch = batch_of(turns)
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


@only_one
def test_one_turn_is_the_plain_path(rig):
    batch, settings = episodes_of(rig, [1, 1]), replace(SETTINGS, n=4)
    plain, episodes = rig.stage.generate(batch, settings), stage_of(rig).generate(batch, settings)
    assert [each.token_ids for each in plain] == [each.token_ids for each in episodes]
    assert [each.truncated for each in plain] == [each.truncated for each in episodes]


@only_one
def test_the_engine_goes_on_as_before_after_an_episode_that_stops_the_call(rig):
    class Breaks(Scripted):
        def step(self, action):
            raise KeyError("x")

    stage = stage_of(rig, Breaks, limits=limits_of(6, 400, "stop"))
    with pytest.raises(Exception, match="on_environment_error stop"):
        stage.generate(episodes_of(rig, [2] * 4), SETTINGS)
    assert rig.apart(stage_of(rig).generate(episodes_of(rig, [2, 3]), SETTINGS), SETTINGS) <= 1e-5


@only_one
def test_no_more_environments_than_the_limit_are_begun_and_episodes_are_the_same(rig):
    batch, finished = episodes_of(rig, [1, 2, 4, 3]), []
    stage = stage_of(rig, limits=limits_of(6, 400, environments=5))
    begun = most_begun(stage)
    few = stage.draw(
        stage.requests(batch), SETTINGS, finished=lambda first, group: finished.append((first, len(group)))
    )
    assert begun == [5, 0]
    assert [each.token_ids for each in few] == [each.token_ids for each in stage_of(rig).generate(batch, SETTINGS)]
    assert sorted(finished) == [(0, 3), (3, 3), (6, 3), (9, 3)]


@only_one
def test_an_environment_that_takes_long_to_begin_or_to_answer_holds_no_other_up(rig):
    begun, asked, stepped, again, waited = threading.Lock(), threading.Lock(), threading.Event(), threading.Event(), []

    class Late(Scripted):
        def reset(self, row):
            super().reset(row)
            if begun.acquire(blocking=False):
                waited.append(stepped.wait(15))

        def step(self, action):
            stepped.set()
            if self.turn:
                again.set()
            elif asked.acquire(blocking=False):
                waited.append(again.wait(15))  # until another episode has its second turn
            return super().step(action)

    made = stage_of(rig, Late).generate(episodes_of(rig, [1, 2, 4, 3]), SETTINGS)
    assert waited == [True, True] and all(each.valid for each in made)
    assert rig.apart(made, SETTINGS) <= 1e-5
