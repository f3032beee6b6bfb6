"""Every recipe and layer that is shipped loads."""

from dataclasses import fields
from pathlib import Path

import pytest
from shipped import EXPERIMENTS, NAMES, parsed

from lightrft_visual.experience.diffusion_sampling import share_of_steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_sets_something(name: str) -> None:
    assert any("command line" not in source for source in parsed(name).sources.values())


@pytest.mark.parametrize("task", ["embedded_click", "embedded_reasoning", "embedded_zoom"])
def test_recipe_of_an_embedded_task_named_alone_brings_the_tasks_data(task: str) -> None:
    assert parsed(task).config.data.prompt_data == task


def test_vision_language_recipes_have_sound_rewards() -> None:
    from lightrft_visual.rewards.recipe import load_recipe

    for name in EXPERIMENTS:
        if name.startswith("experiment/vl/"):
            recipe = parsed(name).config.reward.reward_recipe
            assert recipe is None or load_recipe(recipe).components()


def test_the_zoom_recipes_prompt_shows_a_call_that_its_tool_takes() -> None:
    """The model's chat template shows no tools."""
    from lightrft_visual.rollout.builtin.zoom import Zoom, pixel_box
    from lightrft_visual.rollout.tool_calls import parse_tool_calls

    (call,) = parse_tool_calls(parsed("experiment/vl/zoom_grpo").config.data.system_prompt)
    assert call.name == Zoom().schemas()[0]["function"]["name"]
    assert pixel_box(call.arguments["box"], (80, 40)) == (20, 20, 40, 30)


