import re
import time

import pytest
from reward_rollouts import make_samples

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.rewards import RewardComputationEngine

SOURCE = """
import os
import torch
from lightrft_visual.runtime.usercode.calls import Failed

async def score(completions, level, images):
    print("noise on stdout")
    if completions[0] == "hang":
        while True:
            pass
    if completions[0] == "raise":
        raise ValueError("what went wrong")
    if completions[0].startswith("exit"):
        raise SystemExit(int(completions[0][-1]))
    if completions[0].startswith("die"):
        os._exit(int(completions[0][-1]))
    if completions[0] == "interrupt":
        raise KeyboardInterrupt
    entries = [float(len(c) + (l or 0) + len(i)) for c, l, i in zip(completions, level, images)]
    if completions[0] == "odd":
        return [Failed("odd one"), None]
    return torch.tensor(entries), {"half": torch.tensor(entries) / 2}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def engine(path):
    config = RewardConfig(reward_fn=f"{path}:score", reward_fn_timeout=4.0, reward_max_invalid=1.0)
    engine = RewardComputationEngine.from_config(config)
    yield engine
    engine.close()


def rewards(engine, first):
    return engine.compute_rewards([make_samples([first, "bb"], metadata=[{"level": 3}, {}])])


def test_arguments_and_results_cross(engine):
    result = rewards(engine, "a")
    assert result.score.tolist() == [4, 2] and result.components["half"].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        pytest.param("hang", r"no result within 4 s, at .*mine.py, line (9|10)", marks=pytest.mark.slow),
        ("die 3", r"its process died \(exit code 3\)"),
    ],
)
def test_a_lost_call_is_invalid_and_the_next_one_works(engine, first, words, caplog):
    started = time.monotonic()
    result = rewards(engine, first)
    assert time.monotonic() - started < 60
    assert not result.valid.any() and re.search(words, caplog.text)
    assert rewards(engine, "a").valid.all()


def test_an_exception_shows_the_users_own_lines(engine, path):
    with pytest.raises(RewardError) as caught:
        rewards(engine, "raise")
    assert str(caught.value).splitlines() == [
        "reward function score raised ValueError: what went wrong",
        f'  File "{path}", line 12, in score',
        '    raise ValueError("what went wrong")',
    ]


@pytest.mark.parametrize(
    ("first", "told"), [("exit 0", "called sys.exit(0)"), ("interrupt", "raised KeyboardInterrupt")]
)
def test_leaving_the_process_is_an_error(engine, first, told):
    with pytest.raises(RewardError, match=re.escape(f"reward function score {told}")):
        rewards(engine, first)


def test_failed_and_none_cross(engine):
    result = rewards(engine, "odd")
    assert not result.valid.any() and result.metrics["reward/score/failures"] == 1


def test_a_bare_callable_cannot_be_moved_to_a_process():
    with pytest.raises(ConfigError, match="give it as path.py:function"):
        RewardComputationEngine(custom_reward_func=lambda completions: [], config=RewardConfig(reward_fn_timeout=1.0))
