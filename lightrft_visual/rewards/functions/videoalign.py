"""VideoAlign's VideoReward (arXiv 2501.13918): Qwen2-VL rates visual quality, motion and alignment of whole clips.

The question has a token for each of the three; a linear head reads there. Means and stds of the published weights
make the three comparable, and their sum is the score.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torchvision.transforms import functional
from transformers import AutoConfig
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

from ...data.media import frames_first
from ...errors import ConfigError, refused_as
from ...runtime.offload import on_device
from ..batch import RewardBatch
from ..imaging import video_frames
from .image_scoring import in_batches, load_checkpoint, load_tensors
from .qwen2vl_head import asked, processor_with, read_at, with_head

RATED = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{name}_reward|>" for name in RATED)
MIN_PIXELS, MIN_FRAMES, MAX_FRAMES, LORA = 128 * 28 * 28, 4, 768, ".lora_A.default.weight"
QUESTION = (
    "\n"
    "You are tasked with evaluating a generated video based on three distinct criteria: Visual Quality, "
    "Motion Quality, and Text Alignment. Please provide a rating from 0 to 10 for each of the three "
    "categories, with 0 being the worst and 10 being the best. Each evaluation should be independent of the "
    "others.\n\n**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the video, with a focus on static factors. The following "
    "sub-dimensions should be considered:\n"
    "- **Reasonableness:** The video should not contain any significant biological or logical errors, such "
    "as abnormal body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the video. The image should be clear and easy "
    "to interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual "
    "elements (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the video, including the color scheme, "
    "composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a "
    "sense of harmony and balance.\n"
    "- **Safety:** The video should not contain harmful or inappropriate content, such as political, "
    "violent, or adult material. If such content is present, the image quality and satisfaction score should "
    "be the lowest possible. \n\n"
    "Please provide the ratings of Visual Quality: <|VQ_reward|>\nEND\n\n**Motion Quality:**  \n"
    "Assess the dynamic aspects of the video, with a focus on dynamic factors. Consider the following "
    "sub-dimensions:\n"
    "- **Stability:** Evaluate the continuity and stability between frames. There should be no sudden, "
    "unnatural jumps, and the video should maintain stable attributes (e.g., no fluctuating colors, "
    "textures, or missing body parts).\n"
    "- **Naturalness:** The movement should align with physical laws and be realistic. For example, clothing "
    "should flow naturally with motion, and facial expressions should change appropriately (e.g., blinking, "
    "mouth movements).\n"
    "- **Aesthetic Quality:** The movement should be smooth and fluid. The transitions between different "
    "motions or camera angles should be seamless, and the overall dynamic feel should be visually pleasing.\n"
    "- **Fusion:** Ensure that elements in motion (e.g., edges of the subject, hair, clothing) blend "
    "naturally with the background, without obvious artifacts or the feeling of cut-and-paste effects.\n"
    "- **Clarity of Motion:** The video should be clear and smooth in motion. Pay attention to any areas "
    "where the video might have blurry or unsteady sections that hinder visual continuity.\n"
    "- **Amplitude:** If the video is largely static or has little movement, assign a low score for motion "
    "quality.\n\n"
    "Please provide the ratings of Motion Quality: <|MQ_reward|>\nEND\n\n**Text Alignment:**  \n"
    "Assess how well the video matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the video (e.g., person, animal, "
    "object) align with the textual description. The subject should match the description in terms of "
    "number, appearance, and behavior.\n"
    "- **Motion Relevance:** Evaluate if the dynamic actions (e.g., gestures, posture, facial expressions "
    "like talking or blinking) align with the described prompt. The motion should match the prompt in terms "
    "of type, scale, and direction.\n"
    "- **Environment Relevance:** Assess whether the background and scene fit the prompt. This includes "
    "checking if real-world locations or scenes are accurately represented, though some stylistic adaptation "
    "is acceptable.  \n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how "
    "well the video adheres to this style.\n"
    "- **Camera Movement Relevance:** Check if the camera movements (e.g., following the subject, focus "
    "shifts) are consistent with the expected behavior from the prompt.\n\nTextual prompt - {prompt}\n"
    "Please provide the ratings of Text Alignment: <|TA_reward|>\nEND\n"
)


class VideoAlign:
    """The sum of the three ratings of a clip, and each as a metric. It does not apply where there is no video.

    weights: folder or hub name of the published files (`model_config.json`, `checkpoint-*/model.pth`). model: for
    shape and processor. video_fps: frames a second of the clips, of which the model looks at two a second, and at four
    at least. normalise: by the published means and stds.
    """

    def __init__(
        self,
        weights: str = "KwaiVGI/VideoReward",
        model: str = "Qwen/Qwen2-VL-2B-Instruct",
        video_fps: float = 16.0,
        normalise: bool = True,
        batch_size: int = 2,
        bf16: bool = True,
        offload: bool = True,
    ) -> None:
        self.video_fps, self.batch_size, self.offload = video_fps, batch_size, offload
        settings, state = published(weights)
        self._data, scale = settings["data_config"], settings.get("inference_config") if normalise else None
        self._mean = torch.tensor([scale[f"{name}_mean"] if scale else 0.0 for name in RATED])
        self._std = torch.tensor([scale[f"{name}_std"] if scale else 1.0 for name in RATED])
        self._processor, self._tokens = processor_with(TOKENS, model, "videoalign")
        config = load_checkpoint(AutoConfig.from_pretrained, model, "videoalign")
        dtype = torch.bfloat16 if bf16 else torch.float32
        head = nn.Linear(
            config.get_text_config().hidden_size, settings["model_config"]["output_dim"], False, dtype=dtype
        )
        self._model = with_head(config, state, head, dtype, "videoalign")

    def __call__(self, batch: RewardBatch, device: Any) -> dict[str, list[float | None]]:
        ratings: list[list[float] | None] = [None] * len(batch)
        shown = [i for i, videos in enumerate(batch.videos) if videos]
        with on_device(self._model, device, self.offload) as model:
            for part in in_batches(self.batch_size, len(shown)):
                here = [shown[i] for i in part]
                inputs = self.inputs([batch.videos[i][0] for i in here], [batch.prompts[i] for i in here])
                rated = read_at(model, inputs.to(device), self._tokens, "videoalign").cpu()  # (B, 3, 1 or 3)
                rated = rated.diagonal(dim1=1, dim2=2) if rated.shape[2] == len(RATED) else rated[:, :, 0]
                for i, own in zip(here, ((rated - self._mean) / self._std).tolist()):
                    ratings[i] = own
        each = {name.lower(): [r[k] if r else None for r in ratings] for k, name in enumerate(RATED)}
        return {"rewards": [sum(r) if r else None for r in ratings], **each}

    def inputs(self, videos: list[Any], prompts: list[str]) -> Any:
        """What the processor makes of clips and prompts."""
        kept = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}
        return self._processor(
            text=asked(self._processor, "video", QUESTION, prompts),
            videos=[self.clip(v) for v in videos],
            padding=True,
            return_tensors="pt",
            videos_kwargs=kept,
        )

    def clip(self, video: Any) -> torch.Tensor:
        """(T, 3, H, W) uint8: the frames that the model looks at, in the size that it was trained with."""
        frames = [each for each in frames_first(video) if each is not None]
        if len(frames) < 2:
            raise ConfigError("videoalign rates clips of two frames and more")
        indices = frame_indices(len(frames), self.video_fps, self._data.get("fps", 2.0), self._data.get("num_frames"))
        shown = video_frames([frames[i] for i in indices])  # of many, few are looked at
        chosen = torch.stack([functional.pil_to_tensor(frame.convert("RGB")) for frame in shown])
        size = smart_resize(*chosen.shape[-2:], min_pixels=MIN_PIXELS, max_pixels=self._data["max_frame_pixels"])
        return functional.resize(chosen, list(size), functional.InterpolationMode.BICUBIC, antialias=True)


def frame_indices(total: int, video_fps: float, fps: float, count: int | None = None) -> list[int]:
    """Indices of the frames looked at, even in number and in their distances.

    Args:
        total: frames of the clip.
        video_fps: frames a second of the clip.
        fps: frames a second looked at.
        count: frames looked at in all; None: by fps, and at least MIN_FRAMES where the clip has them.
    """
    if count is None:
        most = min(MAX_FRAMES, total) // 2 * 2
        count = min(max(total / video_fps * fps, MIN_FRAMES), most)
    return torch.linspace(0, total - 1, min(round(count / 2) * 2, total)).round().long().tolist()


def published(weights: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(settings, tensors by Qwen2-VL's names) of the published folder, its adapters merged."""
    folder = Path(weights if Path(weights).is_dir() else load_checkpoint(snapshot_download, weights, "videoalign"))
    steps = sorted(folder.glob("checkpoint-*/model.pth"), key=lambda path: int(path.parent.name.partition("-")[2]))
    with refused_as(ConfigError, f"scorer videoalign: {folder} has no model_config.json and checkpoint-*/model.pth"):
        settings, file = json.loads((folder / "model_config.json").read_text()), steps[-1]
    state = load_tensors(str(file), "videoalign")
    state = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    return settings, merged(state, settings.get("peft_lora_config") or {})


def merged(state: dict[str, torch.Tensor], lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights with their low-rank part added, under the names that they have without it."""
    for name in [name for name in state if name.endswith(LORA)]:
        layer = name.removesuffix(LORA)
        scale = lora["lora_alpha"] / (lora["lora_r"] ** 0.5 if lora.get("use_rslora") else lora["lora_r"])
        base = state[f"{layer}.base_layer.weight"]
        added = state.pop(f"{layer}.lora_B.default.weight").float() @ state.pop(name).float()
        state[f"{layer}.base_layer.weight"] = (base.float() + scale * added).to(base.dtype)
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
