"""Every recipe and layer that is shipped loads."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_config", ROOT / "scripts" / "check_config.py")
check_config = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_config)


@pytest.mark.parametrize("name", check_config.shipped())
def test_it_loads_and_sets_something(name: str) -> None:
    assert any("command line" not in source for source in check_config.check(name, []).sources.values())


@pytest.mark.parametrize("task", ["embedded_click", "embedded_reasoning", "embedded_zoom"])
def test_recipe_of_an_embedded_task_named_alone_brings_the_tasks_data(task: str) -> None:
    assert check_config.check(task, []).config.data.prompt_data == task


def test_vision_language_recipes_have_sound_rewards() -> None:
    from lightrft_visual.rewards.recipe import load_recipe

    for name in check_config.shipped():
        if name.startswith("experiment/vl/"):
            recipe = check_config.check(name, []).config.reward.reward_recipe
            assert recipe is None or load_recipe(recipe).components()


# of the systems' repositories. EasyR1: examples/config.yaml under qwen2_5_vl_3b_geo3k_grpo.sh, what its 7B scripts of
# the same name change (128 prompts x 5 make an update), and the defaults of verl/workers/actor/config.py.
# DeepEyes: examples/agent/train_grpo_vlagent_v3.sh. Flow-GRPO: config/grpo.py, general_ocr_sd3. ROLL: its documentation
# of Reward FL.
EASYR1 = {
    "rollout_batch_size": 512, "n_samples_per_prompt": 5, "train_batch_size": 640, "prompt_max_len": 2048,
    "generate_max_len": 2048, "temperature": 1.0, "top_p": 1.0, "actor_learning_rate": 1e-6, "lr_warmup_ratio": 0.0,
    "l2": 1e-2, "max_norm": 1.0, "num_episodes": 15, "eval_steps": 5, "save_steps": 5, "engine_mem_util": 0.6,
    "eps_clip": 0.2, "eps_clip_high": 0.3, "dual_clip": 3.0, "loss_agg_mode": "token-mean", "adam_betas": [0.9, 0.999],
    "lr_scheduler": "constant_with_warmup", "min_pixels": 262144, "max_epochs": 1,
}  # fmt: skip
PUBLISHED = {
    "vl/geometry3k_grpo": EASYR1 | {"use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-2},
    "vl/geometry3k_gspo": EASYR1
    | {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean", "init_kl_coef": 0.0},
    "vl/geometry3k_dapo": EASYR1 | {"eps_clip_high": 0.28, "init_kl_coef": 0.0, "dynamic_sampling": True},
    "vl/zoom_grpo": {
        "rollout_batch_size": 128, "n_samples_per_prompt": 16, "train_batch_size": 2048, "prompt_max_len": 4096,
        "generate_max_len": 2048, "max_episode_tokens": 10240, "max_turns": 4, "actor_learning_rate": 1e-6,
        "use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-4, "environment": "zoom",
    },
    "diffusion/sd3_5/online_grpo_ocr": {
        "num_steps": 10, "eval_num_steps": 40, "guidance_scale": 4.5, "height": 512, "rollout_batch_size": 48,
        "n_samples_per_prompt": 24, "train_batch_size": 48 * 24 // 2, "beta": 0.04, "global_std": True,
        "learning_rate": 3e-4, "enable_ema": True, "clip_range": 1e-4, "adv_clip_max": 5.0, "noise_level": 0.7,
    },
    "diffusion/wan2_2/reward_fl": {
        "learning_rate": 2.5e-6, "lr_scheduler_type": "constant", "train_batch_size": 8, "warmup_steps": 10,
        "max_epochs": 1, "trainable_models": "transformer_2", "use_gradient_checkpointing_offload": True,
        "num_steps": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_values(name: str) -> None:
    config = check_config.check(f"experiment/{name}", []).config
    sections = [getattr(config, field.name) for field in fields(config)]
    for leaf, value in PUBLISHED[name].items():
        found = [getattr(section, leaf) for section in sections if hasattr(section, leaf)]
        assert found == [pytest.approx(value)], leaf


def test_each_recipe_says_where_its_values_are_from_and_what_to_expect() -> None:
    """docs/recipes.md has a row for every experiment."""
    rows = [
        line for line in (ROOT / "docs" / "recipes.md").read_text().splitlines() if line.startswith("| `experiment/")
    ]
    described = {row.split("`")[1] for row in rows if row.count("|") == 5}
    assert described >= {name for name in check_config.shipped() if name.startswith("experiment/")}


@pytest.mark.slow
def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: {sede: 1}\n")
    assert check_config.main([]) == 0
    assert check_config.main(["embedded_vl", "--seed", "9"]) == 0
    assert "seed: 9" in capsys.readouterr().out
    assert check_config.main(["embedded_vl", "--sede", "9"]) == 1
    assert check_config.main([str(bad)]) == 1
    assert "train.sede" in capsys.readouterr().err