# of the systems' repositories. EasyR1: examples/config.yaml under qwen2_5_vl_3b_geo3k_grpo.sh, what its 7B scripts of
# the same name change (128 prompts x 5 make an update), and the defaults of verl/workers/actor/config.py.
# DeepEyes, commit f3f1122: examples/agent/train_grpo_vlagent_v3.sh, verl/trainer/config/ppo_trainer.yaml.
# Flow-GRPO: config/grpo.py, general_ocr_sd3. ROLL: its documentation of Reward FL.
EASYR1 = {
    "rollout_batch_size": 512, "n_samples_per_prompt": 5, "train_batch_size": 640, "prompt_max_len": 2048,
    "generate_max_len": 2048, "temperature": 1.0, "top_p": 1.0, "actor_learning_rate": 1e-6, "lr_warmup_ratio": 0.0,
    "l2": 1e-2, "max_norm": 1.0, "num_episodes": 15, "eval_steps": 5, "save_steps": 5, "engine_mem_util": 0.6,
    "eps_clip": 0.2, "eps_clip_high": 0.3, "dual_clip": 3.0, "loss_agg_mode": "token-mean", "adam_betas": [0.9, 0.999],
    "lr_scheduler": "constant_with_warmup", "min_pixels": 262144, "max_epochs": 1,
}  # fmt: skip
PUBLISHED = {
    "experiment/vl/geometry3k_grpo": EASYR1 | {"use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-2},
    "experiment/vl/geometry3k_gspo": EASYR1
    | {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean", "init_kl_coef": 0.0},
    "experiment/vl/geometry3k_dapo": EASYR1 | {"eps_clip_high": 0.28, "init_kl_coef": 0.0, "dynamic_sampling": True},
    "experiment/vl/zoom_grpo": {
        "rollout_batch_size": 128, "n_samples_per_prompt": 16, "train_batch_size": 2048, "prompt_max_len": 4096,
        "generate_max_len": 2048, "max_episode_tokens": 10240, "max_turns": 4, "actor_learning_rate": 1e-6,
        "use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-4, "environment": "zoom", "freeze_prefix": "",
        "lr_scheduler": "constant_with_warmup", "lr_warmup_ratio": 0.0, "adam_betas": [0.9, 0.999], "l2": 1e-2,
        "loss_agg_mode": "token-mean", "eps_clip": 0.2, "dual_clip": 3.0, "num_episodes": 32,
    },
    "experiment/diffusion/sd3_5/online_grpo_ocr": {
        "num_steps": 10, "eval_num_steps": 40, "guidance_scale": 4.5, "height": 512, "rollout_batch_size": 48,
        "n_samples_per_prompt": 24, "train_batch_size": 48 * 24 // 2, "beta": 0.04, "global_std": True,
        "learning_rate": 3e-4, "enable_ema": True, "clip_range": 1e-4, "adv_clip_max": 5.0, "noise_level": 0.7,
        "lora_rank": 32, "lora_alpha": 64, "ema_beta": 0.9, "ema_interval": 8, "kl_form": "published",
    },
    "experiment/diffusion/wan2_2/reward_fl": {
        "learning_rate": 2.5e-6, "lr_scheduler_type": "constant", "train_batch_size": 8, "warmup_steps": 10,
        "max_epochs": 1, "trainable_models": "transformer_2", "use_gradient_checkpointing_offload": True,
        "num_steps": 8,
    },
}  # fmt: skip
# Of the authors' repositories: scxue/advantage_weighted_matching (geneval_sd3_no_cfg_1node), Luo-Yihong/DGPO
# (config/dgpo.py), SalesforceAIResearch/DiffusionDPO (launchers/sd15.sh), Tencent-Hunyuan/MixGRPO
# (finetune_flux_grpo_MixGRPO.sh), Tencent-Hunyuan/UniRL (FlowDPPO/config.yaml), NVlabs/DiffusionNFT (config/nft.py,
# sd3_geneval), X-GenGroup/Flow-Factory (examples/crd/lora/sd3_5), XueZeyue/DanceGRPO
# (scripts/finetune/finetune_flux_grpo.sh)
LAYERS = {
    "diffusion_nft": {
        "nft_beta": 1.0, "nft_kl_beta": 1e-4, "decay_type": 1, "adv_mode": "all", "adv_clip_max": 5.0,
        "global_std": True, "guidance_scale": 1.0, "num_steps": 10, "n_samples_per_prompt": 24, "learning_rate": 3e-4,
    },
    "dance_grpo": {
        "noise_level": 0.3, "clip_range": 1e-4, "adv_clip_max": 5.0, "num_steps": 16, "flow_shift": 3.0,
        "n_samples_per_prompt": 12, "timestep_fraction": 0.6, "timestep_choice": "random", "same_latent": True,
        "learning_rate": 1e-5, "l2": 1e-4, "guidance_scale": 3.5,
    },
    "awm": {
        "num_steps": 14, "guidance_scale": 1.0, "awm_power": 0.25, "clip_range": 1.0, "global_std": True, "beta": 1e-3,
        "old_beta": 1.0, "adv_clip_max": 5.0,
    },
    "dgpo": {
        "num_steps": 10, "guidance_scale": 4.5, "dpo_beta": 100.0, "beta": 0.02, "global_std": True,
        "n_samples_per_prompt": 16, "cfg_in_training": False,
    },
    "crd": {
        "num_steps": 10, "guidance_scale": 1.0, "crd_beta": 1.0, "beta": 0.1, "adv_clip_max": 5.0, "global_std": True,
    },
    "diffusion_dpo": {"dpo_beta": 5000.0, "learning_rate": 1e-8 * 16 * 128, "warmup_steps": 500},
    "mix_grpo": {
        "num_steps": 25, "noise_level": 0.7, "flow_shift": 3.0, "sde_window_size": 4, "sde_window_interval": 25,
        "sde_window_stride": 1, "same_latent": True, "n_samples_per_prompt": 12, "clip_range": 1e-4,
        "learning_rate": 1e-5, "adv_clip_max": 5.0, "guidance_scale": 3.5,
    },
    "flow_dppo": {
        "num_steps": 10, "guidance_scale": 1.0, "noise_level": 0.7, "dppo_threshold": 1e-5, "sde_window_size": 3,
        "n_samples_per_prompt": 16, "global_std": True,
    },
}  # fmt: skip
PUBLISHED |= {
    f"base/algorithm/diffusion/{name}": values | {"diffusion_algorithm": name} for name, values in LAYERS.items()
}
OWN = ["--pretrain", "m", "--prompt_data", "rows.csv"]
NOISY_AND_TRAINED = {"awm": (14, 6), "dgpo": (7, 4), "diffusion_nft": (10, 9), "diffusion_dpo": (100, 1)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_values(name: str) -> None:
    config = parsed(name, [] if name.startswith("experiment") else OWN).config
    sections = [getattr(config, field.name) for field in fields(config)]
    for leaf, value in PUBLISHED[name].items():
        found = [getattr(section, leaf) for section in sections if hasattr(section, leaf)]
        assert found == [pytest.approx(value)], leaf
    layer = name.removeprefix("base/algorithm/diffusion/")
    if layer in NOISY_AND_TRAINED:
        noisy, trained = NOISY_AND_TRAINED[layer]
        assert share_of_steps(noisy, config.algorithm.timestep_fraction) == trained


def test_each_recipe_says_where_its_values_are_from_and_what_to_expect() -> None:
    """docs/recipes.md has a row for every experiment."""
    rows = [
        line for line in (ROOT / "docs" / "recipes.md").read_text().splitlines() if line.startswith("| `experiment/")
    ]
    described = {row.split("`")[1] for row in rows if row.count("|") == 5}
    assert described >= {*EXPERIMENTS}
