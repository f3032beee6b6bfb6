"""What is trained of models with several networks, by the steps that a run trains on."""

from types import SimpleNamespace

import pytest

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.placement import ResourcesConfig
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.trainer.diffusion import build
from lightrft_visual.trainer.diffusion.build import _gold, _trained_experts

TWO = SimpleNamespace(
    denoisers={"high": None, "low": None},
    latent_shape=lambda *size: (4, 2, 2),
    family=SimpleNamespace(serving=lambda timesteps: {"high" if at >= 600 else "low" for at in timesteps.tolist()}),
)


@pytest.mark.parametrize(
    ("sigmas", "flags", "trained"),
    [
        ("1,0.95,0.6,0.3,0.1", "", "high low"), ("1,0.95,0.9,0.1", "", "high"),
        ("1,0.95,0.6,0.3,0.1", "--timestep_fraction 0.5", "high"),
        ("1,0.95,0.6,0.3,0.1", "--timestep_fraction 0.5 --timestep_choice random", "high low"),
        ("1,0.95,0.6,0.3,0.1", "--sde_window_size 2 --sde_window_range 0,2", "high"),
        ("1,0.95,0.6,0.3,0.1", "--sde_window_size 1 --sde_window_move slide", "high low"),
        ("1,0.95,0.9,0.85,0.4,0.2,0.1", "--sde_window_size 2", "high"),  # in the first half of the steps
        ("1,0.95,0.9,0.85,0.4,0.2,0.1", "--sde_window_size 2 --sde_window_move anywhere", "high low"),
        ("1,0.95,0.6,0.3,0.1", "--diffusion_algorithm dgpo --min_sigma 0.9", "high"),
        ("1,0.95,0.6,0.3,0.1", "--diffusion_algorithm diffusion_nft", "high low"),
    ],
)  # fmt: skip
def test_networks_that_serve_no_trained_step_are_not_trained(sigmas, flags, trained):
    flags = f"--pretrain m --prompt_data p.txt --sigmas {sigmas} {flags}".split()
    config = load_config(DiffusionRunConfig, flags, preset=DIFFUSION_PRESET)
    assert _trained_experts(config, TWO) == set(trained.split())


def test_ranks_that_have_loaded_what_scores_meet_without_a_time_limit(monkeypatch):
    told, run = [], load_config(DiffusionRunConfig, ["--pretrain", "m", "--prompt_data", "p"], preset=DIFFUSION_PRESET)
    monkeypatch.setattr(build.RewardComputationEngine, "from_config", lambda *given, **more: told.append("loads"))
    monkeypatch.setattr(build.collectives, "meet", lambda: told.append("meets"))
    build._rewards(run, None, [], True)
    build._gold(run.reward, None, [], None, None)
    assert told == ["loads", "meets"] * 2


def test_gold_gets_the_devices_that_rewards_have(monkeypatch):
    told = []
    monkeypatch.setattr(RewardComputationEngine, "from_config", lambda config, **given: told.append(given["resources"]))
    placed = ResourcesConfig(reward_devices=[3])
    _gold(RewardConfig(), None, [], None, None, placed)
    assert told == [placed]


def test_users_files_are_loaded_once_the_rank_has_its_device(monkeypatch, tmp_path):
    def started(config):
        raise StopIteration

    monkeypatch.setattr(build, "start_strategy", started)
    (tmp_path / "mine.py").write_text("raise AssertionError")
    function = f"{tmp_path}/mine.py:score"
    for reward in (function, None):
        config = DiffusionRunConfig(reward=RewardConfig(reward_fn=reward))
        config.algorithm.diffusion_algorithm, config.algorithm.differentiable_reward = "reward_fl", function
        with pytest.raises(StopIteration):
            build.build_diffusion_trainer(config)
