"""What is wrong with a reward is said when it is asked with a sample, before anything loads."""

import json
import random
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from reward_servers import FaultyServer, Handler, closed_port

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, DataError, RewardError
from lightrft_visual.inference import _RunsRewards
from lightrft_visual.rewards import probe
from lightrft_visual.rewards.batch import Scores, batch_from_media
from lightrft_visual.rewards.engine import RewardComputationEngine
from lightrft_visual.rewards.functions.vlm_judge import VLMJudge
from lightrft_visual.rewards.probe import plausible_media, probed
from lightrft_visual.rewards.remote.wire import wires_of
from lightrft_visual.rewards.settings import check_reward_config

FUNCTIONS = {
    "wrong_length": ("return [1.0]", "returned 1 scores for 2 samples"),
    "mean": ("return torch.ones(len(prompts)).mean()", "returned shape ()"),
    "none": ("return None", "returned NoneType"),
    "raises": ("raise KeyError('answer')", "raised KeyError: 'answer'"),
    "leaves": ("raise SystemExit(0)", "called sys.exit(0)"),
    "sparse": ("return torch.ones(1).to_sparse()", "returned a Tensor that cannot be read"),
}
SERVERS = {"404": "HTTP 404", "short": "0 scores for 1 samples", "shapeless": "'detail' has 2 values for 1 samples"}
DATA = [SimpleNamespace(label=label) for label in ("a", "a", "b")]


def batch_of(index):
    image = Image.new("RGB", (8, 8))
    return batch_from_media(["a red ball"], [image], labels=[DATA[index].label], references=["sk-" + "a1" * 20])


def ask(**config):
    return probed(RewardConfig(**config), DATA, batch_of)


@pytest.fixture(scope="module")
def server():
    with FaultyServer() as server:
        yield server


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "mine.py"
    bodies = "".join(f"def {name}(prompts, images):\n    {body}\n\n" for name, (body, _) in FUNCTIONS.items())
    path.write_text(
        f"import random\nimport torch\ncalls = 0\n\n{bodies}"
        "def needs(prompts, difficulty):\n    return [1.0] * len(prompts)\n\n"
        "def good(prompts, images):\n    global calls\n    calls += 1\n    random.seed(0)\n"
        "    return [float(calls)] * len(prompts)\n\n"
        "def picky(prompts, labels):\n    return [1.0 if label == 'b' else labels.fail for label in labels]\n\n"
        "def by_hand(model_reward_list, labels):\n    return [float(len(model_reward_list))] * len(labels)\n\n"
        "def of_scores(scores):\n    return [float(len(scores))] * len(scores[0])\n\n"
        "def by_hand_wrong(model_reward_list, labels):\n    return [model_reward_list[7]]\n"
    )
    return path


