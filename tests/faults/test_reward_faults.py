"""What reward functions do wrong: a sample of the kinds through the reward stage, and a few of them in whole runs.

`scripts/reward_faults.py` holds the kinds, and runs all of them.
"""

import importlib
import logging
import sys
import threading
from pathlib import Path

import forked
import pytest

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError, RewardError
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, Rollouts
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.runtime.usercode import surroundings
from lightrft_visual.trainer.vl.maker import give_rewards

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # child processes import it too
faults = importlib.import_module("reward_faults")
FAULTS = faults.FAULTS
# Where what is raised, left, returned, changed or loaded differs in the way that it is caught and told.
IN_PROCESS = (
    "nested", "chained", "group", "without_text", "text_not_unicode", "warning_as_error", "async", "cancelled",
    "generator_exit", "panic", "group_of_panics", "one_sample_skipped", "one_score_skipped",
    "keyboard_interrupt", "thread_dies", "fork_comes_back_late", "fork_raises", "forks_often", "starts_programs",
    "none", "nan", "huge_integer", "wrong_length", "nested_lists", "generator", "complex_tensor", "bad_metric",
    "meta_scores", "ragged", "no_length", "with_gradient",
    "changes_inputs", "changes_folder", "closes_stdout", "default_device", "takes_sigterm", "takes_sigpipe",
    "deletes_outputs",
    "syntax_error", "exits_on_import", "missing_function", "positional_only",
)  # fmt: skip


def rollouts() -> Rollouts:
    return Rollouts(
        Rollout(PromptFeatures(f"q{place // 4}", [1, 2], group_id=place // 4), [3], None, f"{place}", False, place)
        for place in range(8)
    )


def rewards_of(path: Path, fault) -> RewardComputationEngine:
    words = fault.flags.split()
    given = {"on_reward_error": "error", "reward_max_invalid": 0.5}
    given |= {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2])}
    given["reward_max_invalid"] = float(given["reward_max_invalid"])
    config = RewardConfig(reward_fn=f"{path}:score", **given)
    return RewardComputationEngine.from_config(config, columns=())


@pytest.mark.parametrize("name", IN_PROCESS)
def test_the_users_line_is_named_and_the_run_keeps_what_is_its_own(name, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(surroundings, "_said", set())
    monkeypatch.setattr(surroundings, "_users_states", {})
    monkeypatch.setattr(threading, "excepthook", lambda args: logging.error("", exc_info=args[:3]))
    fault, path, told = FAULTS[name], tmp_path / "mine.py", ""
    path.write_text(fault.source)
    try:
        rewards = rewards_of(path, fault)
        for _ in range(2):
            samples = rollouts()
            give_rewards(samples, rewards.score_rollouts(samples, 8))
    except (RewardError, ConfigError) as error:
        assert fault.code == (2 if isinstance(error, ConfigError) else 1)
        told = str(error)
    except KeyboardInterrupt as error:
        assert fault.code == 130
        told = f"interrupted before the run was done {error.__traceback__.tb_next}"
        return
    else:
        assert fault.code == 0
        skips = "on_reward_error" in fault.flags
        assert sum(rollout.valid for rollout in samples) == (7 if skips else 8)
    told += caplog.text + capfd.readouterr().err
    assert fault.tells in told
    assert fault.line is None or f'mine.py", line {fault.line}' in told, told


@pytest.fixture(scope="module")
def processes():
    return forked.server()


@pytest.mark.parametrize("name", ["sys_exit_0", "on_rank_1", "always_raises"])
def test_a_whole_run(name, tmp_path, processes, cache_root):
    outcome = faults.run(name, FAULTS[name], tmp_path / name, processes)
    assert not outcome.problems, outcome.output[-3000:]
    assert ("loading the models" in outcome.output) == (name != "always_raises")
