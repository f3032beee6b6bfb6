"""Denoisers whose tokens lie on several ranks: velocities, losses and gradients of one rank."""

import pytest
import tiny_families
import torch
from forked import on_ranks

from lightrft_visual.config.diffusion import DistributedConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.context_parallel import ContextParallel
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy

T = torch.Tensor
HEADS, SAMPLES, SIDE = 4, 4, 48
# Pixels and frames; a token of Qwen-Image takes 16 by 16.
SIZES = {"qwen_image": (64, SIDE, 1), "wan_two_experts": (SIDE, SIDE, 13), "ltx2": (64, 64, 17)}
TEXT_LENGTHS = {"sd3": 3, "flux": 4, "ltx2": 16}  # SD3's texts are of 5 tokens of CLIP and these of T5


def pipeline_of(kind: str):
    if kind == "sd3":
        return build_pipeline(TinyDiffusionSettings(heads=HEADS, head_dim=8, layers=2, picture_size=SIDE))
    torch.manual_seed(0)
    pipeline = tiny_families.FAMILIES[kind]()
    for name in ("transformer", "transformer_2"):
        if (old := pipeline.components.get(name)) is not None:
            torch.manual_seed(len(name))
            new = type(old).from_config(dict(old.config) | {"num_attention_heads": HEADS})
            pipeline.register_modules(**{name: new})
    return pipeline


def policy_of(kind: str) -> DiffusionPolicy:
    lora = LoraSettings(rank=3) if kind == "qwen_image" else None
    policy = DiffusionPolicy(family_of(pipeline_of(kind), TEXT_LENGTHS.get(kind, 5)), lora)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.trainable_parameters():  # LoRA's begin as zeros
            weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return policy


def inputs_of(kind: str, policy: DiffusionPolicy) -> tuple[T, T, dict[str, T]]:
    """Latents, timesteps on both sides of two experts' boundary, conditions."""
    shape = policy.latent_shape(*SIZES.get(kind, (SIDE, SIDE, 1)))
    latents = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))
    texts = ["a red circle", "a blue cross"] * (SAMPLES // 2)
    conditions = policy.encode_prompts(texts, "blue" if policy.family.uses_negative else None)
    return latents, torch.tensor([950.0, 900.0, 400.0, 100.0]), conditions


def result(policy: DiffusionPolicy, inputs: tuple[T, T, dict[str, T]], own: slice) -> dict[str, T]:
    """Velocities, loss and gradients of some samples, each of whose numbers is weighed differently."""
    latents, timesteps, conditions = inputs
    weights = torch.randn(latents.shape, generator=torch.Generator().manual_seed(3))[own]
    policy.zero_grad(set_to_none=True)
    velocity = policy.velocity(latents[own], timesteps[own], {k: v[own] for k, v in conditions.items()}, 3.0)
    loss = (velocity * weights).mean() * len(weights)
    loss.backward()
    named = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}
    return {"velocity": velocity.detach(), "loss": loss.detach(), **gradients}


def difference(whole: dict[str, T], parts: dict[str, T], own: slice, size: int) -> float:
    """Largest of velocities, of the loss, and of gradients, summed over ranks as an optimizer step does."""
    found = [(parts.pop("velocity") - whole["velocity"][own]).abs().max()]
    parts["loss"] = parts["loss"] / size  # each member of a group has it whole
    for name, each in parts.items():
        wanted = whole[name]
        found.append((collectives.all_reduce_sum(each) - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))
    return collectives.all_reduce_max(torch.stack(found).max()).item()


def cases(kind: str):
    """Groups of 4 ranks compute activations but attention again in their backward."""
    policy = policy_of(kind)
    inputs = inputs_of(kind, policy)
    whole = result(policy, inputs, slice(None))
    for size in (2, 4):
        count = SAMPLES * size // collectives.world_size()
        own = slice(collectives.rank() // size * count, (collectives.rank() // size + 1) * count)
        parallel = ContextParallel(policy.family, size)
        parallel.divide()
        yield f"{size} ranks", difference(whole, result(policy, inputs, own), own, size)
        parallel.join()
        if size == 2:
            again = result(policy, inputs, slice(None))
            yield "joined again", max((again[name] - each).abs().max().item() for name, each in whole.items())
            policy.enable_gradient_checkpointing(how="attention")


def refused() -> dict[str, str]:
    """What is said of tokens that the ranks do not divide, by the forward that has them."""
    found = {}
    for name, side, length in (("image", 44, 4), ("text", SIDE, 3)):
        policy = policy_of("flux")
        policy.family.text_length = length
        parallel = ContextParallel(policy.family, 2)
        parallel.divide()
        try:
            latents = torch.zeros(1, *policy.latent_shape(side, side))
            policy.velocity(latents, torch.tensor([500.0]), policy.encode_prompts(["a red circle"]), 1.0)
        except ConfigError as error:
            found[name] = str(error)
    return found


def divided(kinds: tuple[str, ...]) -> dict[str, dict]:
    """Tiny denoisers over groups of 2 and 4 ranks, beside one rank that has all tokens."""
    DeepspeedStrategy(DistributedConfig()).setup_distributed()
    return {"differences": {kind: dict(cases(kind)) for kind in kinds}, "refused": refused()}


# Joint texts, masked texts with LoRA, two experts of videos, a plan of our own.
KINDS = ("sd3", "qwen_image", "wan_two_experts", "ltx2")


@pytest.fixture(scope="module")
def found() -> dict:
    return on_ranks(divided, KINDS, ranks=4)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_velocities_losses_and_gradients_are_those_of_one_rank_and_joined_again_the_same_bits(found, kind):
    differences = found["differences"][kind]
    assert {"2 ranks", "4 ranks"} < differences.keys() and max(differences.values()) <= 1e-5, differences
    assert differences["joined again"] == 0


def test_tokens_that_do_not_divide_are_refused_with_numbers_that_do(found):
    assert "does not divide the 121 tokens at FluxTransformer2DModel; such as 120 or 122" in found["refused"]["image"]
    assert "does not divide the 3 tokens at FluxTransformer2DModel; such as 2 or 4" in found["refused"]["text"]


@pytest.mark.parametrize(
    "kind,text",
    [
        ("sd15", "no plan that divides the tokens of UNet2DConditionModel"),
        ("z_image", "no plan that divides the tokens of ZImageTransformer2DModel"),
        ("sd3", "sp_size 2 does not divide the 3 attention heads of SD3Transformer2DModel"),
        ("flux", "attention of FluxTransformer2DModel sees the tokens of one rank"),
    ],
)
def test_a_denoiser_that_cannot_be_divided_is_refused(kind, text):
    family = family_of(tiny_families.FAMILIES[kind]())
    if kind == "flux":
        family.pipeline.transformer.transformer_blocks[0].attn.processor = object()
    with pytest.raises(ConfigError, match=text):
        ContextParallel(family, 2)
