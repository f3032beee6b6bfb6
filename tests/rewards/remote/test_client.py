import base64
import gzip
import io
import json
import logging
import shutil
import ssl
import subprocess
import threading
import time
import weakref
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from reward_rollouts import make_samples
from reward_servers import FaultyServer, Handler, closed_port

from lightrft_visual import serve_reward
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rewards.batch import Call, batch_from_media
from lightrft_visual.rewards.imaging import decode_image
from lightrft_visual.rewards.remote import client
from lightrft_visual.rewards.remote.client import (
    WRITTEN_AHEAD,
    Exchange,
    Phase,
    RemoteClient,
    RemoteReward,
    RequestFailed,
    check_url,
)
from lightrft_visual.rewards.remote.wire import BadReply, decode_reply
from lightrft_visual.rewards.settings import check_reward_config
from lightrft_visual.runtime.masking import shown_url

NEVER_STOP = {"reward_max_invalid": 1.0, "reward_timeout": 20.0}  # a busy machine may need seconds for one answer


def run(urls, outputs, **settings):
    engine = RewardComputationEngine(None, urls, config=RewardConfig(**{**NEVER_STOP, **settings}))
    try:
        return engine.compute_rewards(outputs)
    finally:
        engine.close()


def test_all_servers_and_micro_batches_are_asked_at_the_same_time():
    """What makes the phase short: every request is in flight before the first reply."""
    outputs = [make_samples(["a", "b"], first_id=2 * i) for i in range(8)]
    with FaultyServer(together=24) as server:
        result = run([f"{server.base}/together/{i}" for i in range(3)], outputs, reward_timeout=60)
    assert server.calls["together"] == 24 and server.most_in_flight == 24
    assert result.score.tolist() == [0.75, 3.75] * 8


def test_no_more_requests_in_flight_than_the_limit():
    outputs = [make_samples(["a"], first_id=i) for i in range(8)]
    with FaultyServer(delay=0.05) as server:
        result = run(f"{server.base}/slow", outputs, reward_concurrency=2, reward_timeout=20)
    assert server.most_in_flight == 2 and result.valid.all()


def test_no_more_request_bodies_in_memory_than_the_limit_and_a_few_and_retries_send_the_same(monkeypatch):
    alive, most, lock, whole = [0], [0], threading.Lock(), RemoteReward.body

    def count(change):
        with lock:
            alive[0] += change
            most[0] = max(most[0], alive[0])

    class Body(bytes):
        def __del__(self):
            count(-1)

    def body(*arguments):
        count(1)
        return Body(whole(*arguments))

    monkeypatch.setattr(RemoteReward, "body", body)

    def answer(handler, kind, body, call):  # each request is asked for again once
        time.sleep(0.02)
        again = handler.server.owner.bodies.count(body) == 1
        handler.reply(503 if again else 200, {"rewards": [float(body["ids"][0])]})

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        result = run(f"{server.base}/any", [make_samples(["a"], first_id=i) for i in range(30)], reward_concurrency=2)
    assert result.score.tolist() == list(range(30)) and len(server.bodies) == 60
    assert all(server.bodies.count(each) == 2 for each in server.bodies)
    assert 2 < most[0] <= 2 + WRITTEN_AHEAD and alive == [0]


