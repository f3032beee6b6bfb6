"""Episodes with workers: as colocated ones at staleness 0, and ahead of the trainer with their versions.

The worker is a thread of this process; what goes to it and comes back is pickled, as with Ray.
"""

import csv
import os
import pickle
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import VL_PRESET
from lightrft_visual.config.vl import DistributedConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.ray.rollout import engine
from lightrft_visual.plugins.ray.rollout.episodes import for_workers
from lightrft_visual.plugins.ray.rollout.worker import Worker
from lightrft_visual.rollout.weight_sync import WeightPost
from lightrft_visual.trainer.hooks import StepHook
from lightrft_visual.trainer.vl.trainer import build_trainer

pytest.importorskip("ray")
BASE = (
    "--engine_type hf --prompt_data embedded_zoom --report false --eval_steps 0 --max_eval_samples 0 --max_steps 3 "
    "--rollout_batch_size 3 --n_samples_per_prompt 2 --train_batch_size 6 --micro_train_batch_size 3 --max_samples 21 "
    "--micro_rollout_batch_size 6 --image_dependence_every 0 --prompt_max_len 150 --generate_max_len 21 --max_turns 3 "
    "--max_episode_tokens 131 --save_steps -1 --actor_learning_rate 1e-3"
)
SPLIT = "--placement split"
AHEAD = f"{SPLIT} --max_staleness 1 --tis_mode token --tis_cap 1.05 --init_kl_coef 0.01 --save_steps 1 --max_ckpt_num 3"
ENVIRONMENT = '''
class Looks:
    """Three turns, with a text or an image between them; every second episode begins with a message of its own."""

    def reset(self, row):
        self.image, self.reference, self.turn = row["images"][0], row["reference"], 0
        return "look well" if row["seed"] % 2 else None

    def step(self, action):
        self.turn += 1
        reward = float(len(action.text) % 4) + len(str(self.reference)) / 8
        return (self.image.rotate(90) if self.turn == 1 else "again"), reward, self.turn == 3, {"turn": self.turn}
'''


class LocalCluster:
    """One worker in a thread. See `ray_workers.Cluster`."""

    def __init__(self, resources, spec):
        self.worker, self.lock = Worker(pickle.loads(pickle.dumps(spec))), threading.Lock()
        self.name, self.first, self.workers = "local", True, [self]

    def call(self, method, *arguments):
        with self.lock:
            return pickle.loads(pickle.dumps(getattr(self.worker, method)(*pickle.loads(pickle.dumps(arguments)))))

    def post(self, turns):
        return WeightPost(turns=turns)

    def close(self):
        self.worker.engine.close()


@contextmanager
def trainer_of(folder: Path, name: str, flags: str = "", callbacks=()):
    """The trainer of a run, which ends with the context."""
    environment, cluster = dict(os.environ), engine.Cluster
    engine.Cluster = LocalCluster
    try:
        argv = [*BASE.split(), "--output_dir", str(folder / name), *flags.split()]
        trainer = build_trainer(load_config(RunConfig, argv, preset=VL_PRESET), callbacks)
        yield trainer
        trainer.close()
    finally:
        engine.Cluster = cluster
        os.environ.clear()
        os.environ.update(environment)


def metrics(folder: Path, name: str) -> list[dict[str, str]]:
    """Of each step, without what is measured in time."""
    with open(folder / name / "metrics.csv") as file:
        return [
            {k: value for k, value in row.items() if "time" not in k and not k.startswith(("idle", "buffer_level"))}
            for row in csv.DictReader(file)
        ]


class Kept(StepHook):
    """The micro-batches of each step."""

    def __init__(self):
        self.steps = []

    def on_experience(self, step):
        self.steps.append(list(step.batches))
        return step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("episodes")
    (made / "env.py").write_text(ENVIRONMENT)
    return made


def run(folder, name, flags=""):
    """(metrics, micro-batches of each step)."""
    kept = Kept()
    flags = f"--environment {folder}/env.py:Looks {flags}"
    with trainer_of(folder, name, flags, [kept]) as trainer:
        trainer.fit()
    return metrics(folder, name), kept.steps


@pytest.fixture(scope="module")
def ahead(folder):
    return run(folder, "ahead", AHEAD)


