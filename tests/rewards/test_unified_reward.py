"""UnifiedReward: its published prompts, and how its replies are read."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from PIL import Image

from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards import RewardComputationEngine, recipe_from_components
from lightrft_visual.rewards.functions.unified_reward import ASKED, judging
from lightrft_visual.rewards.remote.client import BadReply

AXES_REPLY = "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.3715\nStyle Score (1-5): 4.0\n"


@pytest.mark.parametrize(
    ("ask", "reply", "value"),
    [
        ("final", "The cat is there.\nFinal Score: 4.5", 4.5),
        ("final", "**Final Score:** 3", 3.0),
        ("elements", "cat (animal): 1\nhat (object): 0\nFinal Score: 2", 2.0),
        ("alignment", AXES_REPLY, 2.694700002670288),
        ("coherence", AXES_REPLY, 2.3715),
        ("style", AXES_REPLY, 4.0),
        ("style", "Style Score: 1", 1.0),
    ],
)
def test_replies_of_each_form_are_read(ask, reply, value):
    assert judging(ask).read(reply) == pytest.approx(value / 5)


@pytest.mark.parametrize(
    "reply", ["", "a fine image", "Final Score: none", "Final Score: 0.5", "Final Score: 12", "Score: 4"]
)
def test_a_reply_without_a_score_of_one_to_five_is_a_failure(reply):
    with pytest.raises(BadReply):
        judging("final").read(reply)
    with pytest.raises(BadReply):
        judging("final").read("Final Score: 5.7")


def test_prompts_hold_the_caption_in_brackets_and_say_the_label_that_is_read():
    for ask, (question, label) in ASKED.items():
        assert question.endswith("Your task is provided as follows:\nText Caption: [{prompt}]"), ask
        assert label.split("(")[0].split("\\")[0].replace("?:", "").strip() in question, ask
    assert ASKED["final"][0].startswith("You are given a text caption and a generated image based on that caption.")
    with pytest.raises(ConfigError, match="must be one of: final, elements"):
        judging("beauty")


class Server(BaseHTTPRequestHandler):
    """Answers with the next reply, and keeps what it was asked."""

    replies, asked = [], []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = "Final Score: 4" if "red" in str(body) else "no idea"
        reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


def test_a_server_is_asked_with_the_image_and_the_prompt():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        settings = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "unified"}
        engine = RewardComputationEngine(
            reward_recipe=recipe_from_components({"unified_reward": 1.0}, {"unified_reward": settings})
        )
        engine.config.reward_max_invalid = 1.0
        result = engine.score_media(["a red dot", "a dot"], [Image.new("RGB", (16, 16), "red")] * 2)
        engine.close()
    finally:
        server.shutdown()
        server.server_close()
    assert result.score[0].item() == pytest.approx(0.8) and result.valid.tolist() == [True, False]
    content = next(each for each in Server.asked if "red" in str(each["messages"]))["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"] and "[a red dot]" in content[1]["text"]
