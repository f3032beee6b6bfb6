"""The names, import paths and signatures that users of other systems know. They must not change."""

import inspect
from dataclasses import fields
from importlib import import_module

import pytest

PATHS = {
    "trainer.replay_buffer_utils": (
        "BufferItem", "BufferItemVL", "BufferItemDiffusion", "is_vl_experience", "split_experience_batch",
        "make_experience_batch", "remove_padding_in_sequences", "zero_pad_sequences",
    ),
    "trainer.replay_buffer": ("NaiveReplayBuffer",),
    "trainer.fast_exp_maker": (
        "FastExperienceMaker", "MultimodalDataProcessor", "RewardComputationEngine", "get_advantage_calculator",
        "Experience", "ExperienceVL",
    ),
    "trainer": ("PPOTrainer", "GRPOTrainer", "RLOOTrainer"),
    "data.prompt_sampling": ("distributed_k_repeat_indices", "KRepeatSample"),
    "data.validation": ("validation_shard_indices",),
    "data.media": ("media_to_video_array",),
    "rollout.diffusion_sampler": ("SamplingConfig", "DiffusionSampler", "SamplingResult"),
}  # fmt: skip
PUBLIC = (
    "GRPOTrainer", "RLOOTrainer", "PPOTrainer", "FlowGRPOTrainer", "DiffusionNFTTrainer", "DDPOTrainer",
    "RewardFLTrainer", "DiffusionDPOTrainer", "UnifiedTrainer", "SFTTrainer", "FastExperienceMaker",
    "RewardComputationEngine", "NaiveReplayBuffer", "BufferItem", "BufferItemVL", "BufferItemDiffusion", "evaluate",
    "sample", "StepHook",
)  # fmt: skip
SIGNATURES = {
    ("trainer.fast_exp_maker", "FastExperienceMaker"): (
        "actor", "critic", "reward_model", "initial_model", "tokenizer", "prompt_max_len", "kl_controller", "strategy",
        "remote_rm_url", "reward_fn", "reward_fn_label_map", "reward_recipe", "packing_samples", "processor",
    ),
    ("trainer.fast_exp_maker", "FastExperienceMaker.make_experience_list"): (
        "self", "all_prompts", "all_images", "all_videos", "all_references", "all_labels", "generate_kwargs",
    ),
    ("trainer.fast_exp_maker", "FastExperienceMaker.get_advantages_and_returns"): (
        "self", "values", "rewards", "action_mask", "gamma", "lambd",
    ),
    ("trainer.fast_exp_maker", "MultimodalDataProcessor"): ("tokenizer", "processor", "prompt_max_len"),
    ("trainer.fast_exp_maker", "MultimodalDataProcessor.process_multimodal_batch"): (
        "self", "all_prompts", "all_images", "all_references", "images_num", "n_samples_per_prompt", "all_videos",
        "videos_num",
    ),
    ("trainer.fast_exp_maker", "RewardComputationEngine"): (
        "reward_model", "remote_rm_url", "custom_reward_func", "reward_fn", "reward_fn_label_map", "reward_recipe",
        "tokenizer", "strategy", "packing_samples",
    ),
    ("trainer.fast_exp_maker", "RewardComputationEngine.compute_rewards"): ("self", "outputs", "vlm_mode", "device"),
    ("trainer.fast_exp_maker", "get_advantage_calculator"): ("name", "config"),
    ("trainer.replay_buffer", "NaiveReplayBuffer"): ("sample_batch_size", "limit", "cpu_offload", "packing_samples"),
    ("trainer.replay_buffer_utils", "make_experience_batch"): ("items", "packing_samples"),
    ("trainer.replay_buffer_utils", "zero_pad_sequences"): ("sequences", "side"),
    ("data.prompt_sampling", "distributed_k_repeat_indices"): (
        "dataset_length", "batch_size", "repeats_per_prompt", "world_size", "rank", "seed",
    ),
    ("data.validation", "validation_shard_indices"): ("num_prompts", "rank", "world_size"),
    ("rollout.diffusion_sampler", "DiffusionSampler.sample"): ("self", "model", "batch", "generator"),
    **{("api", name): (
        "model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class", "callbacks", "environment",
        "tools",
    ) for name in PUBLIC if name.endswith("Trainer") and name != "SFTTrainer"},
}  # fmt: skip
ITEM = (
    "sequences", "action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "attention_mask",
    "action_mask", "info", "action_entropy",
)  # fmt: skip
ITEM_VL = (
    "sequences", "pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images",
    *ITEM[1:],
)  # fmt: skip


def found(path: str, name: str):
    value = import_module(f"lightrft_visual.{path}")
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", PATHS)
def test_names_are_where_their_users_look(path):
    for name in PATHS[path]:
        assert found(path, name) is not None


@pytest.mark.parametrize("path,name", SIGNATURES)
def test_arguments_keep_their_names_and_their_order(path, name):
    arguments = [each for each in inspect.signature(found(path, name)).parameters]
    wanted = SIGNATURES[path, name]
    assert tuple(arguments[: len(wanted)]) == wanted


def test_public_names_stand_at_the_top_and_trainers_are_one():
    import lightrft_visual
    from lightrft_visual import trainer

    for name in PUBLIC:
        assert name in lightrft_visual.__all__
    assert all(getattr(lightrft_visual, name).__doc__ for name in lightrft_visual.__all__)
    assert trainer.GRPOTrainer is lightrft_visual.GRPOTrainer


def test_items_can_be_built_by_position():
    utilities = import_module("lightrft_visual.trainer.replay_buffer_utils")
    for cls, wanted in ((utilities.BufferItem, ITEM), (utilities.BufferItemVL, ITEM_VL)):
        assert tuple(each.name for each in fields(cls) if each.init)[: len(wanted)] == wanted
