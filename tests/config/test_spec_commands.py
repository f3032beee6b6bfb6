"""Commands of other systems, as their users type them, the script's name aside."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run, resolved_yaml
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError

VRL = "--config experiment/diffusion/sd3_5/online_grpo_ocr "
RAY = {
    "/base/distributed=ray_rollout distributed.resources.trainer.num_gpus=1 "
    "distributed.resources.rollout.num_gpus=auto": "split",
    "/base/distributed=ray_rollout_colocated_single_gpu": "colocated",
    "/base/distributed=ray_rollout_cross_node distributed.resources.rollout.num_gpus=1 "
    "distributed.resources.rollout.num_workers=1": "split",
    "distributed.resources.visible_devices='[0,1,2,3]' distributed.resources.trainer.devices='[0]' "
    "distributed.resources.rollout.devices='[1,2,3]'": "split",
}
REWARD_FL = """
learning_rate: 2.5e-6
lr_scheduler_type: constant
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
warmup_steps: 10
weight_decay: 0.01
num_train_epochs: 1

model_name: "wan2_2"

# wan2_2 related
model_paths: FOLDER/paths.json
reward_model_path: FOLDER/antelopev2/
tokenizer_path: FOLDER/umt5-xxl/
model_id_with_origin_paths: null
trainable_models: dit2
use_gradient_checkpointing_offload: true
extra_inputs: input_image
max_timestep_boundary: 1.0
min_timestep_boundary: 0.9
num_inference_steps: 8
"""


def dry_run(line: str, algorithm: str = "flow_grpo") -> dict:
    """What the script prints for the line and `--dry_run`, but for the plan of memory, which takes seconds."""
    defaults = {"diffusion_algorithm": algorithm}
    argv = [*shlex.split(line), "--dry_run"]
    run = parse_run(DiffusionRunConfig, argv, preset=DIFFUSION_PRESET, defaults=defaults)
    assert run.dry_run
    return yaml.safe_load(resolved_yaml(run.config))


class TestVRL:
    def test_settings_reach_their_sections(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.txt").write_text("a cat\n")
        found = dry_run(
            f"{VRL} reward.components.ocr=0.0 reward.components.aesthetic=1.0 "
            "reward.kwargs.aesthetic.model_name=openai/clip-vit-large-patch14 "
            f"data.manifest={tmp_path}/prompts.txt data.eval_manifest={tmp_path}/prompts.txt "
            f"trainer.output_dir={tmp_path} trainer.resume_from={tmp_path}/checkpoint-60 "
            "eval.num_steps=40 eval.max_prompts=16 eval.seed=20260504 eval.use_ema=true "
            "rollout.n=8 rollout.rollout_batch_size=8 rollout.sample_batch_size=8 actor.gradient_accumulation_steps=4",
        )
        assert found["reward"]["components"] == {"ocr": 0.0, "aesthetic": 1.0}
        assert found["reward"]["kwargs"] == {"aesthetic": {"model_name": "openai/clip-vit-large-patch14"}}
        data, output, sampling, train = (found[section] for section in ("data", "output", "sampling", "train"))
        assert data["prompt_data"] == data["eval_data"] == f"{tmp_path}/prompts.txt" and data["max_eval_samples"] == 16
        assert (output["output_dir"], output["resume_from"]) == (str(tmp_path), f"{tmp_path}/checkpoint-60")
        assert (output["eval_seed"], output["eval_ema"], sampling["eval_num_steps"]) == (20260504, True, 40)
        sizes = ("n_samples_per_prompt", "rollout_batch_size", "micro_rollout_batch_size")
        assert [sampling[name] for name in sizes] == [8, 8, 8]
        assert (train["groups_per_update"], train["train_batch_size"]) == (4, 32)  # of 64 samples: two updates

    @pytest.mark.parametrize(("line", "placement"), RAY.items())
    def test_ray_placement(self, line: str, placement: str) -> None:
        config = parse_run(DiffusionRunConfig, shlex.split(VRL + line), preset=DIFFUSION_PRESET).config
        assert config.distributed.placement == placement
        resources = config.distributed.resources
        if "devices" in line:
            assert (resources.visible_devices, resources.trainer_devices) == ([0, 1, 2, 3], [0])
            assert resources.rollout_devices == [1, 2, 3]
        assert resources.rollout_num_gpus == ("1" if "rollout.num_gpus=1" in line else "auto")
        assert resources.trainer_num_gpus == (1 if "trainer.num_gpus=1" in line else None)
        assert resources.require_cluster == ("cross_node" in line)

    @pytest.mark.parametrize(
        ("distributed", "told"),
        [
            ("resources: {rollout: {devices: [1], num_gpus: 2}}", "num_gpus is 2, but rollout_devices names 1"),
            ("{placement: colocated, resources: {rollout: {devices: [1]}}}", "belongs to --placement split"),
            (
                "resources: {rollout: {num_workers: 2}, require_cluster: true}",
                "rollout_num_workers, require_cluster: of rollout workers, add --placement",
            ),
        ],
    )
    def test_ray_placement_in_a_recipe(self, distributed: str, told: str, tmp_path: Path) -> None:
        recipe = tmp_path / "mine.yaml"
        recipe.write_text("defaults:\n  - /base/distributed: ray_rollout\n")
        arguments = ["--config", str(recipe)]
        assert parse_run(DiffusionRunConfig, arguments, preset=DIFFUSION_PRESET).config.distributed.split
        recipe.write_text(f"distributed:\n  {distributed}\n")
        with pytest.raises(ConfigError, match=told):
            parse_run(DiffusionRunConfig, arguments, preset=DIFFUSION_PRESET)


class TestRewardFL:
    @pytest.fixture
    def block(self, tmp_path: Path) -> str:
        (tmp_path / "antelopev2").mkdir()
        parts = ("high_noise_model/a.safetensors", "low_noise_model/b.safetensors", "t5.pth", "vae.pth")
        (tmp_path / "paths.json").write_text(json.dumps([str(tmp_path / part) for part in parts]))
        return REWARD_FL.replace("FOLDER", str(tmp_path))

    def check(self, found: dict, folder: Path) -> None:
        train, model, algorithm = found["train"], found["model"], found["algorithm"]
        assert train["learning_rate"] == 2.5e-6 and train["lr_scheduler_type"] == "constant"
        assert train["warmup_steps"] == 10 and train["l2"] == 0.01 and train["max_epochs"] == 1
        assert (train["micro_train_batch_size"], train["train_batch_size"]) == (1, 1)
        assert found["sampling"]["num_steps"] == 8 and found["sampling"]["n_samples_per_prompt"] == 1
        assert model["family"] == "wan_i2v" and model["pretrain"] == f"{folder}/paths.json"
        assert model["tokenizer_path"] == f"{folder}/umt5-xxl/" and model["trainable_models"] == "dit2"
        assert model["use_gradient_checkpointing_offload"] and model["gradient_checkpointing"]
        assert found["data"]["image_key"] == "input_image"
        assert (algorithm["min_timestep_boundary"], algorithm["max_timestep_boundary"]) == (0.9, 1.0)
        assert algorithm["diffusion_algorithm"] == "reward_fl"
        assert algorithm["differentiable_reward"] == "face_similarity"
        assert algorithm["differentiable_kwargs"] == {"embedder": f"{folder}/antelopev2/"}

    def test_its_block_as_a_file_and_as_flags(self, block: str, tmp_path: Path) -> None:
        (tmp_path / "reward_fl.yaml").write_text(block)
        flags = " ".join(f"--{key} {value}" for key, value in yaml.safe_load(block).items())
        for line in (f"--config {tmp_path}/reward_fl.yaml", flags):
            self.check(dry_run(line, "reward_fl"), tmp_path)

    def test_an_update_is_what_all_ranks_accumulate(self, block: str, tmp_path: Path, monkeypatch) -> None:
        launched = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "reward_fl.yaml").write_text(block)
        found = dry_run(f"--config {tmp_path}/reward_fl.yaml --gradient_accumulation_steps 2", "reward_fl")
        assert found["train"]["train_batch_size"] == 4

    @pytest.mark.parametrize(
        "setting,told",
        [
            ("model_name=flux", "--pretrain"),
            ("extra_inputs=end_image", "input_image"),
            ("model_id_with_origin_paths=Wan-AI/Wan2.1:*.pth", "--model_paths"),
        ],
    )
    def test_values_that_mean_nothing_here(self, setting: str, told: str) -> None:
        with pytest.raises(ConfigError, match=rf"{told}.*\(command line\)"):
            parse_run(DiffusionRunConfig, [setting])


class TestFastVideo:
    def test_schedule(self) -> None:
        found = dry_run(
            "--diffusion_algorithm diffusion_nft --scheduler flow_match_euler --trajectory sde_reflow "
            "--flow_shift inherit --num_steps 25 --num_video_per_prompt 24 --num_inner_epochs 1 --kl_beta 0.0001 "
            "--decay_type 1 --adv_mode all --adv_clip_max 5 --timestep_fraction 0.99",
        )
        assert found["sampling"]["flow_shift"] is None and found["sampling"]["trajectory"] == "sde_reflow"
        assert found["algorithm"]["nft_kl_beta"] == 1e-4


class TestSizesOfUpdates:
    """Settings that say the same thing: the one written last counts."""

    @pytest.mark.parametrize(
        "line,expected",
        [
            ("groups_per_update=2 train_batch_size=4", (4, None, None)),
            ("train_batch_size=4 groups_per_update=2", (8, 2, None)),
            ("groups_per_update=2 groups_per_update=null", (96, None, None)),
            ("train_batch_size=4 actor.gradient_accumulation_steps=2", (8, 2, None)),
        ],
    )
    def test_the_last_one_counts_and_what_is_written_down_loads_to_the_same(
        self, line: str, expected: tuple, tmp_path: Path
    ) -> None:
        argv = ["rollout.n=4", "rollout_batch_size=48", "micro_train_batch_size=8", *line.split()]
        config = parse_run(DiffusionRunConfig, argv, preset=None).config
        train = config.train
        assert (train.train_batch_size, train.groups_per_update, train.gradient_accumulation_steps) == expected
        (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
        again = parse_run(DiffusionRunConfig, ["--config", str(tmp_path / "resolved.yaml")], preset=None).config
        assert again == config

    def test_of_a_vision_language_run(self) -> None:
        argv = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8"]
        train = parse_run(RunConfig, argv, preset=None).config.train
        assert (train.micro_train_batch_size, train.train_batch_size) == (4, 32)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_hydras_plus_before_a_setting_of_verl_is_read(plus: str) -> None:
    argv = ["--reward_fn", "a.py:f", f"{plus}data.apply_chat_template_kwargs.enable_thinking=False", f"{plus}seed=3"]
    config = parse_run(RunConfig, argv).config
    assert config.data.chat_template_kwargs == {"enable_thinking": False} and config.train.seed == 3
