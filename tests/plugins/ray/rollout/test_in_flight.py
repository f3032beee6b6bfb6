"""What a checkpoint holds of batches that are begun: as it was drawn, and nothing of what was asked otherwise."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.data.media import Video
from lightrft_visual.experience.rollouts import Completion, Episode, PromptFeatures, SamplingSettings, Turn
from lightrft_visual.experience.vision import InParts, VisionTensors
from lightrft_visual.plugins.ray.rollout.engine import RemoteEngine
from lightrft_visual.plugins.ray.rollout.episodes import HeldEpisode
from lightrft_visual.plugins.ray.rollout.in_flight import Begun, InFlight, asked_for
from lightrft_visual.runtime.checkpoint.state import load_state, save_state

SETTINGS = SamplingSettings(n=2, temperature=0.7, max_episode_tokens=13)
PROMPTS = [PromptFeatures("a", [3, 4], 0, reference="x", seed=2**62 + 1), PromptFeatures("b", [5], 1, seed=9)]


def done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def patches(count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(count, 7), "image_grid_thw": torch.tensor([[1, 1, count]])}


def held() -> HeldEpisode:
    seen = [{"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "closer"}]}]
    turns = [
        Turn("zoom", 0.1, seen, [("zoom", None), ("crop", "none such")], {"at": (3, 0.5), 1: {(0, 0): "x"}}),
        Turn("a dog", 1.5),
    ]
    vision = [VisionTensors([patches(3)]), VisionTensors([InParts([patches(2), patches(5)])])]
    clip = Video(np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3), {"fps": 2.0, "frames_indices": [1]})
    media = {"images": [Image.new("RGB", (5, 3), "green")], "videos": [clip], "vision": vision}
    own = Episode(turns, [0, -1, -1, 1], **media, gamma=0.9, failure="it broke", failed=True)
    begun = replace(PROMPTS[0], text="A", token_ids=[3, 4, 6], vision=VisionTensors([patches(4)]), messages=seen)
    return HeldEpisode([8, 6, 6, 7], [-0.1, 0.0, 0.0, -1 / 3], "a dog", True, [3, 4, 6], episode=own, prompt=begun)


def test_responses_come_back_as_they_were_from_a_file(tmp_path):
    plain = Completion([1, 2], [-1 / 3, -2.5], "no", False, [5], versions=[4, 6], experts=torch.ones(2, 1, 1))
    unscored = Completion([1], None, "", True, [5], versions=[3])
    first, second = held(), replace(held(), prompt=None, prompt_token_ids=[3, 4])
    batch = Begun(asked_for(PROMPTS, SETTINGS), [done(([[first, second]], 3)), done(([[plain, unscored]], None))])
    engine = SimpleNamespace(ahead=True, policies={3: 7, 4: 8, 6: 9})
    save_state(tmp_path / "state", InFlight([batch], lambda *own: RemoteEngine._told(engine, *own)))
    (kept,) = load_state(tmp_path / "state")["begun"]
    again = Begun.kept(kept, PROMPTS, SETTINGS)
    (one, two), (three, four) = again.completions(lambda *_: pytest.fail("they are told already"))
    for own, back in ((first, one), (second, two)):
        assert (back.token_ids, back.log_probs, back.text) == (own.token_ids, own.log_probs, own.text)
        assert (back.truncated, back.prompt_token_ids, back.versions) == (True, own.prompt_token_ids, [7] * 4)
        assert back.episode.images[0].tobytes() == own.episode.images[0].tobytes()
        assert np.array_equal(back.episode.videos[0].frames, own.episode.videos[0].frames)
        assert back.episode.videos[0].metadata == own.episode.videos[0].metadata
        assert back.episode.vision == own.episode.vision
        own.episode.turns[0].info = {"at": [3, 0.5], "1": {"(0, 0)": "x"}}  # a list and names, as JSON has them
        assert back.episode.turns == own.episode.turns and back.episode.turn_ids == own.episode.turn_ids
        assert (back.episode.gamma, back.episode.failure, back.episode.failed) == (0.9, "it broke", True)
    assert two.prompt is None and (one.prompt.text, one.prompt.token_ids, one.prompt.reference) == ("A", [3, 4, 6], "x")
    assert one.prompt.vision == first.prompt.vision and one.prompt.messages == first.prompt.messages
    assert (three.versions, three.log_probs, three.prompt_token_ids) == ([8, 9], plain.log_probs, [5])
    assert torch.equal(three.experts, plain.experts) and (four.log_probs, four.versions) == (None, [7])
    assert plain.versions == [4, 6]  # the run goes on with those of weights


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (PROMPTS, replace(SETTINGS, temperature=0.8)),
        (PROMPTS[:1], SETTINGS),
        ([replace(PROMPTS[0], seed=1), PROMPTS[1]], SETTINGS),
        ([PROMPTS[0], replace(PROMPTS[1], token_ids=[6])], SETTINGS),
    ],
    ids=["temperature", "number", "seed", "tokens"],
)
def test_what_is_asked_otherwise_is_drawn_again(pool_of, prompts, settings):
    asked, drawn = [], [[Completion([9], [0.0], "new", False, [])] * 2]

    class Handle:
        name = "a"

        def call(self, method, version, posted, caches, arguments):
            asked.extend(arguments[0])
            return drawn * len(arguments[0]), 1

    pool = pool_of([Handle()])
    engine = RemoteEngine(SimpleNamespace(pool=pool), ahead=True)
    engine.load_state_dict({"begun": [{"asked": asked_for(PROMPTS, SETTINGS), "made": []}]})
    engine.begin(prompts, settings)
    assert [each.text for own in engine.generate(prompts, settings) for each in own] == ["new"] * 2 * len(prompts)
    assert len(asked) == len(prompts) and not engine._kept


def test_a_batch_that_failed_or_has_lost_its_images_is_drawn_again_and_the_next_one_is_kept(pool_of):
    broken: Future = Future()
    broken.set_exception(RuntimeError("no server"))
    used, begun = held(), held()
    used.episode.images = [None]
    begun.prompt.images = [None]  # of a reset
    last = [Completion([1], None, "kept", False, [5])] * 2
    batches = [
        Begun({}, [done(([], 1)), broken]),
        Begun({}, [done(([[used]], 1))]),
        Begun({}, [done(([[begun]], 1))]),
        Begun(asked_for(PROMPTS[1:], SETTINGS), [done(([last], 1))]),
    ]
    state = InFlight(batches, lambda own, _: own)
    assert [each is None for each in state["begun"]] == [True, True, True, False]
    pool = pool_of([])
    engine = RemoteEngine(SimpleNamespace(pool=pool), ahead=True)
    engine.load_state_dict(state)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:1], PROMPTS[1:]):
        engine.begin(prompts, SETTINGS)
    assert [each.text for each in engine.generate(PROMPTS[1:], SETTINGS)[0]] == ["kept"] * 2


def test_responses_are_waited_for_when_the_state_is_read_and_not_before():
    future: Future = Future()
    state = InFlight([Begun({}, [future])], lambda own, _: own)
    future.set_result(([[Completion([1], None, "late", False, [5])]], 1))
    assert state["begun"][0]["made"][0][0]["text"] == "late"
