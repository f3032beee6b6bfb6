"""Denoisers whose tokens lie on several ranks: velocities, losses and gradients of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_families
from launched import run_ranks

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.context_parallel import ContextParallel
from lightrft_visual.models.diffusion.policy import family_of
from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

# Joint texts, masked texts with LoRA, two experts of videos, a plan of our own. `context_ranks.py` takes all families
# that have a plan: flux_kontext, flux2, flux2_klein, qwen_image_edit, qwen_image_edit_plus, wan_i2v, ltx23 are as near.
KINDS = ("sd3", "flux", "qwen_image", "wan_two_experts", "ltx2")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("ranks") / "out.json"
    run_ranks("context_ranks.py", ",".join(KINDS), str(out), ranks=4, folder=Path(__file__).parent)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_velocities_losses_and_gradients_are_those_of_one_rank(found, kind):
    differences = found["differences"][kind]
    assert {"2 ranks", "4 ranks"} < differences.keys() and max(differences.values()) <= 1e-5, differences


@pytest.mark.parametrize("kind", KINDS)
def test_joined_again_a_rank_computes_the_same_bits_as_before(found, kind):
    assert found["differences"][kind]["joined again"] == 0


def test_tokens_that_do_not_divide_are_refused_with_numbers_that_do(found):
    assert "does not divide the 121 tokens at FluxTransformer2DModel; such as 120 or 122" in found["refused"]["image"]
    assert "does not divide the 3 tokens at FluxTransformer2DModel; such as 2 or 4" in found["refused"]["text"]


@pytest.mark.parametrize(
    "kind,text",
    [
        ("sd15", "no plan that divides the tokens of UNet2DConditionModel"),
        ("z_image", "no plan that divides the tokens of ZImageTransformer2DModel"),
        ("qwen_image21", "no plan that divides the tokens of QwenImage21Transformer2DModel"),
        ("hunyuan_video15", "no plan that divides the tokens of HunyuanVideo15Transformer3DModel"),
        ("cosmos", "no plan that divides the tokens of CosmosTransformer3DModel"),
        ("sd3", "sp_size 2 does not divide the 3 attention heads of SD3Transformer2DModel"),
    ],
)
def test_a_denoiser_that_cannot_be_divided_is_refused(kind, text):
    with pytest.raises(ConfigError, match=text):
        ContextParallel(family_of(tiny_families.FAMILIES[kind]()), 2)


def test_attention_that_sees_the_tokens_of_one_rank_alone_is_refused():
    family = family_of(build_pipeline(TinyDiffusionSettings(layers=1, heads=2)))
    family.pipeline.transformer.transformer_blocks[0].attn.processor = object()
    with pytest.raises(ConfigError, match="attention of SD3Transformer2DModel sees the tokens of one rank"):
        ContextParallel(family, 2)