@pytest.mark.parametrize("asks", [True, False])
def test_probed_ranks_wait_for_the_one_that_asks_without_a_time_limit(asks, functions, monkeypatch):
    """A first call may load a model for longer than a broadcast waits."""
    told = []
    monkeypatch.setattr(probe.collectives, "is_rank_0", lambda: asks)
    monkeypatch.setattr(probe.collectives, "meet", lambda: told.append("meets"))
    monkeypatch.setattr(probe.collectives, "broadcast_object", lambda found: told.append("is told") or found)
    ask(reward_fn=f"{functions}:good")
    assert told == ["meets", "is told"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_function_is_refused_with_its_line_and_the_sample(name, functions):
    started = time.monotonic()
    with pytest.raises(ConfigError, match="1 of the rewards cannot be used") as refused:
        ask(reward_fn=f"{functions}:{name}")
    told = str(refused.value)
    assert FUNCTIONS[name][1] in told and f"in {name}" in told and "--no_reward_probe" in told
    assert "prompt 'a red ball'" in told and "1 images" in told and "a1a1a1" not in told
    assert time.monotonic() - started < 5


def test_wrong_functions_are_all_told_at_once(functions):
    with pytest.raises(
        ConfigError, match="3 of the rewards.*(?s:.)*KeyError(?s:.)*NoneType(?s:.)*asks for 'difficulty'"
    ):
        ask(reward_fn=",".join(f"{functions}:{name}" for name in ("raises", "good", "none", "needs")))


def test_function_that_collects_by_id_or_works_in_place_scores_the_two_that_it_is_asked_with(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def collects(ids):\n    return list({each: 1.0 for each in ids}.values())\n\n"
        "def closes(images):\n    return [each.getpixel((0, 0))[0] + (each.close() or 0.0) for each in images]\n"
    )
    ask(reward_fn=f"{path}:collects,{path}:closes")


def test_further_output_that_is_no_number_is_told_of_both_samples(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(prompts):\n    return {'rewards': [1.0] * 2, 'other': [float('nan')] * 2}\n")
    with pytest.raises(ConfigError, match="for 2 of 2 samples\n    asked with this sample twice: prompt"):
        ask(reward_recipe=json.dumps({"*": [{"type": "func", "key": f"{path}:f", "weight": 1, "score_key": "other"}]}))


def test_judge_is_asked_once(monkeypatch):
    asked, found = [], Future()
    found.set_result(Scores.of([1.0]))
    monkeypatch.setattr(VLMJudge, "submit", lambda self, batch, call: asked.append(len(batch)) or found)
    ask(reward_recipe=json.dumps({"*": [["rule", "vlm_judge", 1.0, {"url": "http://judge/v1", "model": "m"}]]}))
    assert asked == [1]


def ask_judge(server):
    ask(reward_recipe=json.dumps({"*": [["rule", "vlm_judge", 1.0, {"url": f"{server.base}/v1", "model": "m"}]]}))


def test_judge_without_a_score_in_its_text_is_refused_with_pattern_and_reply(server, monkeypatch):
    reply = {"choices": [{"message": {"content": "Rating: 7"}}]}
    monkeypatch.setattr(Handler, "answer", lambda handler, *_: handler.reply(200, reply))
    with pytest.raises(ConfigError, match="pattern looks by `Score: <number>`(.|\n)*answered: HTTP 200 .*Rating: 7"):
        ask_judge(server)


def test_judge_that_is_busy_is_a_warning(server, monkeypatch, caplog):
    monkeypatch.setattr(Handler, "answer", lambda handler, *_: handler.reply(429, {"error": "later"}))
    ask_judge(server)
    assert "answered: HTTP 429" in caplog.text


def test_judge_that_comes_up_late_is_asked_again(server, monkeypatch):
    submit, ports = VLMJudge.submit, [closed_port()]

    def soon(self, batch, call):
        port = ports.pop() if ports else server.base.rpartition(":")[2]
        self.replicas = [f"http://127.0.0.1:{port}/v1/chat/completions"]
        return submit(self, batch, call)

    reply = {"choices": [{"message": {"content": "Score: 7"}}]}
    monkeypatch.setattr(Handler, "answer", lambda handler, *_: handler.reply(200, reply))
    monkeypatch.setattr(VLMJudge, "submit", soon)
    ask_judge(server)
    assert not ports


def test_a_column_that_the_sample_lacks_and_the_data_has_is_none(functions):
    config = RewardConfig(reward_fn=f"{functions}:needs")
    assert probed(config, DATA, batch_of, {"difficulty"}) == config


def test_good_function_keeps_its_state_and_the_runs_seeds(functions):
    config = RewardConfig(reward_fn=f"{functions}:good")
    before = random.getstate()
    assert probed(config, DATA, batch_of) == config and random.getstate() == before
    rewards = RewardComputationEngine.from_config(config)
    assert rewards.score_media(["x"], [Image.new("RGB", (8, 8))]).score.tolist() == [1.0]


def test_functions_of_a_file_share_one_execution_whose_trials_are_gone_before_the_run_loads_it_anew(
    tmp_path, monkeypatch
):
    """A model that the file makes would else lie on the device twice, for the whole run."""
    monkeypatch.setattr(sys, "held", [], raising=False)
    path, text = tmp_path / "mine.py", "import sys, weakref\nclass Model: pass\nmodel = Model()\n"
    text += "sys.held.append(weakref.ref(model))\ndef one(prompts):\n    return [1.0] * len(prompts)\n"
    path.write_text(f"{text}def two(prompts):\n    return [1.0] * len(prompts)\n")
    config = RewardConfig(reward_fn=f"{path}:one,{path}:two")
    check_reward_config(config)
    assert probed(config, DATA, batch_of) == config
    assert [each() for each in sys.held] == [None, None]
    run = RewardComputationEngine.from_config(config)
    assert len(sys.held) == 3 and sys.held[2]() is not None and run.score(batch_of(0), 1).score.tolist() == [2.0]
    path.write_text(f"{text}def two(prompts):\n    return [40.0]\n")
    assert RewardComputationEngine.from_config(config).score(batch_of(0), 1).score.tolist() == [41.0]


def test_rewards_of_a_run_that_judge_other_data_stay_so_once_they_are_asked():
    """They may have labels that no sample of an evaluation has."""
    config = _RunsRewards(reward_recipe=json.dumps({label: [["rule", "exact", 1.0]] for label in ("a", "b", "c")}))
    assert not probed(config, DATA, batch_of).every_label


def test_probe_that_is_off_or_has_nothing_to_ask_with_asks_nothing(functions):
    config = RewardConfig(reward_fn=f"{functions}:raises", reward_probe=False)
    assert probed(config, DATA, batch_of) is config
    assert probed(RewardConfig(reward_fn=f"{functions}:raises"), None, batch_of) is not None
    assert probed(None, DATA, batch_of) is None


def test_each_component_is_asked_with_a_sample_of_its_label(functions):
    recipe = '{{"a": [[rule, exact, 1.0]], "b": [[func, "{}:{}", 1.0]]}}'
    ask(reward_recipe=recipe.format(functions, "picky"))
    with pytest.raises(ConfigError, match="raised KeyError"):
        ask(reward_recipe=recipe.format(functions, "raises"))


def test_function_that_fails_on_some_samples_is_no_fault_where_these_are_left_out(functions, caplog):
    ask(reward_fn=f"{functions}:picky", on_reward_error="skip")
    assert "AttributeError" in caplog.text
    with pytest.raises(ConfigError, match="raised AttributeError"):
        ask(reward_fn=f"{functions}:picky")
    with pytest.raises(ConfigError, match="raised KeyError"):
        ask(reward_fn=f"{functions}:raises", on_reward_error="skip")


def test_function_that_aggregates_is_asked_with_a_score_of_each_reward(functions):
    for name in ("by_hand", "of_scores"):
        ask(reward_fn=f"{functions}:{name}", reward_pretrain="/no/such/model")
    with pytest.raises(ConfigError, match="raised IndexError"):
        ask(reward_fn=f"{functions}:by_hand_wrong", reward_pretrain="/no/such/model")


@pytest.mark.parametrize(
    "config",
    [
        {"reward_fn": "{}:good"},
        {"reward_fn": "{}:picky", "on_reward_error": "skip"},
        {"reward_fn": "{}:by_hand", "reward_pretrain": "/no/such/model"},
        {"reward_recipe": "{{a: [[func, '{0}:good', 1.0]], b: [[func, '{0}:raises', 1.0]]}}"},
    ],
    ids=["sum", "several", "by hand", "label without another sample"],
)
def test_sample_whose_media_cannot_be_read_is_passed_over(functions, config):
    asked = []

    def loaded(index):
        if index in (0, 2):
            raise DataError("rows.jsonl:1: image truncated", "image damaged")
        asked.append(index)
        return batch_from_media(["a red ball"], labels=["b"])

    probed(RewardConfig(**{name: text.format(functions) for name, text in config.items()}), DATA, loaded)
    assert asked == [1]


def test_any_error_of_ours_is_raised_on_every_rank(functions, monkeypatch):
    told = []
    monkeypatch.setattr(probe.collectives, "broadcast_object", lambda found: told.append(found) or found)

    def broken(index):
        raise RewardError("an image to score has values that are not finite")

    with pytest.raises(RewardError, match="not finite"):
        probed(RewardConfig(reward_fn=f"{functions}:good"), DATA, broken)
    assert isinstance(told[0], RewardError)


def test_function_behind_a_limit_that_hangs_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import time\n\ndef score(prompts):\n    time.sleep(60)\n")
    with pytest.raises(ConfigError, match="reward score: no result within 0.5 s"):
        ask(reward_fn=f"{path}:score", reward_fn_timeout=0.5)


@pytest.mark.parametrize("kind", SERVERS)
def test_wrong_server_is_refused_with_request_and_reply(kind, server):
    started = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        ask(remote_rm_url=f"{server.base}/{kind}")
    told = str(refused.value)
    assert SERVERS[kind] in told and '"queries": ["a red ball"]' in told and "answered: HTTP" in told
    assert "a1a1a1" not in told and len(told) < 2000 and time.monotonic() - started < 5


def test_dead_servers_are_refused_together_within_the_time_that_one_takes():
    urls = [f"http://127.0.0.1:{closed_port()}/{n}" for n in range(3)]
    started = time.monotonic()
    with pytest.raises(ConfigError, match="3 of the rewards") as refused:
        ask(remote_rm_url=",".join(urls))
    assert str(refused.value).count("connection failed") == 3 and "answered: nothing" in str(refused.value)
    assert time.monotonic() - started < 5


def test_server_that_hangs_is_named_soon_and_refused_at_its_limit(server, monkeypatch, caplog):
    monkeypatch.setattr(probe, "SAID_AFTER", 0.3)
    monkeypatch.setattr(probe, "STARTING", 0.5)
    with pytest.raises(ConfigError, match="no reply within 1 s"):
        ask(remote_rm_url=f"{server.base}/hang", reward_timeout=1.0)
    assert "1 reward servers have not answered a first request within 0.3 s" in caplog.text


def test_server_that_comes_up_late_or_is_busy_is_no_fault(server, monkeypatch):
    server.calls.pop("flaky", None)
    ask(remote_rm_url=f"{server.base}/flaky")
    monkeypatch.setattr(probe, "STARTING", 0.1)
    ask(remote_rm_url=f"{server.base}/503")
    ask(remote_rm_url=f"{server.base}/failed")


def test_dead_replica_beside_a_live_one_is_a_warning(server, monkeypatch, caplog):
    monkeypatch.setattr(probe, "STARTING", 0.1)
    ask(remote_rm_url=f"{server.base}/good|http://127.0.0.1:{closed_port()}/x")
    assert "connection failed" in caplog.text


@pytest.mark.parametrize("kind", ["theirs", "openrlhf"])
def test_openrlhfs_wire_is_recognised_from_the_reply_and_carries_images(kind, server):
    server.bodies.clear()
    config = ask(remote_rm_url=f"{server.base}/{kind},{server.base}/good")
    assert config.reward_wire == f"{server.base}/{kind}=openrlhf,{server.base}/good=lightrft"
    server.bodies.clear()
    rewards = RewardComputationEngine.from_config(config)
    assert rewards.score_media(["x"], [Image.new("RGB", (8, 8))]).score.tolist() == [0.5]
    by_wire = {"query" in body: body for body in server.bodies}
    assert len(by_wire) == 2 and all(len(body["images"][0][0]) > 20 for body in by_wire.values())
    rewards.close()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("auto,openrlhf,auto", "openrlhf"), ("auto,lightrft,auto", "lightrft"), ("openrlhf", "openrlhf")],
)
def test_server_that_no_sample_asks_keeps_its_wire_where_another_is_recognised(given, kept, server):
    urls = [f"{server.base}/{name}" for name in ("theirs", "good", "openrlhf")]
    recipe = "{a: [[remote, '0', 1.0], [remote, '2', 1.0]], c: [[remote, '1', 1.0]]}"
    config = ask(remote_rm_url=",".join(urls), reward_recipe=recipe, reward_wire=given)
    assert wires_of(config.reward_wire, dict(enumerate(urls)))[urls[1]] == kept