def test_episodes_of_a_worker_are_those_of_the_colocated_run(folder):
    """Every metric, bit for bit; with begins of the environment's own, images and columns of the data."""
    alone, _ = run(folder, "colocated", "--max_steps 2")
    split, steps = run(folder, "split", f"{SPLIT} --max_steps 2")
    assert len(alone) == 2 and all(float(row["observation_tokens_share"]) > 0.3 for row in alone)
    assert split == alone
    assert all(each.token_versions is None for batches in steps for each in batches)


def test_sampled_tokens_ahead_carry_the_policy_that_drew_them_and_observed_ones_none(ahead):
    rows, steps = ahead
    for step, batches in enumerate(steps):
        for each in batches:
            assert torch.equal(each.token_versions >= 0, each.action_mask)
            assert set(each.token_versions[each.action_mask].tolist()) == {max(0, step - 1)}
            assert each.policy_version.unique().tolist() == [max(0, step - 1)]
            if step < 2:  # the reference is the policy that drew them
                assert (each.rollout_log_probs - each.base_action_log_probs)[each.action_mask].abs().max() < 1e-4
    assert [float(row["staleness_mean"]) for row in rows] == [0, 1, 1]
    assert all(float(row["staleness_max"]) <= 1 and float(row["dropped_stale_share"]) == 0 for row in rows)


def test_truncated_weights_of_episodes_ahead_are_those_of_sampled_tokens(ahead):
    for row, batches in zip(*ahead, strict=True):
        ratios = [(each.action_log_probs - each.rollout_log_probs)[each.action_mask].exp() for each in batches]
        ratio = torch.cat(ratios)
        assert float(row["tis_weight"]) == pytest.approx(ratio.clamp(max=1.05).mean().item(), rel=1e-5)
        assert float(row["tis_clip_frac"]) == pytest.approx((ratio > 1.05).float().mean().item(), abs=1e-6)
        assert (ratio - 1).abs().max() > 0.01 or row is ahead[0][0]


def test_a_resumed_run_trains_on_the_episodes_that_were_in_flight(folder, ahead):
    """From after the first step: batch 2 was drawn by policy 0, which is gone, and comes from the checkpoint."""
    rows, steps = ahead
    again, later = run(folder, "again", f"{AHEAD} --resume_from {folder}/ahead/checkpoint-1")
    unlike = {"parity"}  # a process compares its engine once more at its start
    assert [{k: v for k, v in row.items() if k not in unlike} for row in again] == [
        {k: v for k, v in row.items() if k not in unlike} for row in rows[1:]
    ]
    for first, second in zip(steps[1:], later, strict=True):
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.sequences, other.sequences) and torch.equal(one.advantages, other.advantages)
            assert torch.equal(one.token_versions, other.token_versions) and one.vision == other.vision
    assert (folder / "again/rollouts/step_000002.jsonl").read_text() == (
        folder / "ahead/rollouts/step_000002.jsonl"
    ).read_text()


def test_an_environment_that_python_gives_is_refused_with_workers():
    split = DistributedConfig(placement="split")
    with pytest.raises(ConfigError, match="workers cannot load an environment or tools that Python gives"):
        RunConfig(distributed=split, episodes=EpisodeConfig(environment="python:Looks"))


def test_workers_are_told_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("mine.py", "game.py"):
        (tmp_path / name).touch()
    config = RunConfig(plugins="mine.py, other.module", episodes=EpisodeConfig(environment="game.py:play"))
    config.model.pretrain = "model"
    sent = for_workers(config)
    assert (sent.model.pretrain, sent.plugins) == (f"{tmp_path}/model", f"{tmp_path}/mine.py, other.module")
    assert sent.episodes.environment == f"{tmp_path}/game.py:play" and config.model.pretrain == "model"
    config.model.pretrain = "org/model"  # of the hub
    assert for_workers(config).model.pretrain == "org/model"


def test_workers_get_the_settings_of_a_run_that_is_open_unchecked(monkeypatch):
    """Then the default of a setting stands there, which the user may not have named."""
    config, specs = RunConfig(distributed=DistributedConfig(deterministic=True)), []
    monkeypatch.setattr(RunConfig, "check", lambda self: pytest.fail("checked once more"))
    monkeypatch.setattr(engine, "Workers", lambda config, spec: specs.append(spec))
    engine.RemoteEngine.from_config(config, None)
    (spec,) = specs
    assert spec.deterministic and spec.arguments[0] == config and spec.arguments[0] is not config
