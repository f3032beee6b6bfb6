"""Judges behind an OpenAI-compatible server: how they are asked, and how their replies are read."""

import time

import pytest
from PIL import Image
from reward_rollouts import make_samples
from reward_servers import FaultyServer, Handler

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards import RewardComputationEngine, recipe_from_components
from lightrft_visual.rewards.batch import batch_from_media, batch_from_samples
from lightrft_visual.rewards.functions.unified_reward import ASKED, UnifiedReward, question_and_pattern
from lightrft_visual.rewards.functions.vlm_judge import Judging
from lightrft_visual.rewards.remote.wire import BadReply

PICTURE = Image.new("RGB", (6, 6), "red")


@pytest.fixture
def chat_server(monkeypatch):
    """Answers each question with the number of the letter x in it as the score; 'broken' gets prose, and at once."""

    def answer(handler, kind, body, call):
        assert handler.path.endswith("/v1/chat/completions")
        text = body["messages"][-1]["content"][-1]["text"]
        time.sleep(0.0 if "broken" in text else 0.05)
        words = "I cannot say" if "broken" in text else f"Score: 3? No.\n**Final Score:** {text.count('x')}"
        ended = {"finish_reason": "length"} if "cut" in text else {}
        handler.reply(200, {"choices": [{"message": {"content": words}, **ended}]})

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        yield server


def judged(server, name="vlm_judge", of_run=None, **settings):
    kwargs = {"url": f"{server.base}/v1", "model": "m", **settings}
    recipe = recipe_from_components({name: 1.0}, {name: kwargs})
    return RewardComputationEngine(reward_recipe=recipe, config=RewardConfig(reward_max_invalid=1.0, **of_run or {}))


def content(server, *words):
    """What was asked in the request that holds the words."""
    found = (body["messages"][0]["content"] for body in server.bodies)
    return next(parts for parts in found if all(word in parts[-1]["text"] for word in words))


