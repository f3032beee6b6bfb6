"""Untrained pipelines of every family, a few thousand weights each, built from their configs."""

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from lightrft_visual.experience.diffusion_sampling import DiffusionBatch, SamplingConfig
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy
from lightrft_visual.models.tiny.diffusion import (
    TEXT_LENGTH,
    TinyDiffusionSettings,
    build_clip_tokenizer,
    build_pipeline,
    build_t5_tokenizer,
)  # fmt: skip
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer, tiny_config
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler

WIDTH = 32


SMALL = {"num_layers": 1, "num_attention_heads": 2}
HALF_WIDTH = SMALL | {"attention_head_dim": 16}
KL = {
    "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "mid_block_add_attention": False,
}  # fmt: skip


def euler(**settings):
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def tokenizer_of(family):
    return build_tokenizer(["a red circle", "a blue cross on a green square"], family=family)


def language_model(family, layers=1):
    """Its tokenizer and configuration."""
    tokenizer = tokenizer_of(family)
    return tokenizer, tiny_config(family, tokenizer, tie_embeddings=False, hidden=WIDTH, layers=layers)


def clip_encoder(tokenizer):
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=WIDTH,
            num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def t5_encoder(tokenizer, config=transformers.T5Config, model=transformers.T5EncoderModel):
    return model(config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=2))


def picture_vae(channels=4):
    return diffusers.AutoencoderKL(latent_channels=channels, shift_factor=0.1, scaling_factor=0.5, **KL)


def video_vae(kind=diffusers.AutoencoderKLWan):
    return kind(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])


def sd3():
    return build_pipeline(TinyDiffusionSettings(layers=1))


def sd3_policy(lora=None, layers=1):
    return DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings(layers=layers)), TEXT_LENGTH), lora)


def sd15():
    tokenizer = build_clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH, norm_num_groups=4, attention_head_dim=2,
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    return diffusers.StableDiffusionPipeline(
        vae=picture_vae(), text_encoder=clip_encoder(tokenizer), tokenizer=tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def flux():
    tokenizer, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_single_layers=1, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        guidance_embeds=True, axes_dims_rope=(4, 6, 6), **HALF_WIDTH,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        scheduler=euler(use_dynamic_shifting=True, shift=3.0), vae=picture_vae(),
        text_encoder=clip_encoder(tokenizer), tokenizer=tokenizer, text_encoder_2=t5_encoder(t5), tokenizer_2=t5,
        transformer=transformer,
    )  # fmt: skip


def flux_kontext():
    return diffusers.FluxKontextPipeline(**{k: v for k, v in flux().components.items() if v is not None})


def wan_transformer(in_channels=16):
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), attention_head_dim=12, in_channels=in_channels, out_channels=16, text_dim=WIDTH,
        freq_dim=16, ffn_dim=WIDTH, rope_max_seq_len=32, **SMALL,
    )  # fmt: skip


def wan(kind=diffusers.WanPipeline, channels=16, shift=3.0, **more):
    t5 = build_t5_tokenizer()
    return kind(
        tokenizer=t5, text_encoder=t5_encoder(t5, transformers.UMT5Config, transformers.UMT5EncoderModel),
        vae=video_vae(), scheduler=euler(shift=shift), transformer=wan_transformer(channels), **more,
    )  # fmt: skip


def wan_two_experts():
    """Text-to-video as Wan 2.2 has it: one transformer from timestep 600 up, another below."""
    return wan(transformer_2=wan_transformer(), boundary_ratio=0.6)


def wan_i2v():
    experts = {"transformer_2": wan_transformer(36), "boundary_ratio": 0.9}
    return wan(diffusers.WanImageToVideoPipeline, 36, 5.0, **experts)


