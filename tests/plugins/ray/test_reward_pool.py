"""The same scorer in this process, over HTTP and on Ray. One local cluster for the whole file."""

import os
import signal
import sys
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from reward_rollouts import make_samples
from reward_servers import serving
from tiny_judges import build_classifier
from waiting import finished

from lightrft_visual.config import registry
from lightrft_visual.config.placement import ResourcesConfig
from lightrft_visual.config.recipes import load_plugins
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.plugins.ray import reward_pool as ray_pool
from lightrft_visual.plugins.ray.cluster import connect
from lightrft_visual.plugins.ray.reward_pool import RayRewardModel, RaySource
from lightrft_visual.rewards import RewardComputationEngine, build_scorer
from lightrft_visual.rewards.batch import Call, batch_from_media, batch_from_samples
from lightrft_visual.rewards.engine import check_placed

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    if os.environ.get("RAY_ADDRESS"):
        pytest.skip("RAY_ADDRESS is set: the test starts a cluster of its own")
    yield connect("these tests", cpus=1)  # whose actors do not wait for the other tests, as Ray's own would
    ray.shutdown()


def test_equal_scores_in_process_http_and_ray(cluster):
    prompts = ["a", "b", "c"]
    pictures = [Image.effect_noise((16, 16), 20 * i + 9).convert("RGB") for i in range(3)]
    near = RewardComputationEngine(reward_recipe={"*": [("rule", "jpeg_compressibility", 1.0, {"quality": 80})]})
    wanted = near.score_media(prompts, pictures).score
    with serving(build_scorer("jpeg_compressibility", {"quality": 80})) as url:
        http = RewardComputationEngine(None, url)
        assert torch.equal(http.score_media(prompts, pictures, chunk=2).score, wanted)
        http.close()
    on_ray = RewardComputationEngine(
        reward_recipe={"*": [("rule", "jpeg_compressibility", 1.0, {"quality": 80})]},
        config=RewardConfig(reward_transport="ray"),
        resources=ResourcesConfig(reward_num_workers=2),
    )
    assert torch.equal(on_ray.score_media(prompts, pictures).score, wanted)
    on_ray.close()