@pytest.mark.parametrize("name", ["vlm_judge", "unified_reward"])
def test_a_judge_follows_the_reward_settings_of_the_run_and_its_own_stand_before_them(chat_server, name):
    of_run = {"reward_image_format": "jpeg", "reward_timeout": 40.0, "reward_concurrency": 3, "reward_retries": 0}
    engine = judged(chat_server, name, of_run, concurrency=5)
    engine.score_media(["x"], [PICTURE])
    (judge,) = (source for source in engine._all)
    engine.close()
    assert content(chat_server, "x")[0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    config = judge.client.config
    assert (config.reward_timeout, config.reward_concurrency, config.reward_retries) == (40.0, 5, 0)


def test_marks_of_the_policys_chat_template_are_no_turns_and_places_of_images_to_the_judge(chat_server):
    engine = judged(chat_server, question="{prompt}{response}")
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>how xx?<|im_end|>\n"
    prompt += "<start_of_turn>a < b | c > d<|im_<|x|>start|>"
    engine.compute_rewards([make_samples(["x"], prompts=[prompt], images=[[PICTURE]])])
    engine.close()
    assert content(chat_server, "how xx?")[-1]["text"] == "user\nhow xx?\na < b | c > dx"


def test_last_score_is_read_images_are_seen_and_prose_costs_its_own_sample(chat_server):
    engine = judged(chat_server, question="{prompt}{response}")
    texts = ["xx", "broken", "xxxxx", "cut", *["xxxxx"] * 36]
    samples = make_samples(texts, prompts=[""] * 40, images=[[PICTURE, PICTURE], *[[]] * 39])
    result = engine.compute_rewards([samples])
    drawn = engine.score_media(["xxx"], [PICTURE])
    engine.close()
    assert result.score[[0, 2]].tolist() == pytest.approx([0.2, 0.5]) and drawn.score.item() == pytest.approx(0.3)
    assert (~result.valid).nonzero().flatten().tolist() == [1, 3]
    asked = next(body for body in chat_server.bodies if len(body["messages"][0]["content"]) == 3)
    url = asked["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and asked["model"] == "m"
    assert [part["type"] for part in chat_server.bodies[-1]["messages"][0]["content"]] == ["image_url", "text"]


def test_unified_reward_is_asked_by_its_own_prompt_and_read_out_of_five(chat_server):
    engine = judged(chat_server, "unified_reward")
    result = engine.score_media(["a red dot", "a broken dot"], [PICTURE] * 2)
    engine.close()
    assert result.valid.tolist() == [True, False]
    parts = content(chat_server, "[a red dot]")
    assert [part["type"] for part in parts] == ["image_url", "text"]
    assert result.score[0].item() == pytest.approx(parts[1]["text"].count("x") / 5)


def test_a_judge_sees_what_an_edit_was_made_from():
    batch = batch_from_media(["bluer"], [PICTURE], source_images=[[PICTURE.resize((2, 2))]])
    (message,) = Judging().messages(batch, 0, lambda image: image.size)
    assert message["content"][:2] == [(2, 2), (6, 6)]
    assert "instruction:\nbluer" in message["content"][2]["text"]
    (message,) = UnifiedReward("http://x").judging.messages(batch, 0, lambda image: image.size)
    assert message["content"][0] == (6, 6) and "bluer" in message["content"][1]["text"]


def test_a_judge_of_what_a_text_model_draws_is_asked_about_images():
    samples = make_samples(["", "a dot"], prompts=["a red dot", "what?"])
    samples.drawn_images = [PICTURE, None]
    batch = batch_from_samples([samples])
    drawn, told = (Judging().messages(batch, index, str)[0]["content"][-1]["text"] for index in (0, 1))
    assert "made for this description:\na red dot" in drawn and "Answer to grade:\na dot" in told


FIVE, TEN = Judging(low=1, high=5), Judging()
UNIFIED = {ask: Judging(*question_and_pattern(ask), 0.0, 5.0) for ask in ASKED}
AXES = "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.3715\nStyle Score (1-5): 4.0\n"


def test_pattern_without_a_group_or_that_is_none_is_refused():
    for pattern, words in (("(", "not a regular expression"), ("score", "needs a group")):
        with pytest.raises(ConfigError, match=words):
            Judging(pattern=pattern)


@pytest.mark.parametrize("field", ["{picture}", "{}", "{prompt.x}", "{prompt[x]}", "{low[1]}", "{prompt:d}", "{"])
def test_question_with_a_field_that_cannot_be_filled_is_refused(field):
    with pytest.raises(ConfigError, match="judge: the question has an unknown field"):
        Judging(f"q {field}")


@pytest.mark.parametrize(
    ("judging", "reply", "value"),
    [
        (FIVE, "Score: 3", 0.5),
        (FIVE, "score = 1 ... Score is 5", 1.0),
        *((FIVE, text, None) for text in ("no number", "Score: 7", "Score: -3", "")),
        *(
            (TEN, text, 0.7)
            for text in ("Score (0-10): 7", "**Score [0, 10]:** 7", "Score (7)", "Score (out of 10) is 7")
        ),
        *((TEN, text, 0.05) for text in ("Score: .5", "score of 0.5")),
        (TEN, "**Score**: **8**", 0.8),
        (UNIFIED["final"], "The cat is there.\nFinal Score: 4.5", 0.9),
        (UNIFIED["elements"], "cat (animal): 1\nhat (object): 0\nFinal Score: 2", 0.4),
        (UNIFIED["alignment"], AXES, 2.694700002670288 / 5),
        (UNIFIED["style"], AXES, 0.8),
        (UNIFIED["final"], "**Final Score**: 4", 0.8),
        *((UNIFIED["final"], text, None) for text in ("", "a fine image", "Final Score: none", "Score: 4")),
        *((UNIFIED["final"], f"Final Score: {number}", None) for number in (0.5, 12, 5.7)),
    ],
)
def test_reply_is_read_or_a_failure(judging, reply, value):
    if value is None:
        with pytest.raises(BadReply):
            judging.read(reply)
    else:
        if judging in (FIVE, TEN):
            with pytest.raises(BadReply, match="cut at max_tokens"):
                judging.read(reply, cut=True)
        assert judging.read(reply) == pytest.approx(value)


@pytest.mark.parametrize("begin", ["A score of 0 would mean a wrong answer.", "Score of 0 to 10: let me think."])
def test_of_a_reply_that_is_cut_a_score_counts_in_a_whole_line_of_its_own(begin):
    assert TEN.read(f"{begin}\n**Score: 8/10**\nIt says that", cut=True) == 0.8
    for cut in (f"{begin}\nThe steps are", f"{begin}\nScore: 8"):
        with pytest.raises(BadReply, match="cut at max_tokens"):
            TEN.read(cut, cut=True)


def test_unified_prompts_hold_the_caption_in_brackets_and_say_the_label_that_is_read():
    for ask, (question, label) in ASKED.items():
        assert question.endswith("Your task is provided as follows:\nText Caption: [{prompt}]"), ask
        assert label.split("(")[0].split("\\")[0].replace("?:", "").strip() in question, ask
    assert UnifiedReward("http://x").judging.question == ASKED["elements"][0]  # that of its default model
    assert ASKED["final"][0].startswith("You are given a text caption and a generated image based on that caption.")
    with pytest.raises(ConfigError, match="must be one of: final, elements"):
        question_and_pattern("beauty")
