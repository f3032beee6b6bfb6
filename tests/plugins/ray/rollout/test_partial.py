"""Responses in segments: what comes out is what one call would have made, and long ones hold nothing up."""

import threading

import pytest
from waiting import polls

from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.rollouts import Completion, PromptFeatures, SamplingSettings
from lightrft_visual.plugins.ray.rollout.partial import PartialRollouts

END = 9


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if token != END)


class Handle:
    """A worker whose response to copy c of prompt g is c, g, c, g, ... of a length that the prompt's label says."""

    name = "one"

    def __init__(self):
        self.calls, self.hold = [], None

    def call(self, method, version, posted, caches, arguments):
        prompts, settings = arguments
        self.calls.append([(prompt.group_id, len(prompt.continued)) for prompt in prompts])
        if self.hold is not None:
            self.hold.wait(60)
        return [[self.one(prompt, settings)] for prompt in prompts], version

    def one(self, prompt, settings):
        whole = [prompt.copy, prompt.group_id] * 10
        whole = [*whole[: int(prompt.label) - 1], END]
        assert prompt.continued == whole[: len(prompt.continued)]
        ids = whole[len(prompt.continued) :][: settings.max_new_tokens]
        return Completion(ids, [-0.5] * len(ids), "", ids[-1] != END, prompt.token_ids)


def prompts(*lengths: int) -> list[PromptFeatures]:
    return [PromptFeatures("", [1, 2], group_id=group, label=str(each)) for group, each in enumerate(lengths)]


def test_segments_make_whole_responses(pool_of):
    handle = Handle()
    pool = pool_of([handle])
    partial = PartialRollouts(pool, Tokenizer(), tokens=3, slots=8)
    (future,) = partial.begin(prompts(2, 7, 9), SamplingSettings(n=2, max_new_tokens=8))
    made, _ = future.result(60)
    assert [[len(each.token_ids) for each in group] for group in made] == [[2, 2], [7, 7], [8, 8]]
    assert [each.truncated for group in made for each in group] == [False] * 4 + [True] * 2
    assert made[1][1].token_ids == [1, 1, 1, 1, 1, 1, END] and made[1][1].text == "1 1 1 1 1 1"
    assert made[2][0].token_ids == [0, 2, 0, 2, 0, 2, 0, 2] and len(made[2][0].log_probs) == 8
    assert [len(call) for call in handle.calls] == [6, 4, 4]


def test_an_image_is_one_segment_however_short_texts_are(pool_of):
    class Drawer(Handle):
        def one(self, prompt, settings):
            if prompt.caption is None:
                return super().one(prompt, settings)
            return Completion([7] * 16, [-0.5] * 16, "", False, prompt.token_ids, image=prompt.caption)

    pool = pool_of([Drawer()])
    asked = prompts(7, 1)
    asked[1].caption = "a red circle"
    (future,) = PartialRollouts(pool, Tokenizer(), tokens=3, slots=8).begin(
        asked, SamplingSettings(n=1, max_new_tokens=8)
    )
    (text,), (drawn,) = future.result(60)[0]
    assert len(text.token_ids) == 7 and drawn.token_ids == [7] * 16 and len(drawn.log_probs) == 16
    assert (drawn.image, drawn.text, drawn.truncated, drawn.versions) == ("a red circle", "", False, [0] * 16)


def test_weights_change_and_prompts_join_between_segments(pool_of):
    handle = Handle()
    handle.hold = threading.Event()
    pool = pool_of([handle])
    partial = PartialRollouts(pool, Tokenizer(), tokens=2, slots=8)
    settings = SamplingSettings(n=1, max_new_tokens=8)
    (long,) = partial.begin(prompts(6), settings)
    (short,) = partial.begin(prompts(2), settings)
    assert any(handle.calls for _ in polls(60, 0.001))
    pool.give_weights(1, None, at_once=False)
    handle.hold.set()
    assert long.result(60)[0][0][0].versions == [0, 0, 1, 1, 1, 1]
    assert short.result(60)[0][0][0].versions == [1, 1]
    assert handle.calls[:2] == [[(0, 0)], [(0, 2), (0, 0)]]  # the second prompt joined the first one's second segment


@pytest.mark.parametrize("fault", ["too few", "no text"])
def test_an_answer_that_cannot_be_used_is_an_error_and_nobody_waits_for_it(pool_of, fault):
    class Short(Handle):
        def call(self, method, version, posted, caches, arguments):
            made, version = super().call(method, version, posted, caches, arguments)
            return made[:-1] if fault == "too few" else made, version

    class Mute(Tokenizer):
        def decode(self, ids, skip_special_tokens):
            raise ValueError("no text for these tokens")

    pool = pool_of([Short()])
    tokenizer = Tokenizer() if fault == "too few" else Mute()
    (future,) = PartialRollouts(pool, tokenizer, 4, 8).begin(prompts(3, 3), SamplingSettings(n=1, max_new_tokens=4))
    with pytest.raises(ValueError, match="argument 2 is shorter" if fault == "too few" else "no text"):
        future.result(60)


def test_after_an_error_the_workers_go_on_with_other_batches(pool_of):
    class Choosy(Handle):
        def call(self, method, version, posted, caches, arguments):
            if any(prompt.label == "1" for prompt in arguments[0]):
                raise RolloutError("not this one")
            return super().call(method, version, posted, caches, arguments)

    pool = pool_of([Choosy()])
    partial, settings = PartialRollouts(pool, Tokenizer(), 2, slots=1), SamplingSettings(n=1, max_new_tokens=4)
    (bad,), (good,) = partial.begin(prompts(1), settings), partial.begin(prompts(4), settings)
    with pytest.raises(RolloutError, match="not this one"):
        bad.result(60)
    assert len(good.result(60)[0][0][0].token_ids) == 4
