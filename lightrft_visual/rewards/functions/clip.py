"""CLIP models, and the scores that are a cosine of image and prompt. A video's score is the mean over its frames."""

from functools import partial
from typing import Any

import torch
from PIL import Image, ImageOps
from transformers import CLIPConfig, CLIPModel, CLIPProcessor

from ...models.weight_files import load_whole
from ...runtime.offload import on_device
from .image_scoring import in_batches, load_checkpoint, load_published, load_tensors, mean_over_frames

VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
# Parts of names in open_clip's checkpoints, and what transformers calls them.
OPEN_CLIP = {
    r"^visual\.(transformer\.resblocks|ln_pre|ln_post)\.": r"vision_model.\1.",
    r"^visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"^visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"^visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.proj$": "visual_projection.weight",
    r"^(transformer\.resblocks|ln_final)\.": r"text_model.\1.",
    r"^token_embedding\.": "text_model.embeddings.token_embedding.",
    r"^positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"^text_projection$": "text_projection.weight",
    r"\.transformer\.resblocks\.": ".encoder.layers.",
    r"\.ln_pre\.": ".pre_layrnorm.",
    r"\.ln_post\.": ".post_layernorm.",
    r"\.ln_final\.": ".final_layer_norm.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
}


class CLIPPairs:
    """Normalised embeddings of images and texts, in batches. Texts are cut at the model's length, as CLIP's are."""

    def __init__(self, model: str, processor: str | None, scorer: str, batch_size: int, offload: bool) -> None:
        if model.endswith((".pt", ".pth", ".bin", ".safetensors")):  # a published file, `hub/name:file` or a path
            processor = processor or VIT_H
            self.model = from_open_clip(load_tensors(model, scorer), processor, scorer).eval()
        else:
            self.model = load_checkpoint(partial(load_whole, CLIPModel), model, scorer).eval()
        self.processor = load_checkpoint(CLIPProcessor.from_pretrained, processor or model, scorer)
        self.batch_size, self.offload = batch_size, offload

    def embed(self, frames: list[Any], texts: list[str], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, D) image and (n, D) text embeddings of unit length, float32 on the CPU.

        Args:
            frames: n images, PIL.
            texts: n texts.
            device: on which the model runs.
        """
        images, words = [], []
        with on_device(self.model, device, self.offload) as model:
            for part in in_batches(self.batch_size, len(frames)):
                inputs = self.processor(
                    text=[texts[i] for i in part],
                    images=[frames[i].convert("RGB") for i in part],
                    padding=True,
                    truncation=True,
                    max_length=self.model.config.text_config.max_position_embeddings,
                    return_tensors="pt",
                )
                output = model(**inputs.to(device))
                images.append(output.image_embeds.float().cpu())
                words.append(output.text_embeds.float().cpu())
        return torch.cat(images), torch.cat(words)


def from_open_clip(state: dict[str, torch.Tensor], config: str, scorer: str) -> CLIPModel:
    """The model of an open_clip checkpoint.

    Args:
        state: its weights.
        config: a folder or hub name with the configuration that transformers has of the same model.
        scorer: for messages. Raises ConfigError for weights that do not fit.
    """
    turned = {}
    for name, tensor in state.items():
        if ".attn.in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3)):
                turned[name.replace("in_proj_", f"{part}_proj.")] = piece
        else:
            turned[name] = tensor.T if name in ("visual.proj", "text_projection") else tensor
    model = CLIPModel(load_checkpoint(CLIPConfig.from_pretrained, config, scorer))
    load_published(model, turned, OPEN_CLIP, scorer)
    return model


class CLIPScore:
    """CLIPScore (Hessel et al., arXiv 2104.08718): weight * max(cosine of image and prompt, 0); the paper's weight is
    2.5, and its words "A photo depicts" are left out. model: a CLIP checkpoint folder or hub name."""

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        weight: float = 2.5,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.weight = weight
        self._clip = CLIPPairs(model, None, "clip_score", batch_size, offload)

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            image, text = self._clip.embed(images, texts, device)
            return [self.scaled(cosine) for cosine in (image * text).sum(dim=-1).tolist()]

        return mean_over_frames(frames, prompts, score)

    def scaled(self, cosine: float) -> float:
        """The score that a cosine stands for."""
        return self.weight * max(cosine, 0.0)


class HPSv2(CLIPScore):
    """Human Preference Score v2 (Wu et al., arXiv 2306.09341): cosine of image and prompt by its weights, which see the
    whole image in a black square. model: the published file (`hub/name:file` or a path), or a folder or hub name with
    its weights in transformers' CLIP form; processor: of the file its configuration too, default ViT-H/14's."""

    def __init__(
        self,
        model: str = "xswu/HPSv2:HPS_v2.1_compressed.pt",
        processor: str | None = None,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self._clip = CLIPPairs(model, processor, "hpsv2", batch_size, offload)

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        size = self._clip.model.config.vision_config.image_size
        return super().__call__([[in_square(frame, size) for frame in sample] for sample in frames], prompts, device)

    def scaled(self, cosine: float) -> float:
        """The cosine itself."""
        return cosine


class PickScore(CLIPScore):
    """PickScore (Kirstain et al., arXiv 2305.01569): logit scale times the cosine of image and prompt, divided by
    `divide_by`: 26 brings it near 0..1, as Flow-GRPO does; 1 gives the published number."""

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = VIT_H,
        divide_by: float = 26.0,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self._clip = CLIPPairs(model, processor, "pick_score", batch_size, offload)
        self.factor = float(self._clip.model.logit_scale.detach().exp()) / divide_by

    def scaled(self, cosine: float) -> float:
        """The cosine times the logit scale, divided."""
        return self.factor * cosine


def in_square(image: Image.Image, size: int) -> Image.Image:
    """The whole image, its longer side `size`, in the middle of a black square."""
    seen, square = ImageOps.contain(image.convert("RGB"), (size, size)), Image.new("RGB", (size, size))
    square.paste(seen, ((size - seen.width) // 2, (size - seen.height) // 2))
    return square
