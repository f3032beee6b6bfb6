"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and videos of any size as patches with grids, M-RoPE positions."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, ProcessorMixin

from ....errors import ConfigError
from ....experience.types import ModelInputs
from ....experience.vision import VisionTensors
from ....runtime.host_copies import on_host, to_device
from ...attention import attend_by_windows
from ..positions import GridCursor, MRopePositions, PatchConv3d, real_tokens, text_positions
from ..vision_cache import SharedMedia, read_grids_on_host
from .base import T, VLMFamily, name_of


class QwenVL(VLMFamily):
    """pixel_values (patches, width) and image_grid_thw (images, 3); videos alike, under names of their own."""

    packed = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    towers = ("visual",)
    vision_tokens = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    tensors = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    together = True
    media = {"image": "pixel_values", "video": "pixel_values_videos"}

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        self.merge = config.vision_config.spatial_merge_size
        self.mrope: MRopePositions | None = None

    @classmethod
    def processor_arguments(cls, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """The bounds that are set; images are resized between them."""
        bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        return {name: value for name, value in bounds.items() if value is not None}

    def check_processor(self, processor: ProcessorMixin) -> None:
        """As in the base; patches of another size than the tower's are another model's too."""
        super().check_processor(processor)
        images, tower = processor.image_processor, self.config.vision_config
        if (images.patch_size, images.merge_size) != (tower.patch_size, tower.spatial_merge_size):
            raise ConfigError(
                f"model type {self.config.model_type!r}: its processor cuts patches of {images.patch_size} pixels and "
                f"merges {images.merge_size} a side, config.json has {tower.patch_size} and {tower.spatial_merge_size}"
            )

    def attach(self, base: nn.Module) -> None:
        """Positions by the model's own rule; the tower runs once for each different image or video, without its slow
        convolution, and attends to all windows in a few calls."""
        self.mrope = MRopePositions(base)
        if hasattr(base, "visual"):
            SharedMedia(base.visual)
            PatchConv3d.adopt(base.visual.patch_embed.proj)
            attend_by_windows(base.visual)
            read_grids_on_host(base.visual)

    def positions(self, inputs: ModelInputs, types: T) -> T:
        """(4, rows, S): text positions, then M-RoPE's three, worked out on the host, where patterns are compared."""
        found = torch.zeros(3, types.numel(), dtype=torch.long)
        host, vision = on_host(types), inputs.vision
        images, videos = (GridCursor(vision.get(f"{kind}_grid_thw"), self.merge**2, kind) for kind in self.media)
        seconds = vision.get("second_per_grid_ts")
        seconds = None if seconds is None else on_host(seconds)
        samples, parts = real_tokens(inputs), []
        for sample, tokens in enumerate(samples):
            own, first, name = host.flatten()[tokens], videos.next, partial(name_of, inputs, sample)
            _, *placeholders = torch.bincount(own, minlength=3).tolist()
            grids = [each.take(wanted, name) for each, wanted in zip((images, videos), placeholders)]
            parts.append(self.mrope(own, *grids, None if seconds is None else seconds[first : videos.next]))
        found[:, torch.cat(samples)] = torch.cat(parts, dim=1)
        images.finish()
        videos.finish()
        return torch.cat([text_positions(inputs).unsqueeze(0), to_device(found.view(3, *types.shape), types.device)])

    def arguments(self, inputs: ModelInputs, types: T) -> dict[str, Any]:
        """Patches and grids, and which tokens are whose; seconds are in the positions already."""
        arguments = inputs.vision.joined() | {"mm_token_type_ids": types}
        arguments.pop("second_per_grid_ts", None)
        return arguments

    def blank(self, kind: str) -> tuple[VisionTensors, int]:
        """One merged patch, one token."""
        vision, merge = self.config.vision_config, self.merge
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels, grid = torch.zeros(merge * merge, width), torch.tensor([[1, merge, merge]])
        return VisionTensors.of(**{self.media[kind]: pixels, f"{kind}_grid_thw": grid}), 1
