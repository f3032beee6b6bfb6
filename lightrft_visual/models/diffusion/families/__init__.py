"""Diffusion families by the class name of their diffusers pipeline."""

from .base import DiffusionFamily
from .cosmos import CosmosPredict2
from .flux import Flux
from .qwen_image import QwenImage
from .sd3 import StableDiffusion3
from .sd15 import StableDiffusion15
from .wan import Wan, WanImageToVideo

FAMILIES: dict[str, type[DiffusionFamily]] = {
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "WanPipeline": Wan,
    "WanImageToVideoPipeline": WanImageToVideo,
    "QwenImagePipeline": QwenImage,
    "Cosmos2TextToImagePipeline": CosmosPredict2,
    "StableDiffusionPipeline": StableDiffusion15,
}
# The names by which configurations call them.
FAMILY_OF_NAME: dict[str, type[DiffusionFamily]] = {
    "sd3": StableDiffusion3,
    "flux": Flux,
    "wan": Wan,
    "wan_i2v": WanImageToVideo,
    "qwen_image": QwenImage,
    "cosmos_predict2": CosmosPredict2,
    "sd15": StableDiffusion15,
}

__all__ = ["FAMILIES", "FAMILY_OF_NAME", "DiffusionFamily"]