@pytest.mark.parametrize(
    ("kind", "wire", "other"), [("theirs", "lightrft", "openrlhf"), ("ours", "openrlhf", "lightrft")]
)
def test_wrong_wire_is_refused_with_the_one_that_works(kind, wire, other, server):
    with pytest.raises(ConfigError, match=f"(?s)HTTP 500.*by --reward_wire {other} it gives a score"):
        ask(remote_rm_url=f"{server.base}/{kind}", reward_wire=wire)


@pytest.mark.parametrize("form", ["openrlhf,lightrft", "{0}/theirs=openrlhf", "judge=openrlhf,other=auto"])
def test_wire_of_each_url(form, server):
    urls = f"judge={server.base}/theirs,other={server.base}/ours"
    config = RewardConfig(remote_rm_url=urls, reward_wire=form.format(server.base))
    rewards = RewardComputationEngine.from_config(config)
    assert rewards.score_media(["x"], [Image.new("RGB", (8, 8))]).score.tolist() == [0.5]
    rewards.close()


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("openrlfh", "there is no wire 'openrlfh'; did you mean 'openrlhf'"),
        ("openrlhf,judge=auto", "one for each of the 2 entries"),
        ("juge=openrlhf", "remote_rm_url has no 'juge'; did you mean 'judge'"),
    ],
)
def test_wires_that_fit_no_url_are_refused(wire, words):
    config = RewardConfig(remote_rm_url="judge=http://h/a,other=http://h/b", reward_wire=wire)
    with pytest.raises(ConfigError, match=words):
        RewardComputationEngine.from_config(config)


def test_media_to_ask_with_are_of_the_runs_size_and_not_flat():
    assert plausible_media(16, 24).shape == (3, 16, 24) and plausible_media(16, 24, 5).shape == (3, 5, 16, 24)
    assert plausible_media(16, 24).std() > 0.05 and torch.equal(plausible_media(8, 8), plausible_media(8, 8))