def test_user_function_hang_and_exception_on_ray(cluster, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import time\n"
        "def score(completions):\n"
        "    if completions[0] == 'hang':\n        time.sleep(60)\n"
        "    if completions[0] == 'raise':\n     raise ValueError('what went wrong')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    with closing(RaySource("mine", f"{path}:score", timeout=4.0)) as source:
        ask = lambda word: source.score(batch_from_samples([make_samples([word, "bb"])]), Call())  # noqa: E731
        assert ask("aaa").values.tolist() == [3, 2]
        late = ask("hang")
        assert late.failed.all() and late.reasons == {"mine on Ray: no result within 4 s": 2}
        assert ask("a").values.tolist() == [1, 2]
        with pytest.raises(RewardError) as caught:
            ask("raise")
        assert str(caught.value).splitlines() == [
            "reward function mine raised ValueError: what went wrong",
            f'  File "{path}", line 6, in score',
            "    raise ValueError('what went wrong')",
        ]


def test_samples_that_a_function_on_ray_fails_on_are_left_out_by_the_policy(cluster, tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [1 / (len(c) - 2) for c in completions]\n")
    config = RewardConfig(
        reward_fn=f"{tmp_path}/mine.py:score", reward_transport="ray", on_reward_error="skip", reward_max_invalid=0.5
    )
    engine = RewardComputationEngine.from_config(config, resources=ResourcesConfig(reward_num_workers=2))
    assert [len(source._actors) for source in engine._sources.values()] == [2]
    result = engine.compute_rewards([make_samples(["a", "bb", "ccc"])])
    engine.close()
    assert result.valid.tolist() == [True, False, True] and result.score[[0, 2]].tolist() == [-1, 1]


def test_bad_scorer_is_found_on_construction(cluster, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        RaySource("x", "exct")
    (tmp_path / "mine.py").write_text("class Score:\n    def __init__(self):\n        raise OSError('no weights')\n")
    with pytest.raises(ConfigError, match=r"(?s)does not start on Ray.*no weights"):
        RaySource("x", f"{tmp_path}/mine.py:Score")
    given = RewardConfig(reward_fn=f"{tmp_path}/mine.py:Score", reward_transport="ray", reward_fn_timeout=5.0)
    with pytest.raises(ConfigError, match="reward_fn_timeout is for functions in this process"):
        RewardComputationEngine.from_config(given)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install"):
        RaySource("x", "exact")


def test_a_scorer_of_a_plugin_goes_along(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(registry.scorers, "_entries", dict(registry.scorers._entries))
    text = "from lightrft_visual.config import registry\nFACTOR = 3\n"
    text += "@registry.scorers.register('mine_long', 'length')\n"
    text += "def mine_long(prompts):\n    return [FACTOR * len(prompt) for prompt in prompts]\n"
    (tmp_path / "mine.py").write_text(text)
    load_plugins(str(tmp_path / "mine.py"))
    with closing(RaySource("mine_long", "mine_long")) as source:
        batch = batch_from_media(["ab"], [Image.new("RGB", (4, 4), "red")])
        assert source.score(batch, Call()).values.tolist() == [6]


def test_the_http_client_is_whole_before_its_first_request():
    code = (
        "import sys\n"
        "from lightrft_visual.config.shared import RewardConfig\n"
        "from lightrft_visual.rewards.remote.client import RemoteClient\n"
        "before = 'anyio._backends._asyncio' in sys.modules\n"
        "RemoteClient(RewardConfig()).close()\n"
        "print(before, 'anyio._backends._asyncio' in sys.modules)\n"
    )
    assert finished([sys.executable, "-c", code], 60).stdout.split() == ["False", "True"]


def test_a_reward_model_in_actors_scores_as_in_this_process(cluster, tmp_path):
    folder = build_classifier(tmp_path)
    outputs = [make_samples(["a", "bcd efg", "hi"]), make_samples(["jkl mno"], first_id=3)]
    near = RewardComputationEngine(folder)
    wanted, drawn = near.compute_rewards(outputs).score, near.score_media(["red", "a blue one"]).score
    far = RewardComputationEngine(folder, resources=ResourcesConfig(reward_num_workers=1))
    (source,) = far._sources.values()
    try:
        assert isinstance(source, RayRewardModel)
        # Actors may compute by another number of threads.
        assert torch.allclose(far.compute_rewards(outputs).score, wanted, atol=1e-5)
        assert torch.allclose(far.score_media(["red", "a blue one"]).score, drawn, atol=1e-5)
        batch = batch_from_samples(outputs)
        waiting = source.submit(batch, Call())  # the trainer goes on meanwhile
        assert torch.allclose(waiting.result().values.float(), wanted, atol=1e-5)

        process_of = lambda actor: os.getpid()  # noqa: E731
        first = ray.get(source._actors[0].__ray_call__.remote(process_of))
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        late = source.score(batch, Call())
        if late.failed.any():  # the death was noticed by this call, whose samples are failed, and by no later one
            assert late.failed.all() and "on Ray" in next(iter(late.reasons))
            late = source.score(batch, Call())
        assert torch.allclose(late.values.float(), wanted, atol=1e-5)
        assert ray.get(source._actors[0].__ray_call__.remote(process_of)) != first
    finally:
        far.close()


def test_devices_for_actors_that_a_run_does_not_have_are_refused():
    placed, near = ResourcesConfig(reward_num_workers=2), SimpleNamespace(on_ray=False)
    with pytest.raises(ConfigError, match="this run has neither: leave it out, or add --reward_transport ray"):
        check_placed(placed, RewardComputationEngine(reward_fn=lambda completions: [1.0]), None)
    check_placed(placed, near, SimpleNamespace(on_ray=True))  # gold
    check_placed(ResourcesConfig(), near)


def test_a_python_file_of_remote_rewards_runs_where_the_transport_says(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0 for _ in queries]\n")
    asked = []
    made = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(ray_pool, "RaySource", lambda name, key, *_, **__: asked.append((name, key)) or made)
    RewardComputationEngine(
        remote_rm_url=f"{tmp_path}/mine.py", config=RewardConfig(reward_transport="ray"), resources=ResourcesConfig()
    )
    assert asked == [("mine", f"{tmp_path}/mine.py:reward_func")]


def test_what_actors_are_told_of_a_scorer(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(
        ray_pool.ActorPool, "__init__", lambda self, name, build, given, **more: told.append((given, more))
    )
    run = RewardConfig(reward_timeout=7.0, reward_token_env="OUR_TOKEN")
    for name in ("OUR_TOKEN", "ITS_TOKEN"):
        monkeypatch.setenv(name, name.lower())
    judge = {"url": "http://there", "model": "m", "token_env": "ITS_TOKEN"}
    RaySource("judge", "vlm_judge", judge, config=run, timeout=7.0)
    assert told[-1][0][2]["reward_config"] is run and not told[-1][1]["model"]
    assert told[-1][1]["variables"] == {"OUR_TOKEN": "our_token", "ITS_TOKEN": "its_token"}
    assert told[-1][1]["timeout"] == 14.0  # the judge's own are of 7 s
    RaySource("several", "multi", {"components": {"vlm_judge": 1.0}, "kwargs": {"vlm_judge": judge}}, config=run)
    assert told[-1][1]["variables"].keys() == {"OUR_TOKEN", "ITS_TOKEN"}
    RaySource("clip", "clip_score", config=run, timeout=7.0)
    assert told[-1][1]["model"] and told[-1][1]["timeout"] == 7.0
    monkeypatch.chdir(tmp_path)  # workers of a cluster have another folder
    (tmp_path / "mine.py").write_text("def score(completions):\n    return completions\n")
    RaySource("mine", "mine.py:score")
    assert told[-1][0][1] == f"{tmp_path}/mine.py:score"
    (tmp_path / "judge").mkdir()
    for path, wanted in (("judge", f"{tmp_path}/judge"), ("org/judge", "org/judge")):
        RayRewardModel("judge", path)
        assert told[-1][0][1] == wanted


def test_an_actor_that_died_is_waited_for_and_not_ended_once_more(monkeypatch):
    """By then it may be at work on what another rank has asked."""
    errors, killed = ray.exceptions, []
    answers = iter([errors.RayActorError(), errors.RayActorError(), 1234])

    def get(task, timeout):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))
    pool = ray_pool.ActorPool.__new__(ray_pool.ActorPool)
    pool._actors, pool.name, pool.timeout = [actor], "mine", 1.0
    pool._ray = SimpleNamespace(exceptions=errors, get=get, is_initialized=lambda: True)
    pool._ray.kill = lambda *_, **__: killed.append(1)
    scores = pool._collect(0, None, batch_from_samples([make_samples(["a", "b"])]))
    assert scores.failed.all() and not killed and next(answers, None) is None


def test_actors_of_rewards_by_what_the_resources_say(monkeypatch, caplog):
    def on(name):
        accelerator = SimpleNamespace(device_name=lambda: name)
        monkeypatch.setattr(ray_pool, "get_accelerator", lambda: accelerator)

    on("cpu")
    pool = ray_pool.actor_pool(ResourcesConfig(reward_num_workers=3))
    assert len(pool["options"]) == 3 and pool["cpus"] >= 1 and "device" not in pool
    started: list[dict] = []
    context = SimpleNamespace(gcs_address="host:1", get_node_id=lambda: "ab" * 28)
    fake = SimpleNamespace(get_runtime_context=lambda: context, get=lambda *_, **__: [], exceptions=ray.exceptions)
    monkeypatch.setattr(ray_pool, "connect", lambda *_, **__: fake)
    given: list = []
    monkeypatch.setattr(ray_pool, "named_actors", lambda *told: given.extend(told) or started.extend(told[3]) or {})
    ray_pool.ActorPool("mine", int, (), variables={"OUR_TOKEN": "told"}, **pool).close()
    assert [each["num_cpus"] for each in started] == [0] * 3  # else their cores would be lacking for rollouts
    assert given[-1] == {"OUR_TOKEN": "told"} and "OUR_TOKEN" not in str(started)  # which Ray logs
    on("cuda")
    ray_pool.ActorPool("clip", int, (), model=True, **pool).close()
    assert "reward clip computes on the CPU" in caplog.text
    monkeypatch.setattr(ray_pool, "on_devices", lambda device: {"on": device, "env_vars": {}})
    pool = ray_pool.actor_pool(ResourcesConfig(reward_devices=[2, 3]))
    assert [each["runtime_env"]["on"] for each in pool["options"]] == [2, 3] and pool["device"] is None
    ray_pool.ActorPool("clip", int, (), model=True, **pool).close()
    (where,) = {each["scheduling_strategy"] for each in started[-2:]}
    assert (where.node_id, where.soft) == ("ab" * 28, False) and caplog.text.count("on the CPU") == 1
    pool = ray_pool.actor_pool(ResourcesConfig(reward_num_gpus=1.0, reward_num_workers=2))
    assert [each["num_gpus"] for each in pool["options"]] == [0.5, 0.5]
    with pytest.raises(ConfigError, match="3 are 1.5 for each of 2 actors"):
        ray_pool.actor_pool(ResourcesConfig(reward_num_gpus=3.0, reward_num_workers=2))
    with pytest.raises(ConfigError, match="reward_num_workers is 3, but rewards have 2 device"):
        ray_pool.actor_pool(ResourcesConfig(reward_devices=[2, 3], reward_num_workers=3))
