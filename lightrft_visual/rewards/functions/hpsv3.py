"""HPSv3 (arXiv 2508.03789): Qwen2-VL with a head that rates an image and its prompt as people would.

The published weights give a mean and a std of the rating at one token of their own, and the mean is the score.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from ...runtime.offload import on_device
from .image_scoring import in_batches, load_checkpoint, load_tensors, mean_over_frames
from .qwen2vl_head import asked, processor_with, read_at, with_head

TOKEN = "<|Reward|>"  # the one at which the head reads
PIXELS = 256 * 28 * 28  # every image has so many
QUESTION = (
    "\nYou are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a "
    "overall score to estimate the human preference. Please provide a rating from 0 to 10, with 0 being the "
    "worst and 10 being the best. \n\n**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:\n"
    "- **Reasonableness:** The image should not contain any significant biological or logical errors, such as "
    "abnormal body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to "
    "interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual "
    "elements (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, "
    "composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense "
    "of harmony and balance.\n"
    "- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or "
    "adult material. If such content is present, the image quality and satisfaction score should be the lowest "
    "possible. \n\n**Text Alignment:**  \n"
    "Assess how well the image matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) "
    "align with the textual description. The subject should match the description in terms of number, "
    "appearance, and behavior.\n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well "
    "the image adheres to this style.\n"
    "- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image "
    "logically fit the scenario described in the prompt. The environment should support and enhance the subject "
    "without contradictions.\n"
    "- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing, "
    "accessories, expressions, actions) are faithfully represented in the image. Minor deviations may be "
    "acceptable, but critical attributes should be preserved.\n"
    "- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the "
    "image. The generated content should not introduce elements that conflict with or distort the original "
    "description.\nTextual prompt - {prompt}\n\n\n\n"
    "Please provide the overall ratings of this image: <|Reward|>\n\nEND\n"
)


def rating_head(width: int) -> nn.Sequential:
    """From a token's last hidden state to the rating's mean and std."""
    layers = nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    return nn.Sequential(*layers)


class HPSv3:
    """The rating's mean over `divide_by`; a video's is the mean over its frames.

    weights: the published file of network and head, a path or `hub/name:file`. model: Qwen2-VL's folder or hub name,
    for its shape and processor. bf16: of the network; the head is always in float32.
    """

    def __init__(
        self,
        weights: str = "MizzenAI/HPSv3:HPSv3.safetensors",
        model: str = "Qwen/Qwen2-VL-7B-Instruct",
        divide_by: float = 1.0,
        batch_size: int = 4,
        bf16: bool = True,
        offload: bool = True,
    ) -> None:
        self.divide_by, self.batch_size, self.offload = divide_by, batch_size, offload
        self._processor, self._tokens = processor_with([TOKEN], model, "hpsv3")
        config, state = load_checkpoint(AutoConfig.from_pretrained, model, "hpsv3"), load_tensors(weights, "hpsv3")
        head = rating_head(config.get_text_config().hidden_size)
        self._model = with_head(config, state, head, torch.bfloat16 if bf16 else torch.float32, "hpsv3")

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            found: list[float] = []
            with on_device(self._model, device, self.offload) as model:
                for part in in_batches(self.batch_size, len(images)):
                    batch = self.inputs([images[i] for i in part], [texts[i] for i in part]).to(device)
                    found += (read_at(model, batch, self._tokens, "hpsv3")[:, 0, 0] / self.divide_by).tolist()
            return found

        return mean_over_frames(frames, prompts, score)

    def inputs(self, images: list[Any], prompts: list[str]) -> Any:
        """What the processor makes of images and prompts."""
        size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
        shown = [image.convert("RGB") for image in images]
        return self._processor(
            text=asked(self._processor, "image", QUESTION, prompts),
            images=shown,
            padding=True,
            return_tensors="pt",
            images_kwargs={"size": size},
        )
