"""GLM-4.1V, GLM-4.5V and GLM-4.6V: patches with grids and M-RoPE positions as Qwen-VL's, tokens of their own."""

from .qwen import QwenVL


class Glm(QwenVL):
    """Images only: a video's frames are images between time stamps to the processor, and not to vLLM's prompts."""

    packed = ("glm4v", "glm4v_moe", "glm46v")
    kinds = ("image",)
    vision_tokens = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
                     "<|end_of_video|>")  # fmt: skip
