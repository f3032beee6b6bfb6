"""Environments in processes of their own: what bad ones can do, and what they cannot."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from bad_environment import SECONDS, TOLD, kinds
from PIL import Image

from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.data.media import Video
from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.environment_pool import ProcessHost, runs_apart
from lightrft_visual.rollout.environment_process import pack, unpack
from lightrft_visual.rollout.environments import Action, EnvironmentFailure, Observation, StepResult, ToolCall

FILE = Path(__file__).with_name("bad_environment.py")


class Outcome:
    """Of one episode: what it failed with, or what its steps gave."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.steps: list[StepResult] = []


def row_of(kind: str) -> dict:
    return {"kind": kind, "seed": 7, "messages": [{"role": "user", "content": []}], "images": [Image.new("L", (9, 9))]}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All kinds at once, each beside a good episode, for two steps; and how long it took to end them."""
    before = os.getcwd(), dict(os.environ)
    host = ProcessHost(EpisodeConfig(environment=f"{FILE}:Bad", env_timeout=SECONDS))
    names = [name for kind in TOLD for name in (kind, f"good beside {kind}")]
    found, rows = {name: Outcome() for name in names}, [row_of(name.split()[0]) for name in names]
    actions = [Action("seen", [1, 2, 3]) for _ in names]
    waiting = [host.reset(episode, row) for episode, row in enumerate(rows)]
    for turn in range(3):
        for episode, (name, future) in enumerate(zip(names, waiting)):
            outcome = found[name]
            if outcome.failure is None:
                try:
                    result = future.result(timeout=60)
                    outcome.steps += [result] if turn else []
                except EnvironmentFailure as failure:
                    outcome.failure = str(failure)
                    host.end(episode)
        if turn < 2:
            waiting = [
                None if found[name].failure else host.step(episode, action)
                for episode, (name, action) in enumerate(zip(names, actions))
            ]
    assert all(row["messages"] for row in rows) and all(action.token_ids == [1, 2, 3] for action in actions)
    started = time.monotonic()
    host.close()
    found["ending"] = Outcome()
    found["ending"].failure = f"{time.monotonic() - started}"
    assert (os.getcwd(), dict(os.environ)) == before
    return found


def test_every_kind_is_told():
    assert set(TOLD) == set(kinds()) and len(TOLD) >= 40


@pytest.mark.parametrize("kind", TOLD)
def test_bad_environment_fails_alone_with_its_reason_or_goes_on(outcomes, kind):
    outcome = outcomes[kind]
    if TOLD[kind] is None:
        assert outcome.failure is None and [step.reward for step in outcome.steps] == [0.5, 0.5]
    else:
        assert TOLD[kind] in outcome.failure and not outcome.steps and len(outcome.failure) < 4000
    assert outcomes[f"good beside {kind}"].failure is None


def test_no_state_reaches_another_episode(outcomes):
    texts = {
        tuple(step.observation.messages[0]["content"][0]["text"] for step in outcome.steps)
        for name, outcome in outcomes.items()
        if name.startswith("good beside")
    }
    assert texts == {("seen 1", "seen 2")}


def test_random_numbers_of_an_episode_depend_on_its_seed_alone(outcomes):
    drawn = {outcome.steps[0].info["drawn"] for name, outcome in outcomes.items() if name.startswith("good beside")}
    assert len(drawn) == 1


def test_what_numpy_has_comes_back_as_plain_values(outcomes):
    step = outcomes["numpy"].steps[0]
    assert step.info["b"] == 2 and step.info["a"].tolist() == [0, 1, 2] and step.done is False


def test_ending_waits_for_a_close_that_hangs_no_longer_than_its_limit(outcomes):
    assert float(outcomes["ending"].failure) < 20


def test_environment_that_kills_its_parent_costs_itself_only(tmp_path):
    (tmp_path / "killer.py").write_text(
        "import os, signal\nclass Killer:\n    def step(self, action):\n"
        "        if action.text == 'kill':\n            os.kill(os.getppid(), signal.SIGKILL)\n"
        "        return 'alive', 0.0, False, {}\n"
    )
    host = ProcessHost(EpisodeConfig(environment=f"{tmp_path}/killer.py:Killer", env_timeout=10.0))
    try:
        for text in ("kill", "go on"):
            host.reset(0, {}).result(timeout=60)
            assert (
                host.step(0, Action(text)).result(timeout=60).observation.messages[0]["content"][0]["text"] == "alive"
            )
            host.end(0)
    finally:
        host.close()


def test_slow_environments_run_beside_each_other(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nclass Slow:\n    def step(self, action):\n        time.sleep(1.0)\n"
        "        return 'done', 0.0, True, {}\n"
    )
    host = ProcessHost(EpisodeConfig(environment=f"{tmp_path}/slow.py:Slow", env_timeout=20.0))
    try:
        for future in [host.reset(episode, {}) for episode in range(16)]:
            future.result(timeout=60)
        started = time.monotonic()
        for future in [host.step(episode, Action("x")) for episode in range(16)]:
            future.result(timeout=60)
        assert time.monotonic() - started < 8.0  # one after the other they take 16 s
    finally:
        host.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [("Missing", "has no function or class 'Missing'"), ("kinds.x", "write it as")],
)
def test_environment_that_is_not_there_is_refused_at_the_start(name, told):
    with pytest.raises(ConfigError, match=told):
        ProcessHost(EpisodeConfig(environment=f"{FILE}:{name}"))


@pytest.mark.parametrize(("name", "told"), [("RaisesWhenMade", "not today"), ("WithoutStep", "has no step")])
def test_environment_that_cannot_be_made_fails_at_reset(name, told):
    host = ProcessHost(EpisodeConfig(environment=f"{FILE}:{name}"))
    try:
        with pytest.raises(EnvironmentFailure, match=told):
            host.reset(0, {}).result(timeout=60)
    finally:
        host.close()


def test_environment_whose_file_fails_is_refused_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="nothing_of_this_name(.|\n)*broken.py"):
        ProcessHost(EpisodeConfig(environment=f"{tmp_path}/broken.py:Mine"))


def test_tools_by_path_run_apart(tmp_path):
    (tmp_path / "mine.py").write_text(
        'def double(number: int) -> int:\n    """Twice.\n\n    Args:\n        number: any\n    """\n'
        "    return 2 * number\n"
    )
    config = EpisodeConfig(tools=f"{tmp_path}/mine.py:double")
    assert runs_apart(config)
    host = ProcessHost(config)
    try:
        host.reset(3, {"seed": 1}).result(timeout=60)
        step = host.step(3, Action("", [], [ToolCall("double", {"number": 21})])).result(timeout=60)
    finally:
        host.close()
    assert step.observation.messages == [{"role": "tool", "content": [{"type": "text", "text": "42"}]}]
    assert step.info == {"tool_calls": {"double": 1}, "tool_errors": 0}


@pytest.mark.parametrize(
    ("config", "apart"),
    [
        ({"environment": "my.py:Env"}, True), ({"environment": "zoom"}, False), ({"tools": "a.py:f, b.py:g"}, True),
        ({"environment": "python:Env"}, False), ({"environment": "my.py:Env", "tools": "python:f"}, False),
    ],
)  # fmt: skip
def test_what_is_named_by_path_runs_apart(config, apart):
    assert runs_apart(EpisodeConfig(**config)) is apart


def test_what_is_sent_comes_back_as_it_was():
    images = [Image.new("RGB", (3, 2), "red"), Image.new("L", (5, 1)), b"bytes", "https://x.org/a.png"]
    frames = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    observation = Observation([{"role": "user", "content": [{"type": "image"}]}], images, [Video(frames, {"fps": 2.0})])
    step = unpack(pack(StepResult(observation, 0.25, False, {"a": [1, None, {"b": "ü\ud800"}]})))
    assert (step.reward, step.done, step.info) == (0.25, False, {"a": [1, None, {"b": "ü\ud800"}]})
    back = step.observation
    assert back.messages == observation.messages and back.images[2:] == images[2:]
    assert [(each.mode, each.size, each.tobytes()) for each in back.images[:2]] == [
        (each.mode, each.size, each.tobytes()) for each in images[:2]
    ]
    assert (back.videos[0].frames == frames).all() and back.videos[0].metadata == {"fps": 2.0}


def test_episode_beyond_the_limit_of_open_files_fails_and_says_so():
    host = ProcessHost(EpisodeConfig(environment=f"{FILE}:Bad"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        host.reset(0, row_of("good")).result(timeout=60)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limit[1]))
        failing = host.reset(1, row_of("good"))
        with pytest.raises(EnvironmentFailure, match="ulimit -n"):
            failing.result(timeout=60)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert host.step(0, Action("go on")).result(timeout=60).reward == 0.5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        host.close()
