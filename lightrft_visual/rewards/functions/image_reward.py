"""ImageReward (Xu et al., arXiv 2304.05977)."""

from functools import partial
from math import isqrt
from typing import Any

import torch
from torchvision.transforms import InterpolationMode, functional
from transformers import AutoProcessor, BlipConfig, BlipForImageTextRetrieval

from ...models.weight_files import load_whole
from ...runtime.offload import on_device
from .image_scoring import in_batches, linear_stack, load_checkpoint, load_published, load_tensors, mean_over_frames

# Parts of names in the published file, and what transformers calls them.
PUBLISHED = {
    r"^blip\.text_encoder\.": "text_encoder.",
    r"^blip\.visual_encoder\.blocks\.": "vision_model.encoder.layers.",
    r"^blip\.visual_encoder\.norm\.": "vision_model.post_layernorm.",
    r"^blip\.visual_encoder\.cls_token$": "vision_model.embeddings.class_embedding",
    r"^blip\.visual_encoder\.pos_embed$": "vision_model.embeddings.position_embedding",
    r"^blip\.visual_encoder\.patch_embed\.proj\.": "vision_model.embeddings.patch_embedding.",
    r"\.norm([12])\.": r".layer_norm\1.",
    r"\.attn\.proj\.": ".self_attn.projection.",
    r"\.attn\.": ".self_attn.",
}
POSITIONS = "blip.visual_encoder.pos_embed"
UNREAD = ("itm_head.", "vision_proj.", "text_proj.")
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the published head


class ImageReward:
    """A BLIP text encoder that attends to the image's middle square, and a linear stack over its first token,
    standardised.

    head: the published file (a path, or `hub/name:file`), whose configuration and processor are BLIP's in `model`; or
    the `mlp.layers.<i>.weight` alone, where `model` is a BlipForImageTextRetrieval checkpoint with all others.
    """

    def __init__(
        self,
        model: str = "Salesforce/blip-itm-large-coco",
        head: str = "THUDM/ImageReward:ImageReward.pt",
        mean: float = MEAN,
        std: float = STD,
        max_words: int = 35,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.mean, self.std, self.max_words = mean, std, max_words
        self.batch_size, self.offload = batch_size, offload
        state = load_tensors(head, "image_reward")
        whole = partial(load_whole, BlipForImageTextRetrieval)
        blip = published(state, model) if POSITIONS in state else load_checkpoint(whole, model, "image_reward")
        self._blip = blip.eval()
        self._processor = load_checkpoint(AutoProcessor.from_pretrained, model, "image_reward")
        self._head = linear_stack(state, "mlp.layers.", "image_reward").eval()

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            first = self._first_tokens(images, texts, device)
            return ((self._head(first).detach().squeeze(-1) - self.mean) / self.std).tolist()

        return mean_over_frames(frames, prompts, score)

    def _first_tokens(self, images: list[Any], texts: list[str], device: Any) -> torch.Tensor:
        """(n, H) float32 on the CPU."""
        found, size = [], self._blip.config.vision_config.image_size
        with on_device(self._blip, device, self.offload) as blip:
            for part in in_batches(self.batch_size, len(images)):
                shown = [functional.resize(images[i].convert("RGB"), size, InterpolationMode.BICUBIC) for i in part]
                inputs = self._processor(
                    images=[functional.center_crop(image, size) for image in shown],
                    text=[texts[i] for i in part],
                    padding="max_length",
                    truncation=True,
                    max_length=self.max_words,
                    size={"height": size, "width": size},
                    return_tensors="pt",
                ).to(device)
                seen = blip.vision_model(pixel_values=inputs["pixel_values"]).last_hidden_state
                read = blip.text_encoder(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    encoder_hidden_states=seen,
                    encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long, device=seen.device),
                )
                found.append(read.last_hidden_state[:, 0].float().cpu())
        return torch.cat(found)


def published(state: dict[str, torch.Tensor], model: str) -> BlipForImageTextRetrieval:
    """BLIP with the published file's weights; its images are smaller than BLIP's own, its eps is that of its code.
    model: BLIP's folder or hub name, for its configuration. Raises ConfigError for weights that do not fit."""
    config = load_checkpoint(BlipConfig.from_pretrained, model, "image_reward")
    config.vision_config.image_size = config.vision_config.patch_size * isqrt(state[POSITIONS].shape[1] - 1)
    config.vision_config.layer_norm_eps = 1e-6
    blip = BlipForImageTextRetrieval(config)
    load_published(blip, state, PUBLISHED, "image_reward", UNREAD)
    return blip
