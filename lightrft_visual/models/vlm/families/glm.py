"""GLM-4.1V, GLM-4.5V and GLM-4.6V: patches with grids and M-RoPE positions as Qwen-VL's, tokens of their own."""

from typing import Any

from .qwen import QwenVL

FRAMES = 2  # of a patch: an image counts as many, and its area so often
EDGES = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 12288}  # pixels of all frames, as published


class Glm(QwenVL):
    """Images only: a video's frames are images between time stamps to the processor, and not to vLLM's prompts."""

    packed = ("glm4v", "glm4v_moe", "glm46v")
    kinds = ("image",)
    vision_tokens = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
                     "<|end_of_video|>")  # fmt: skip

    @classmethod
    def processor_arguments(cls, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Its processors call bounds of the area edges, and know no others."""
        given = dict(zip(EDGES, (min_pixels, max_pixels)))
        bounds = {edge: EDGES[edge] if pixels is None else FRAMES * pixels for edge, pixels in given.items()}
        return {"size": bounds} if set(given.values()) != {None} else {}
