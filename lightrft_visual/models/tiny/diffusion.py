"""Tiny but real Stable Diffusion pipelines (1.5 and 3) with freshly drawn weights, of the stock classes."""

from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

TEXT_LENGTH = 5  # tokens of every encoder, as of "a red circle"; pass it as the pipeline's max_sequence_length
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# One token each; other words are spelled by letters.
WORDS = ("a", "black", "blue", "circle", "cross", "green", "purple", "red", "square", "triangle", "yellow")


@dataclass(frozen=True)
class TinyPipelineSettings:
    """What every tiny pipeline says about its images, autoencoder and text encoders."""

    picture_size: int = 32  # pixels
    latent_channels: int = 8
    vae_channels: tuple[int, ...] = (12, 16, 32)
    text_width: int = 32
    seed: int = 0


@dataclass(frozen=True)
class TinyDiffusionSettings(TinyPipelineSettings):
    """The tiny SD3."""

    head_dim: int = 32
    heads: int = 3
    layers: int = 4
    patch_size: int = 2
    shift: float = 1.0


def build_clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows the words of `WORDS` as one token each.

    The merges are written out one by one: a BPE trainer breaks ties differently in every process.
    """
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in LETTERS:
        vocabulary |= {letter: len(vocabulary), f"{letter}</w>": len(vocabulary) + 1}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for merge in merges:
            pieces = apply_merge(pieces, merge)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = apply_merge(pieces, merges[-1])
            vocabulary[pieces[0]] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH)


def apply_merge(pieces: list[str], merge: tuple[str, str]) -> list[str]:
    """The pieces with every neighbouring pair equal to `merge` joined, from the left."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == merge:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _build_clip_encoder(
    tokenizer: CLIPTokenizer,
    settings: TinyPipelineSettings,
    kind: type[PreTrainedModel] = CLIPTextModelWithProjection,
) -> PreTrainedModel:
    """An encoder as it was drawn, with token embeddings that tell words apart."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=settings.text_width, intermediate_size=2 * settings.text_width,
        projection_dim=settings.text_width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    encoder = kind(config)
    for name, parameter in encoder.named_parameters():
        if "embedding" in name or "text_projection" in name:
            nn.init.normal_(parameter, std=1.0 if "token" in name else 0.3)
    return encoder.eval().requires_grad_(False)


def build_t5_tokenizer() -> T5TokenizerFast:
    """A T5 tokenizer that knows `WORDS` and falls back to letters."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocabulary += [(f"▁{word}", -1.0) for word in WORDS] + [(letter, -8.0) for letter in LETTERS]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=TEXT_LENGTH)


def build_t5_encoder(tokenizer: T5TokenizerFast, settings: TinyDiffusionSettings) -> T5EncoderModel:
    """A T5 encoder of one layer with freshly drawn weights, frozen."""
    width = 2 * settings.text_width
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=width // 2, d_ff=2 * width, num_layers=1, num_heads=2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return T5EncoderModel(config).eval().requires_grad_(False)


def build_vae(settings: TinyPipelineSettings, post_quant: bool = False) -> AutoencoderKL:
    """post_quant: with a 1 x 1 convolution before the decoder, into which a shift of the latents can be folded."""
    channels = settings.vae_channels
    return AutoencoderKL(
        block_out_channels=channels, layers_per_block=1, latent_channels=settings.latent_channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels), up_block_types=("UpDecoderBlock2D",) * len(channels),
        norm_num_groups=4, sample_size=settings.picture_size, mid_block_add_attention=False, use_quant_conv=False,
        use_post_quant_conv=post_quant, scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip


def build_pipeline(settings: TinyDiffusionSettings) -> StableDiffusion3Pipeline:
    """The pipeline with freshly drawn weights (fp32, CPU)."""
    torch.manual_seed(settings.seed)
    tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    vae = build_vae(settings)
    latent_size = settings.picture_size // 2 ** (len(settings.vae_channels) - 1)
    width = settings.heads * settings.head_dim
    transformer = SD3Transformer2DModel(
        sample_size=latent_size, patch_size=settings.patch_size, in_channels=settings.latent_channels,
        out_channels=settings.latent_channels, num_layers=settings.layers, attention_head_dim=settings.head_dim,
        num_attention_heads=settings.heads, joint_attention_dim=2 * settings.text_width, caption_projection_dim=width,
        pooled_projection_dim=2 * settings.text_width, pos_embed_max_size=latent_size, qk_norm="rms_norm",
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=settings.shift),
        text_encoder=_build_clip_encoder(tokenizer, settings), tokenizer=tokenizer,
        text_encoder_2=_build_clip_encoder(tokenizer, settings), tokenizer_2=tokenizer,
        text_encoder_3=build_t5_encoder(t5_tokenizer, settings), tokenizer_3=t5_tokenizer,
    )  # fmt: skip


@dataclass(frozen=True)
class TinySD15Settings(TinyPipelineSettings):
    """The tiny Stable Diffusion 1.5."""

    unet_channels: tuple[int, int] = (64, 64)  # the text is read at the lower resolution only: that is cheaper
    heads: int = 2


def build_sd15_pipeline(settings: TinySD15Settings) -> StableDiffusionPipeline:
    """The pipeline with freshly drawn weights (fp32, CPU)."""
    torch.manual_seed(settings.seed)
    tokenizer, channels = build_clip_tokenizer(), settings.unet_channels
    unet = UNet2DConditionModel(
        sample_size=settings.picture_size // 2 ** (len(settings.vae_channels) - 1),
        in_channels=settings.latent_channels, out_channels=settings.latent_channels, layers_per_block=1,
        block_out_channels=channels, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=settings.text_width,
        attention_head_dim=settings.heads, norm_num_groups=8,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, timestep_spacing="trailing",
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=build_vae(settings, post_quant=True), text_encoder=_build_clip_encoder(tokenizer, settings, CLIPTextModel),
        tokenizer=tokenizer, unet=unet, scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