def hunyuan_video15():
    """The system message takes nearly 400 tokens here."""
    tokenizer, byt5 = tokenizer_of("qwen2_5_vl"), transformers.ByT5Tokenizer()
    text = transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    )  # fmt: skip
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH, image_embed_dim=16, rope_axes_dim=(4, 6, 6), target_size=32, task_type="t2v",
        **HALF_WIDTH,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )  # fmt: skip
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(text), tokenizer=tokenizer, transformer=transformer, vae=vae,
        scheduler=euler(shift=3.0), text_encoder_2=t5_encoder(byt5), tokenizer_2=byt5,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )  # fmt: skip


def ltx2(transformer_is=None, connectors_are=None):
    """Prompts take a multiple of 16 tokens."""
    tokenizer = tokenizer_of("qwen2")
    text = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
    }  # fmt: skip
    vision = {
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=WIDTH,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=4, audio_attention_head_dim=4,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=WIDTH, rope_type="split",
        **(transformer_is or {}),
    )  # fmt: skip
    shape = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 16}
    both = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in shape.items()}
    connectors = LTX2TextConnectors(
        caption_channels=WIDTH, text_proj_in_factor=3, rope_type="split", **(both | (connectors_are or {}))
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,) * 4, decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )  # fmt: skip
    vae.latents_mean.uniform_(-0.5, 0.5)
    vae.latents_std.uniform_(0.5, 2.0)
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16
    )
    gemma = transformers.Gemma3Config(text_config=text, vision_config=vision)
    return diffusers.LTX2Pipeline(
        scheduler=euler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
        ),
        vae=vae, audio_vae=sound, tokenizer=tokenizer, connectors=connectors, transformer=transformer,
        text_encoder=transformers.Gemma3ForConditionalGeneration(gemma),
        vocoder=LTX2Vocoder(in_channels=32, hidden_channels=32, upsample_kernel_sizes=[4], upsample_factors=[2]),
    )  # fmt: skip


def ltx23():
    """LTX-2.3: gates, texts modulated by the noise, texts of both kinds projected by the connectors."""
    kinds = {f"{kind}{name}": True for kind in ("", "audio_") for name in ("gated_attn", "cross_attn_mod")}
    connectors = {"video_gated_attn": True, "audio_gated_attn": True, "per_modality_projections": True}
    widths = {"video_hidden_dim": WIDTH, "audio_hidden_dim": 16, "audio_connector_attention_head_dim": 8}
    return ltx2(kinds | {"use_prompt_embeddings": False, "perturbed_attn": True}, connectors | widths)


def cosmos():
    t5 = build_t5_tokenizer()
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=16, out_channels=16, mlp_ratio=2, text_embed_dim=WIDTH, adaln_lora_dim=4, max_size=(4, 32, 32),
        patch_size=(1, 2, 2), rope_scale=(1.0, 4.0, 4.0), concat_padding_mask=True, extra_pos_embed_type=None,
        **HALF_WIDTH,
    )  # fmt: skip
    return diffusers.Cosmos2TextToImagePipeline(
        text_encoder=t5_encoder(t5), tokenizer=t5, transformer=transformer, vae=video_vae(),
        scheduler=euler(use_karras_sigmas=True), safety_checker=NoCheck(),
    )  # fmt: skip


class NoCheck(torch.nn.Module):
    """Stands in for the guardrail models, which play no part here."""

    device = torch.device("cpu")

    def check_text_safety(self, prompt):
        return True


def qwen_image():
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), **HALF_WIDTH
    )
    tokenizer, config = language_model("qwen2_5_vl", 1)
    return diffusers.QwenImagePipeline(
        scheduler=euler(use_dynamic_shifting=True), vae=video_vae(diffusers.AutoencoderKLQwenImage),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer=tokenizer,
        transformer=transformer,
    )  # fmt: skip


def qwen_image21():
    tokenizer, config = language_model("qwen3_vl", 1)
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, context_in_dim=WIDTH, mlp_ratio=2, axes_dims_rope=(4, 6, 6), **HALF_WIDTH
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 4,
        latents_std=[1.1] * 4,
    )  # fmt: skip
    return diffusers.QwenImage21Pipeline(
        scheduler=euler(use_dynamic_shifting=True), vae=vae, transformer=transformer,
        text_encoder=transformers.Qwen3VLForConditionalGeneration(config),
        processor=build_processor("qwen3_vl", tokenizer),
    )  # fmt: skip


