import sys
import time
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from reward_rollouts import make_samples
from reward_servers import FaultyServer, Handler

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards import RewardComputationEngine, recipe_from_components
from lightrft_visual.rewards.batch import batch_from_media
from lightrft_visual.rewards.remote.client import BadReply
from lightrft_visual.rewards.remote.judge import EngineJudge, Judging

PICTURE = Image.new("RGB", (6, 6), "red")


@pytest.fixture
def chat_server(monkeypatch):
    """Answers each question with the number of the letter x in it as the score; 'broken' gets prose."""

    def answer(handler, kind, body, call):
        assert handler.path.endswith("/v1/chat/completions")
        text = body["messages"][-1]["content"][-1]["text"]
        words = "I cannot say" if "broken" in text else f"Score: 3? No.\n**Score:** {text.count('x')}"
        handler.reply(200, {"choices": [{"message": {"content": words}}]})

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        yield server


def judged(server, **settings):
    kwargs = {"url": f"{server.base}/v1", "model": "m", "question": "{prompt}{response}", **settings}
    recipe = recipe_from_components({"vlm_judge": 1.0}, {"vlm_judge": kwargs})
    return RewardComputationEngine(reward_recipe=recipe, config=RewardConfig(reward_max_invalid=1.0))


def test_http_judge_reads_the_last_score_and_sees_the_pictures(chat_server):
    engine = judged(chat_server)
    samples = make_samples(["xx", "xxxxx", "broken"], prompts=["", "", ""], images=[[PICTURE, PICTURE], [], []])
    result = engine.compute_rewards([samples])
    engine.close()
    assert result.score[:2].tolist() == pytest.approx([0.2, 0.5]) and result.valid.tolist() == [True, True, False]
    with_pictures = next(b for b in chat_server.bodies if len(b["messages"][0]["content"]) == 3)
    url = with_pictures["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and with_pictures["model"] == "m"


def test_a_text_without_a_score_costs_the_judge_only_that_sample(monkeypatch):
    def answer(handler, kind, body, call):
        if call > 1:
            time.sleep(0.1)
        words = "Score: 4" if call > 1 else "I cannot say"
        handler.reply(200, {"choices": [{"message": {"content": words}}]})

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        engine = judged(server)
        samples = make_samples(["x"] * 40)
        result = engine.compute_rewards([samples])
        engine.close()
    assert int(result.valid.sum()) == 39


def test_http_judge_on_generated_media(chat_server):
    engine = judged(chat_server)
    result = engine.score_media(["xxx"], [PICTURE])
    engine.close()
    assert result.score.tolist() == pytest.approx([0.3])
    assert [part["type"] for part in chat_server.bodies[0]["messages"][0]["content"]] == ["image_url", "text"]


def test_a_judge_sees_what_an_edit_was_made_from():
    batch = batch_from_media(["bluer"], [PICTURE], source_images=[[PICTURE.resize((2, 2))]])
    (message,) = Judging().messages(batch, 0, lambda image: image.size)
    assert message["content"][:2] == [(2, 2), (6, 6)]
    assert "instruction:\nbluer" in message["content"][2]["text"]


def test_reading():
    judging = Judging(low=1, high=5)
    assert judging.read("Score: 3") == 0.5 and judging.read("score = 1 ... Score is 5") == 1.0
    for text in ("no number", "Score: 7", "Score: -3", ""):
        with pytest.raises(BadReply):
            judging.read(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 3, "high": 3}, "low must be smaller"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "score"}, "needs a group"),
        ({"question": "{answer}"}, "unknown field"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        Judging(**settings)


class FakeEngine:
    """What a judge uses of vllm.LLM."""

    def __init__(self):
        self.seen = []

    def chat(self, conversations, parameters, use_tqdm):
        assert parameters.temperature == 0 and not use_tqdm
        self.seen += conversations
        texts = [c[-1]["content"][-1]["text"] for c in conversations]
        words = ["none" if "broken" in t else f"Score: {t.count('x')}" for t in texts]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=w)]) for w in words]


@pytest.fixture
def no_vllm(monkeypatch):
    """Importing vLLM takes longer than all of these tests."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


@pytest.mark.usefixtures("no_vllm")
def test_engine_judge_in_the_reward_engine():
    judge = EngineJudge("judge", FakeEngine(), Judging(question="{prompt}{response}"))
    samples = make_samples(["xx", "broken"], prompts=["", ""], images=[[PICTURE], []])
    engine = RewardComputationEngine(judge, config=RewardConfig(reward_max_invalid=1.0))
    result = engine.compute_rewards([samples])
    assert result.score[0] == pytest.approx(0.2) and result.valid.tolist() == [True, False]
    assert judge.engine.seen[0][0]["content"][0]["image_pil"].size == (6, 6)


@pytest.mark.usefixtures("no_vllm")
def test_engine_judge_called_as_an_engine_backed_model():
    judge = EngineJudge("judge", FakeEngine(), Judging(question="{response}"))
    called = judge(None, None, prompt_and_outputs=["x", "broken"], raw_images=[[], []], img_num=[0, 0], references=None)
    assert called["score"][0] == pytest.approx(0.1) and called["score"].isnan().tolist() == [False, True]
    assert torch.is_tensor(called["score"])
