"""Wan 2.2 from files in the form of Wan's own code, as ROLL's model_paths names them."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from tiny_wan_parts import write_parts

import lightrft_visual
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.opening import adapter_of, pipeline_class
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.diffusion.wan_parts import BOUNDARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wan22")
    write_parts(place)
    return place


def load(folder: Path, name: str, **settings) -> DiffusionPolicy:
    tokenizer = str(folder / "umt5-xxl") if name.endswith(".json") else None
    return DiffusionPolicy.from_pretrained(str(folder / name), text_length=5, tokenizer=tokenizer, **settings)


@pytest.mark.plugin("memory_plan")
def test_experts_divide_the_steps_where_those_of_the_published_folder_do():
    shapes = Path(lightrft_visual.__file__).parent / "plugins/memory_plan/shapes/Wan2.2-T2V-A14B-Diffusers.json"
    assert BOUNDARY[WanPipeline] == json.loads(shapes.read_text())["boundary_ratio"]


def test_it_is_the_model_of_the_diffusers_folder(folder):
    parts, whole = load(folder, "paths.json"), load(folder, "pipeline")
    for name in ("transformer", "transformer_2", "text_encoder", "vae"):
        here, there = (getattr(each.family.pipeline, name).state_dict() for each in (parts, whole))
        assert here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here), name
    assert parts.family.boundary == whole.family.boundary == 900
    latents, steps = torch.randn(2, 16, 2, 4, 4), torch.tensor([950.0, 300.0])
    conditions = [each.encode_prompts(["a red circle", "a blue cross"]) for each in (parts, whole)]
    first = torch.randn(2, 20, 2, 4, 4)
    with torch.no_grad():
        one, other = (
            each.velocity(latents, steps, known | {"first_frame": first}, 1.0)
            for each, known in zip((parts, whole), conditions)
        )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # kernels round by where in memory weights lie


def test_embeddings_of_the_text_encoder_are_one_weight_that_takes_a_device_once(folder):
    parts, whole = (load(folder, name).family.pipeline.text_encoder for name in ("paths.json", "pipeline"))
    assert len([*parts.parameters()]) == len([*whole.parameters()])


def test_half_precision_keeps_what_diffusers_keeps(folder):
    weights = load(folder, "paths.json", dtype=torch.bfloat16).family.pipeline.transformer.state_dict()
    kept = {key for key, value in weights.items() if value.dtype == torch.float32}
    assert weights["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert "scale_shift_table" in kept and any("time_embedder" in key for key in kept)


def test_lora_by_the_names_of_wans_code(folder):
    lora = LoraSettings(2, 4, ("q", "k", "v", "o", "ffn.0", "ffn.2"))
    policy = load(folder, "paths.json", lora=lora, trainable=("transformer_2",))
    adapted = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert adapted and all("transformer_2" in name for name in adapted)
    assert any("ffn.net.0.proj" in name for name in adapted) and any("to_out.0" in name for name in adapted)


def test_a_mapping_shards_and_relative_paths(folder):
    weights = torch.load(folder / "models_t5_umt5-xxl-enc-bf16.pth", weights_only=True)
    keys = sorted(weights)
    for number, part in enumerate((keys[:5], keys[5:])):
        torch.save({key: weights[key] for key in part}, folder / f"t5_{number}.pth")
    named = {name: name for name in ("low_noise_model", "high_noise_model")}
    named |= {"vae": "Wan2.1_VAE.pth", "text_encoder": ["t5_0.pth", "t5_1.pth"]}
    (folder / "named.json").write_text(json.dumps(named))
    found = load(folder, "named.json").family.pipeline.text_encoder.shared.weight
    assert torch.equal(found, weights["token_embedding.weight"])


PARTS = '["high_noise_model/diffusion_pytorch_model.safetensors", "low_noise_model/diffusion_pytorch_model.safetensors"'


@pytest.mark.parametrize(
    "content,told",
    [
        ('["one.safetensors"]', "high_noise_model, low_noise_model, text_encoder, vae"),
        ('{"dit": 1}', "high_noise_model"),
        ("[1, 2", "cannot be read as JSON"),
        ('["a.safetensors", "b.safetensors", "c.pth", "d.pth"]', "high_noise_model: there is no file"),
        ('["paths.json", "paths.json", "paths.json", "paths.json"]', "cannot be read as weights"),
        (PARTS + ', "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"]', "text_encoder is not Wan's UMT5"),
    ],
)
def test_wrong_files_and_those_in_another_order_are_named(folder, content, told):
    (folder / "wrong.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        load(folder, "wrong.json")


def test_a_missing_tokenizer_is_named_and_the_kind_of_model_is_known_before_it_is_loaded(folder):
    with pytest.raises(ConfigError, match="tokenizer_path: no tokenizer in .*nowhere"):
        DiffusionPolicy.from_pretrained(str(folder / "paths.json"), tokenizer=str(folder / "nowhere"))
    assert pipeline_class(str(folder / "paths.json")) == "WanImageToVideoPipeline"
    assert adapter_of(str(folder / "paths.json")).takes_first_frame
