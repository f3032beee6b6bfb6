"""Shapes that are shipped have the published numbers of weights; folders have their own."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from moe import KIND
from stock_families import PLAIN, STOCK
from torch import nn
from transformers import AutoModelForImageTextToText

from lightrft_visual.config.algorithm import DiffusionAlgorithmConfig
from lightrft_visual.config.diffusion import DiffusionModelConfig, DiffusionRunConfig
from lightrft_visual.config.vl import ModelConfig, RolloutConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.memory_plan.meta import on_meta
from lightrft_visual.plugins.memory_plan.pipelines import pipeline_policy
from lightrft_visual.plugins.memory_plan.shapes import find_shipped, language_model, shipped
from lightrft_visual.plugins.memory_plan.vl_shape import MicroBatch, VLShape

# Of the checkpoints' own index files.
LANGUAGE = {
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Thinking": 8_767_123_696,
}
# Billions, as the models' papers and cards have them: denoisers, text encoders.
DRAWING = {
    "stabilityai/stable-diffusion-3.5-medium": (2.24, 5.58),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1.42, 5.68),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (2 * 14.29, 5.68),
    "nvidia/Cosmos-Predict2-2B-Text2Image": (1.96, 4.87),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_language_model_has_its_published_weights(name: str) -> None:
    config = language_model(ModelConfig(pretrain=name))
    model = on_meta(lambda: AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16))
    assert sum(parameter.numel() for parameter in model.parameters()) == LANGUAGE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWING)
def test_a_pipeline_has_its_published_weights(name: str) -> None:
    policy = pipeline_policy(DiffusionRunConfig(model=DiffusionModelConfig(pretrain=name, lora_rank=0, bf16=True)))
    parts = policy.family.pipeline.components
    encoders = [part for key, part in parts.items() if key.startswith("text_encoder") and isinstance(part, nn.Module)]
    found = [
        sum(p.numel() for p in policy.parameters()),
        sum(p.numel() for part in encoders for p in part.parameters()),
    ]
    assert [count / 1e9 for count in found] == pytest.approx(DRAWING[name], rel=0.01)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_adapters_have_the_precision_of_the_run() -> None:
    """In fp32 each would keep a copy of its input in fp32, which no run does: DeepSpeed casts them."""
    drawing = DiffusionModelConfig(pretrain="stabilityai/stable-diffusion-3.5-medium", lora_rank=3, bf16=True)
    seeing = ModelConfig(pretrain="Qwen/Qwen2-VL-2B-Instruct", lora_rank=3, bf16=True)
    shape = VLShape(RunConfig(model=seeing), language_model(seeing))
    for module in (pipeline_policy(DiffusionRunConfig(model=drawing)), shape.trained):
        found = {each.dtype for each in module.parameters() if each.requires_grad}
        assert found == {torch.bfloat16}


def test_every_shipped_shape_says_what_it_is() -> None:
    for file in shipped().values():
        shape = json.loads(file.read_text())
        assert ("model_type" in shape) != ("_class_name" in shape), file.name


def test_names_are_those_of_the_hub_in_any_case() -> None:
    assert find_shipped("qwen/qwen2.5-vl-7b-instruct") == find_shipped("Qwen2.5-VL-7B")
    assert find_shipped("someone/unheard-of") is None
    assert language_model(ModelConfig(pretrain="someone/unheard-of")) is None


def test_a_folder_needs_its_configuration_alone(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2.5-VL-3B-Instruct"
    language_model(ModelConfig(pretrain="Qwen/Qwen2.5-VL-7B-Instruct")).save_pretrained(folder)
    assert language_model(ModelConfig(pretrain=str(folder))).text_config.hidden_size == 3584  # not by the folder's name
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be planned"):
        language_model(ModelConfig(pretrain=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no config.json"):
        language_model(ModelConfig(pretrain=str(folder)))


def test_a_pipeline_folder_needs_its_configurations_alone(tmp_path: Path) -> None:
    shape = find_shipped("stable-diffusion-v1-5")
    for name, (*entry, config) in [(name, entry) for name, entry in shape.items() if isinstance(entry, list)]:
        shape[name] = entry
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps(shape))
    model, algorithm = DiffusionModelConfig(pretrain=str(tmp_path), lora_rank=0), DiffusionAlgorithmConfig("ddpo")
    config = DiffusionRunConfig(model=model, algorithm=algorithm)
    assert sum(p.numel() for p in pipeline_policy(config).parameters()) == pytest.approx(859.5e6, rel=1e-3)
    (tmp_path / "unet" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"unet.config\.json"):
        pipeline_policy(config)


def test_a_model_of_a_hub_that_does_not_answer_is_asked_for_once_and_not_planned(monkeypatch):
    asked = []

    def none(name, **named):
        asked.append(named["allow_patterns"])
        raise LocalEntryNotFoundError("no such snapshot")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", none)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **named: asked.append(named))
    assert language_model(ModelConfig(pretrain="org/none"), online=True) is None and asked == [["config.json"]]


BATCH = MicroBatch(rows=2, length=128, actions=16, prompts=2)


def shape_of(experts: int, active: int, bf16: bool = False) -> VLShape:
    config, _, _ = STOCK[KIND]()
    config.text_config.num_experts, config.text_config.num_experts_per_tok = experts, active
    return VLShape(RunConfig(model=ModelConfig(bf16=bf16)), config)


def test_weights_are_those_of_all_experts():
    few, many = shape_of(8, 2), shape_of(24, 2)
    each = 3 * 64 * 48 + 64  # gate, up and down, and a row of the router, in each of two layers
    assert many.base - few.base == 2 * 16 * each


def test_activations_are_those_of_the_active_experts():
    width, tokens, layers = 2, 256, 2
    kept = {(experts, active): shape_of(experts, active, bf16=True)._decoded(BATCH, backward=True).kept
            for experts, active in ((8, 2), (8, 4), (24, 2))}  # fmt: skip
    one = tokens * width * (64 + 4 * 48)  # what a token's way through an expert keeps at least: input, gate, up, both
    assert kept[8, 4] - kept[8, 2] >= 2 * layers * one
    assert kept[24, 2] - kept[8, 2] <= layers * tokens * 16 * 16  # scores of the routers alone


@pytest.mark.parametrize("kind", ["kimi_k25", "qwen3_vl_moe"])
def test_experts_hold_what_they_do_whatever_class_is_around_them(kind: str) -> None:
    """In float32 too, where grouped products do not run on meta tensors."""
    shape = VLShape(RunConfig(model=ModelConfig(bf16=False)), STOCK[kind]()[0])
    assert shape.whole.get_decoder().config._experts_implementation == "active"
    assert shape._decoded(BATCH, backward=True).kept > 0


@pytest.mark.parametrize(
    ("kind", "side"), [("lfm2_vl", 2), ("video_llama_3", 1), ("mistral3", 2), ("pixtral", 1), ("qwen2_5_vl", 2)]
)
def test_images_of_any_size_have_as_many_patches_as_their_tokens_merge(kind: str, side: int) -> None:
    shape = VLShape(RunConfig(), (STOCK | PLAIN)[kind]()[0])
    longest = shape.config.rollout.prompt_max_len
    assert shape.media_bytes()[:2] == (longest, longest * side**2)


@pytest.mark.parametrize(("kind", "videos", "tokens"), [("qwen2_5_vl", 1, 1024), ("qwen2_5_vl", 0, 8), ("glm4v", 1, 8)])
def test_pixels_of_an_image_bound_no_video(kind: str, videos: int, tokens: int) -> None:
    """Two images of two by two tokens, and a video of any number of frames where prompts may hold one."""
    rollout = RolloutConfig(prompt_max_len=1024, limit_mm_image_per_prompt=2, limit_mm_video_per_prompt=videos)
    shape = VLShape(RunConfig(rollout=rollout), STOCK[kind]()[0])
    shape.config.data.max_pixels = (4 * shape.patch_side) ** 2
    assert shape.media_bytes()[0] == tokens


def test_scores_of_eager_attention_are_kept() -> None:
    batch, kept = MicroBatch(rows=2, length=512, actions=16, prompts=2), []
    for attention in ("auto", "eager"):
        config = RunConfig(model=ModelConfig(attn_implementation=attention, gradient_checkpointing="none"))
        kept.append(VLShape(config, STOCK["qwen2_5_vl"]()[0])._decoded(batch, backward=True).kept)
    text = STOCK["qwen2_5_vl"]()[0].get_text_config()
    assert kept[1] - kept[0] > 0.9 * text.num_hidden_layers * text.num_attention_heads * 2 * 512**2 * 4