def qwen_image_edit(kind=diffusers.QwenImageEditPipeline):
    """Qwen-Image, whose text encoder sees images too."""
    parts = qwen_image().components
    return kind(**parts, processor=build_processor("qwen2_5_vl", parts["tokenizer"]))


def qwen_image_edit_plus():
    return qwen_image_edit(diffusers.QwenImageEditPlusPipeline)


def flux2_transformer(guidance_embeds):
    return diffusers.Flux2Transformer2DModel(
        in_channels=16, num_single_layers=1, joint_attention_dim=3 * WIDTH, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance_embeds, **HALF_WIDTH,
    )  # fmt: skip


def flux2_vae():
    vae = diffusers.AutoencoderKLFlux2(latent_channels=4, **KL)
    vae.bn.running_mean.uniform_(-0.5, 0.5)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def flux2():
    tokenizer = tokenizer_of("qwen2_5_vl")
    text = {
        "model_type": "mistral", "vocab_size": -(-len(tokenizer) // 64) * 64, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_hidden_layers": 30, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    mistral = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return diffusers.Flux2Pipeline(
        scheduler=euler(use_dynamic_shifting=True, shift=3.0), vae=flux2_vae(),
        text_encoder=transformers.Mistral3ForConditionalGeneration(mistral),
        tokenizer=build_processor("qwen2_5_vl", tokenizer), transformer=flux2_transformer(guidance_embeds=True),
    )  # fmt: skip


def flux2_klein():
    tokenizer, config = language_model("qwen2", 27)  # its layers 9, 18 and 27
    return diffusers.Flux2KleinPipeline(
        scheduler=euler(use_dynamic_shifting=True, shift=3.0), vae=flux2_vae(),
        text_encoder=transformers.Qwen2ForCausalLM(config), tokenizer=tokenizer,
        transformer=flux2_transformer(guidance_embeds=False),
    )  # fmt: skip


def z_image():
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=WIDTH, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6], axes_lens=[64, 32, 32],
    )  # fmt: skip
    with torch.no_grad():  # drawn as 0 each, and trained to anything
        for name, weight in transformer.named_parameters():
            if "pad_token" in name:
                weight.normal_()
    tokenizer, config = language_model("qwen2", 2)
    return diffusers.ZImagePipeline(
        scheduler=euler(shift=3.0), vae=picture_vae(), text_encoder=transformers.Qwen2Model(config),
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


FAMILIES = {
    build.__name__: build
    for build in (
        sd3, sd15, flux, flux_kontext, wan, wan_i2v, wan_two_experts, hunyuan_video15, ltx2, ltx23, cosmos, qwen_image,
        qwen_image21, qwen_image_edit, qwen_image_edit_plus, z_image, flux2, flux2_klein,
    )
}  # fmt: skip


def pipeline_of(name):
    """The same one each time, as from_pretrained leaves its parts."""
    torch.manual_seed(0)
    pipeline = FAMILIES[name]()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def after_a_step(policy, conditions, start, guidance, rate, folder):
    """Trains all weights by one step on two noises; the saved pipeline, and what the policy draws in three steps."""
    timesteps = torch.tensor([800.0, 300.0])[: len(start)]
    policy(start, timesteps, conditions, guidance).square().sum().backward()
    torch.optim.SGD(policy.trainable_parameters(), lr=rate).step()
    batch = DiffusionBatch(conditions, start.shape[1:], len(start), guidance, start)
    ours = DiffusionSampler(SamplingConfig(3)).sample(policy, batch, generator=torch.Generator())
    policy.save_pretrained(folder)
    stock = diffusers.DiffusionPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return stock, policy.decode(ours.latents).clamp(0, 1)
