"""Tiny checkpoints, actors and prompts with every kind of media, for the model and rollout tests."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.data.video import load_video
from lightrft_visual.experience.items import make_experience_batch, strip_padding
from lightrft_visual.experience.rollouts import PromptBatch, PromptFeatures, Rollout, collate
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import Checkpoint, open_checkpoint
from lightrft_visual.models.tiny.vlm import TINY_FAMILIES, VISION_FAMILIES, build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
ROUND = "qwen2_vl"  # its vocabulary is a multiple of 64; vLLM pads that of all others
QWEN_FAMILIES = tuple(name for name in VISION_FAMILIES if name.startswith("qwen"))
ALL_KINDS = [f"{family}{tied}" for family in (*VISION_FAMILIES, "qwen2") for tied in ("", "+tied")]


class PlainEngine:
    """An actor with ordinary backward passes in the place of DeepSpeed."""

    stepped = False

    def __init__(self, actor):
        self.module = actor

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)

    def accumulate(self, loss, last, told=None):
        loss.backward()

    def step(self):
        self.stepped = True
        return SimpleNamespace(applied=True)


def picture(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(seed: int, frames: int = 4, fps: float = 2.0):
    return load_video({"video": [picture(seed + turn, 64, 64) for turn in range(frames)], "sample_fps": fps})


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


BOS = "<|quad_start|>"


def begin_with_bos(model_input, in_template: bool = True) -> None:
    """Give a tokenizer, or that of a processor, a token that it puts before every text, and its chat template too."""
    tokenizer = getattr(model_input, "tokenizer", model_input)
    tokenizer.bos_token = BOS
    special = [(BOS, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    if in_template:
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    if model_input is not tokenizer:
        model_input.chat_template = tokenizer.chat_template


@lru_cache
def checkpoint_of(root: Path, kind: str) -> Checkpoint:
    """kind: a family, with `+tied` for tied embeddings. Weights are scaled up, so no prediction is near uniform."""
    family, tied, _ = (*kind.partition("+"),)
    folder = build_tiny_checkpoint(root / kind, family, tie_embeddings=bool(tied))
    model = load(folder, TINY_FAMILIES[family].processor is not None)
    if family != ROUND:
        model.resize_token_embeddings(uneven_vocabulary(model))
    perturb(model, 1, 0.05)
    model.save_pretrained(folder)
    return open_checkpoint(str(folder), ModelConfig(), DataConfig())


def uneven_vocabulary(model) -> int:
    """A little less than the model has, so that padding that no text decodes to is left, and no multiple of 64."""
    return model.config.get_text_config().vocab_size - 5


def load(folder, vision: bool):
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


def actor_of(checkpoint: Checkpoint, banned: list[int] | None = None, wrap=lambda model: model) -> Actor:
    model = wrap(load(checkpoint.path, checkpoint.vision))
    if banned is None:
        banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    return Actor(model, banned, checkpoint.eos_ids)


def text_prompts() -> PromptBatch:
    return PromptBatch.of([turn("what is 1 plus 2?"), turn("where?"), "how many red circles are there in the picture"])


def mixed_prompts(videos: bool = True) -> PromptBatch:
    """Text alone, one to three images, and videos at several frame rates, two of them in one prompt."""
    rows: list[tuple[str, list, list]] = [
        (turn("what is 1 plus 2?"), [], []),
        (turn(IMAGE + "what colour is it?"), [picture(0)], []),
        (turn(f"first {IMAGE} second {IMAGE} which one?"), [picture(1, 90, 70), picture(2, 60, 120)], []),
        (turn(IMAGE * 3), [picture(3), picture(4, 112, 56), picture(5)], []),
    ]
    if videos:
        rows += [
            (turn(VIDEO + "how many?"), [], [clip(10, 6, fps=2.0)]),
            (turn(f"{VIDEO} or {VIDEO}"), [], [clip(20, 8, fps=1.0), clip(30, 4, fps=0.5)]),
            (turn(IMAGE + "then" + VIDEO), [picture(6)], [clip(40, 6, fps=4.0)]),
        ]
    return PromptBatch.of([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def prompts_for(checkpoint: Checkpoint, videos: bool = True) -> PromptBatch:
    """Prompts with every kind of media that the family takes, with its own placeholders."""
    if not checkpoint.vision:
        return text_prompts()
    batch = mixed_prompts(videos and "video" in checkpoint.family.kinds)
    own = {"internvl": "<IMG_CONTEXT>\n", "janus": "<image_placeholder>\n"}
    if checkpoint.config.model_type in own:
        batch.prompts = [text.replace(IMAGE, own[checkpoint.config.model_type]) for text in batch.prompts]
    return batch


def features_of(checkpoint: Checkpoint, batch: PromptBatch) -> list[PromptFeatures]:
    return MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 1024).features(batch)


def rollouts_of(checkpoint: Checkpoint, batch: PromptBatch, seed: int = 0) -> list[Rollout]:
    """One made-up response of 2 to 6 tokens to each prompt."""
    draw = np.random.default_rng(seed)
    return [
        Rollout(prompt, draw.integers(0, 256, 2 + place % 5).tolist(), None, "", False, sample_id=100 + place)
        for place, prompt in enumerate(features_of(checkpoint, batch))
    ]


def grouped_rollouts(checkpoint: Checkpoint, batch: PromptBatch, completions: int = 2, seed: int = 0) -> list[Rollout]:
    """Responses of 1 to 7 tokens, those of a prompt not beside each other."""
    draw, prompts = np.random.default_rng(seed), features_of(checkpoint, batch)
    return [
        Rollout(replace(prompt, group_id=place), draw.integers(0, 256, draw.integers(1, 8)).tolist(), None, "", False,
                sample_id=place + 7 * turn)
        for turn in range(completions)
        for place, prompt in enumerate(prompts)
    ]  # fmt: skip


def inputs_of(checkpoint: Checkpoint, rollouts: list[Rollout], packed: bool = False) -> ModelInputs:
    """Model inputs of the rollouts, by the way through experience and replay items where packed."""
    experience = collate(rollouts, checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    if not packed:
        return ModelInputs.of(experience)
    experience.action_log_probs = torch.zeros(experience.action_mask.shape)
    return ModelInputs.of(make_experience_batch(strip_padding(experience), packing_samples=True))