FAILURES = {
    "refused": "connection failed",
    "hang": "no reply within 1 s",
    "http2": "no whole reply of HTTP/1.1",
    "html": "the reply is not JSON",
    "short": "2 scores for 3 samples",
    "huge": "beyond",
    "list": "a JSON list, not an object",
    "empty": "without scores",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_every_failure_is_bounded_invalid_and_named(kind, caplog):
    with FaultyServer() as server:
        base = f"http://127.0.0.1:{closed_port()}" if kind == "refused" else server.base
        started = time.monotonic()
        limits = {"reward_timeout": 1.0} if kind == "hang" else {"reward_retries": 0}
        result = run(f"bad={base}/{kind}", [make_samples(["a", "b", "c"])], **limits)
        assert time.monotonic() - started < 20  # the deadline is 1 s, and the server hangs for 30
    assert not result.valid.any() and result.score.isnan().all() and result.components["bad"].isnan().all()
    assert result.metrics["reward/invalid_share"] == 1 and result.metrics["reward/bad/failures"] == 3
    assert base in caplog.text and FAILURES[kind] in caplog.text


def test_only_the_bad_entries_of_a_reply_are_invalid(monkeypatch):
    def answer(handler, kind, body, call):
        handler.reply(200, {"rewards": [1.0, float("inf"), None, "x", 2.0], "failed": [4]})

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        result = run(f"r={server.base}/any", [make_samples(["a"] * 5)])
    assert result.valid.tolist() == [True, False, False, False, False]
    assert result.metrics["reward/r/failures"] == 3 and result.metrics["reward/r/not_applicable"] == 1


def test_only_samples_without_a_number_in_the_picked_output_are_invalid_and_null_does_not_apply(monkeypatch, caplog):
    def answer(handler, kind, body, call):
        quality = [0.5, float("nan"), None, "0.5", 1e30]
        whole = {"rewards": [0.0] * 5, "components": {"quality": quality}}
        handler.reply(200, whole if len(body["queries"]) == 5 else {"rewards": [0.0]})

    monkeypatch.setattr(Handler, "answer", answer)
    recipe = {"*": [{"type": "remote", "key": "r", "weight": 1.0, "score_key": "quality"}]}
    with FaultyServer() as server:
        config = RewardConfig(**NEVER_STOP)
        engine = RewardComputationEngine(None, f"r={server.base}/any", reward_recipe=recipe, config=config)
        result = engine.compute_rewards([make_samples(["a"] * 5), make_samples(["b"])])
        alone = engine.compute_rewards([make_samples(["b"])])
        engine.close()
    assert result.valid.tolist() == [True] + [False] * 5 and result.score[0] == 0.5
    assert result.metrics["reward/r/failures"] == 4 and result.metrics["reward/r/not_applicable"] == 1
    assert "reward r: 4 of 6 samples failed: output 'quality' is missing" in caplog.text
    assert not alone.valid.any() and alone.metrics["reward/r/failures"] == 1


@pytest.mark.parametrize(("kind", "calls"), [("flaky", 3), ("429", 4), ("404", 1)])
def test_retries_only_where_they_can_help(kind, calls):
    with FaultyServer() as server:
        result = run(f"{server.base}/{kind}", [make_samples(["a"])], reward_timeout=6.0, reward_retries=3)
    assert server.calls[kind] == calls and bool(result.valid.all()) == (kind == "flaky")


def test_an_error_shows_what_the_server_answered_and_how_often_it_was_asked(monkeypatch):
    """Its beginning, without what was sent as base64 and without the token."""
    monkeypatch.setenv("MY_TOKEN", "s3cret-of-mine")
    text = "Traceback:\n  model.py, line 7: CUDA out of memory " + "QUJD" * 50 + " s3cret-of-mine " + "x. " * 500
    monkeypatch.setattr(Handler, "answer", lambda handler, kind, *_: handler.reply(int(kind), text, "text/plain"))
    settings = {"reward_retries": 2, "reward_max_invalid": 0.1, "reward_token_env": "MY_TOKEN", "reward_timeout": 3.0}
    for status, calls, tail in ((500, 3, " (asked 3 times)"), (404, 1, "")):
        with FaultyServer() as server, pytest.raises(RewardError) as caught:
            run(f"{server.base}/{status}", [make_samples(["a"])], **settings)
        told = str(caught.value)
        assert f"HTTP {status}: Traceback: model.py, line 7: CUDA out of memory ... *** x. x." in told
        assert told.endswith(f"x.{tail} (1 samples)") and len(told) < 500 and server.calls[str(status)] == calls


def test_a_redirect_names_where_to(monkeypatch):
    """As of an address that lacks the slash at its end, or begins with http where it is https."""
    monkeypatch.setattr(Handler, "extra", {"Location": "https://me:secret@a/b/?key=hidden"})
    with FaultyServer() as server, pytest.raises(RewardError, match="HTTP 307, a redirect to https://a/b/:") as caught:
        run(f"{server.base}/307", [make_samples(["a"])], reward_max_invalid=0.1)
    assert "secret" not in str(caught.value) and "hidden" not in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_certificate_is_told_of_and_taken_where_ssl_cert_file_names_who_signed_it(tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=own -addext subjectAltName=IP:127.0.0.1 -days 2"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    told = r"connection failed \(ConnectError: .*certificate verify failed: self.signed certificate"
    with FaultyServer() as server:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
        url, samples = server.base.replace("http:", "https:") + "/good", [make_samples(["a"])]
        with pytest.raises(RewardError, match=told):
            run(url, samples, reward_max_invalid=0.1, reward_retries=0)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert run(url, samples).score.tolist() == [0.25]


def test_a_server_killed_and_restarted_is_waited_for():
    """Connections kept from before the kill are dead, new ones are refused for a while: the step waits and goes on."""
    first = FaultyServer().__enter__()
    port = first._http.server_port
    engine = RewardComputationEngine(
        None, f"{first.base}/good", config=RewardConfig(reward_timeout=12, reward_max_invalid=0.0)
    )
    assert engine.compute_rewards([make_samples(["a"])]).score.tolist() == [0.25]
    first.__exit__()
    revived = []
    timer = threading.Timer(0.4, lambda: revived.append(FaultyServer(port=port).__enter__()))
    timer.start()
    result = engine.compute_rewards([make_samples(["a", "b"])])
    timer.join()
    engine.close()
    revived[0].__exit__()
    assert result.score.tolist() == [0.25, 1.25] and revived[0].calls["good"] == 1


@pytest.mark.parametrize("broken", ["refused", "hang", "html", "302", "401", "404"])
def test_failover_to_another_replica(broken):
    with FaultyServer() as server:
        base = f"http://127.0.0.1:{closed_port()}" if broken == "refused" else server.base
        outputs = [make_samples(["a", "b"], first_id=2 * i) for i in range(4)]
        result = run(f"{base}/{broken}|{server.base}/good", outputs, reward_timeout=4.0, reward_retries=0)
    assert result.valid.all() and result.score.tolist() == [0.25, 1.25] * 4


@pytest.mark.parametrize("kind", ["400", "413", "422"])
def test_a_request_that_one_replica_calls_wrong_is_not_sent_to_another(kind):
    with FaultyServer() as server:
        result = run(f"{server.base}/{kind}|{server.base}/good", [make_samples(["a"])])
    assert not result.valid.any() and server.calls == {kind: 1}


@pytest.mark.parametrize("kind", ["hang", "504"])
def test_queued_requests_to_a_dead_server_or_a_gateway_without_its_server_fail_at_once(kind):
    outputs = [make_samples(["a"], first_id=i) for i in range(10)]
    with FaultyServer(delay=0.3) as server:
        started = time.monotonic()
        limits = {"reward_timeout": 2.0} if kind == "hang" else {"reward_retries": 0}
        result = run(f"{server.base}/{kind}", outputs, reward_concurrency=2, **limits)
        assert time.monotonic() - started < 9  # not 10 / 2 deadlines of 2 s
    assert not result.valid.any() and server.calls[kind] in ((2,) if kind == "hang" else range(10))


def test_a_dead_server_is_asked_again_after_the_time_limit_however_many_requests_wait_meanwhile(monkeypatch):
    """What is not asked is no news: each of the requests between would put it off by another time limit."""
    now, asked = [0.0], []

    async def attempt(self, url, exchange, content, seconds):
        asked.append(now[0])
        if now[0] < 5:
            raise RequestFailed("connection failed", retry=True, answered=False)
        return "scores"

    async def requests() -> list:
        phase, found = Phase(), []
        for now[0] in range(30):
            try:
                found.append(await remote.exchange(Exchange(["http://x"], bytes, len, phase=phase)))
            except RequestFailed:
                found.append(None)
        return found

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(RemoteClient, "_attempt", attempt)
    remote = RemoteClient(RewardConfig(reward_timeout=10.0, reward_retries=0))
    found = remote.loop.run(requests())
    remote.close()
    assert asked == [0, *range(10, 30)] and found == [None] * 10 + ["scores"] * 20


def test_a_request_whose_time_is_over_before_its_turn_is_not_asked_and_no_sign_of_a_dead_server(monkeypatch):
    now, asked, phase = [0.0], [], Phase()

    async def attempt(self, url, exchange, content, seconds):
        asked.append(url)
        now[0] += 20  # it waited for a slot among others
        raise RequestFailed("HTTP 503", retry=True)

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(RemoteClient, "_attempt", attempt)
    remote = RemoteClient(RewardConfig(reward_timeout=10.0))
    with pytest.raises(RequestFailed, match="HTTP 503$"):
        remote.loop.run(remote.exchange(Exchange(["http://x", "http://y"], bytes, len, phase=phase)))
    remote.close()
    assert asked == ["http://x"] and phase.silent == 0


def test_a_server_that_hangs_after_answers_is_given_up_and_one_that_is_slow_for_some_requests_is_not(monkeypatch):
    monkeypatch.setattr("lightrft_visual.rewards.remote.client.SILENCE", 1)

    def answer(handler, kind, body, call):
        if call not in (1, 5):
            handler.server.owner.released.wait(30)
        handler.reply(200, {"rewards": [1.0]})

    monkeypatch.setattr(Handler, "answer", answer)
    outputs = [make_samples(["a"], first_id=i) for i in range(20)]
    with FaultyServer() as server:
        result = run(f"{server.base}/any", outputs, reward_concurrency=2, reward_timeout=1.0)
    assert int(result.valid.sum()) == 2 and server.calls["any"] < 13  # three in a row cost nobody else an answer


def test_images_arrive_byte_equal_or_as_jpeg_in_order_with_missing_ones_in_place_and_encoded_once(monkeypatch):
    from lightrft_visual.rewards import imaging

    encoded = []
    original = imaging.encode_image
    monkeypatch.setattr(imaging, "encode_image", lambda image, kind: encoded.append(image) or original(image, kind))
    rng = np.random.default_rng(0)
    first, second = (Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)) for _ in range(2))
    outputs = [make_samples(["a", "b"], images=[[first, second], [None, first]]), make_samples(["c"], images=[[]])]
    with FaultyServer() as server:
        run([f"{server.base}/good/{i}" for i in range(3)], outputs)
    rows = [row for body in server.bodies for row in body.get("images", [])]
    with FaultyServer() as server:
        run(f"{server.base}/good", outputs[:1], reward_image_format="jpeg")
    assert base64.b64decode(server.bodies[-1]["images"][0][0])[:2] == b"\xff\xd8"
    assert len(encoded) == 4 and len(rows) == 6
    for row in rows:
        got = [None if text is None else np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in row]
        wanted = [np.asarray(first), np.asarray(second)] if row[0] is not None else [None, np.asarray(first)]
        assert all((g is None and w is None) or np.array_equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_a_video_that_samples_and_servers_share_is_encoded_once_and_its_frames_are_not_kept(monkeypatch):
    from lightrft_visual.rewards import imaging

    encoded = []
    original = imaging.encode_image
    monkeypatch.setattr(
        imaging, "encode_image", lambda image, kind: encoded.append(weakref.ref(image)) or original(image, kind)
    )
    first, second = (np.full((3, 4, 6, 3), colour, dtype=np.uint8) for colour in (0, 255))
    batch = batch_from_media(list("abc"), videos=[first, second, first])
    call = Call()
    with FaultyServer() as server:
        client = RemoteClient(RewardConfig(reward_timeout=20))
        for number in range(2):
            source = RemoteReward(f"{server.base}/good/{number}", client)
            assert not source.submit(batch, call).result().failed.any()
        client.close()
    assert len(encoded) == 6 and not any(image() for image in encoded)
    bodies = [body["videos"] for body in server.bodies]
    assert bodies[0] == bodies[1] and bodies[0][0] == bodies[0][2] != bodies[0][1]
    shown = [[np.asarray(decode_image(frame)) for frame in video[0]] for video in bodies[0][:2]]
    assert np.array_equal(shown, [first, second])


def test_our_wire():
    samples = make_samples(["a", "b"], ["x", None], ["k", None], [{"level": 1}, {}], first_id=7)
    with FaultyServer() as server:
        result = run(f"r={server.base}/good", [samples])
    assert server.bodies == [
        {
            "queries": ["prompt 0: a", "prompt 1: b"],
            "prompts": ["prompt 0: ", "prompt 1: "],
            "labels": ["k", None],
            "references": ["x", None],
            "metadata": [{"level": 1}, {}],
            "ids": [7, 8],
            "group_ids": [3, 4],
        }
    ]
    assert result.components["detail"].tolist() == [0.25, 1.25]


def test_numbers_of_arrays_and_tables_reach_the_server():
    told = [np.int64(3), np.array([1, 2]), Decimal("1.50"), datetime(2024, 5, 1), np.float32("nan"), b"bytes"]
    with FaultyServer() as server:
        run(f"{server.base}/good", [make_samples(list("abcdef"), told, metadata=[{"told": each} for each in told])])
    (body,) = server.bodies
    wanted = [3, [1, 2], "1.50", "2024-05-01 00:00:00", None, None]
    assert body["references"] == wanted and [each["told"] for each in body["metadata"]] == wanted


def test_openrlhf_wire():
    with FaultyServer() as server:
        result = run(f"{server.base}/openrlhf", [make_samples(["a", "b"], ["x", "y"])], reward_wire="openrlhf")
    (body,) = server.bodies
    assert list(body) == ["query", "prompts", "labels"]
    assert body["query"] == ["prompt 0: a", "prompt 1: b"] and body["labels"] == ["x", "y"]
    assert result.score.tolist() == [0.25, 1.25] and result.components["length"].tolist() == [3, 3]


def test_bearer_token_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    with FaultyServer() as server:
        run(f"{server.base}/good", [make_samples(["a"])], reward_token_env="MY_TOKEN")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ConfigError, match="MY_TOKEN"):
        run("http://127.0.0.1:1/x", [make_samples(["a"])], reward_token_env="MY_TOKEN")


def test_white_space_around_a_token_is_no_part_of_it(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", " s3cret\r\n")
    with FaultyServer() as server:
        assert run(f"{server.base}/good", [make_samples(["a"])], reward_token_env="MY_TOKEN").valid.all()
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("token", ["s3cret-\u00e9", "s3cret\nX-Other: 1", "s3cret\x7f"])
def test_a_token_that_no_header_can_hold_is_refused_by_client_and_server_and_not_shown(token, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", token)
    with pytest.raises(ConfigError, match="MY_TOKEN.*printable ASCII") as caught:
        check_reward_config(RewardConfig(remote_rm_url="http://h/r", reward_token_env="MY_TOKEN"))
    monkeypatch.setattr("lightrft_visual.rewards.remote.server.serve", lambda *_: pytest.fail("it was served"))
    assert serve_reward.main(["--token_env", "MY_TOKEN"]) == 2
    told = capsys.readouterr().err
    assert "MY_TOKEN" in told and "s3cret" not in told + str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/x", "http://", "/reward", "http://h:99999/", "http://a b/c"]
)
def test_bad_urls(url):
    with pytest.raises(ConfigError, match="write it as http"):
        check_url(url)
    for good in ("http://h/design?signal=1", "http://hf_space:80/r", "http://h/r?author=me"):
        check_url(good)


def test_shown_url_holds_no_secret():
    assert shown_url("http://user:pw@host:80/a/b?key=1#x") == "http://host:80/a/b"
    assert shown_url("user:pw@host/a") == "host/a"
    assert shown_url("https://host/to/http://other/x;v=1") == "https://host/to/http://other/x"
    assert len(shown_url("https://host/" + 1000 * "a")) == 200


def test_no_payload_and_no_token_in_logs(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    picture = Image.new("RGB", (9, 9), "red")
    samples = make_samples(["SECRET"], ["SECRET"], images=[[picture]])
    with FaultyServer() as server:
        for kind in ("html", "500", "strings"):
            run(f"{server.base}/{kind}", [samples], reward_retries=0, reward_token_env="MY_TOKEN")
        sent = server.bodies[0]["images"][0][0]
    assert all(text not in caplog.text for text in ("s3cret", "SECRET", sent[:24])) and "failed" in caplog.text


def sends(status, content, headers=()):
    """An `answer` of the handler: bytes with headers of the test's choice."""

    def answer(handler, kind, body, call):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


DIGITS, TWICE = "9" * 400, gzip.compress(gzip.compress(b" " * 10**6, 9), 9)
BAD_REPLIES = {
    "not of its encoding": (200, b'{"rewards": [1]}', [("Content-Encoding", "gzip")], "the reply is encoded"),
    "packed twice": (200, TWICE, [("Content-Encoding", "gzip, gzip")], "the reply is encoded"),
    "a long integer": (200, f'{{"rewards": [{DIGITS}]}}'.encode(), [], "beyond"),
    "a wait of no number": (429, {}, [("Retry-After", "\u00b2")], "HTTP 429"),
    "a redirection": (302, {}, [("Location", "http://127.0.0.1:1/")], "HTTP 302"),
    "a position that is none": (200, {"rewards": [1], "failed": [1]}, [], "no list of positions"),
    "what a terminal obeys": (500, b"\x1b[2Jnothing to see", [], r"HTTP 500: \x1b[2Jnothing"),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_costs_its_own_request_only(kind, monkeypatch, caplog):
    """It comes while no other request is answered and some still wait for their turn."""
    status, content, headers, words = BAD_REPLIES[kind]
    bad, good = sends(status, content, headers), {"rewards": [1.0]}

    def answer(handler, _, body, call):
        if body["queries"][0].endswith("bad"):
            return bad(handler, _, body, call)
        time.sleep(0.1)
        return handler.reply(200, good)

    monkeypatch.setattr(Handler, "answer", answer)
    with FaultyServer() as server:
        outputs = [make_samples([word], first_id=i) for i, word in enumerate(["a", "bad", "c", "d", "e"])]
        result = run(f"r={server.base}/any", outputs, reward_retries=1, reward_concurrency=2)
    assert result.valid.tolist() == [True, False, True, True, True] and words in caplog.text
    assert result.metrics["reward/r/failures"] == 1


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ({"components": {"length": [6.0]}}, "component 'length' has 1 values for 2 samples"),
        ({"components": {"length": "long"}}, "component 'length' has no list of values for 2 samples"),
        ({"components": [6.0, 6.0]}, '"components" of the reply is no object'),
    ],
)
def test_a_component_of_another_shape_makes_the_reply_unusable(extras, words):
    with pytest.raises(BadReply, match=f"^{words}$"):
        decode_reply({"rewards": [1.0, 2.0], **extras}, 2)


def test_one_number_for_all_is_every_samples_and_what_is_no_number_of_a_log_is_left_out():
    logs = {"size": 3, "reason": "long", "reasons": ["long"], "more": {"a": 1}, "nothing": None, "kept": [1.0, 2.0],
            "mean": [0.5], "histogram": [1, 2, 3]}  # fmt: skip
    for others in (logs, None, ["long"]):
        reply = {"rewards": [1.0, 2.0], "components": {"length": 6.0, "absent": None}, "extra_logs": others}
        extras = {name: values.tolist() for name, values in decode_reply(reply, 2).extras.items()}
        assert extras == {"length": [6, 6]} | ({"size": [3, 3], "kept": [1, 2]} if others is logs else {})


def test_components_whose_names_become_equal_have_names_of_their_own():
    reply = {"rewards": [1.0], "components": {"a\nb": [2.0], "a\tb": [3.0], "c": [4.0]}, "extra_logs": {"c": [4.0]}}
    extras = {name: values.tolist() for name, values in decode_reply(reply, 1).extras.items()}
    assert extras == {"a_b": [2], "a_b_2": [3], "c": [4]}


def test_names_of_components_fit_into_any_file(monkeypatch):
    named = {"\ud800": [1.0], "a\nb": [2.0], "x" * 1000: [3.0], **{str(i): [0.0] for i in range(1000)}}
    monkeypatch.setattr(Handler, "answer", sends(200, {"rewards": [1.0], "components": named}))
    with FaultyServer() as server:
        components = run(f"r={server.base}/any", [make_samples(["a"])]).components
    assert components["\\ud800"] == 1 and components["a_b"] == 2 and components["x" * 100] == 3
    assert len(components) < 250 and "".join(components).encode()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h/r",
        *(f"https://h/r?{key}=hunter2" for key in ("api_key", "code", "jwt", "X-Amz-Security-Token", "%61pi_key", "x")),
        "https://h/r?a=1&x-amz-signature=hunter2",
        "https://h/r;token=hunter2?token=hunter2",
        "https://h/hf_hunter2hunter2hunter2/r",
        "https://h/r?q=hf_hunter2hunter2hunter2",
        "https://h/r#access_token=hunter2",
    ],
)
def test_secrets_of_any_kind_in_urls_are_refused_and_not_repeated(url):
    given = {"remote_rm_url": url}, {"reward_recipe": f'{{"*": [[remote, "{url}", 1.0]]}}'}
    for settings in given:
        with pytest.raises(ConfigError) as caught:
            check_reward_config(RewardConfig(**settings))
        assert "hunter2" not in str(caught.value) and ("reward_token_env" in str(caught.value) or settings is given[1])
