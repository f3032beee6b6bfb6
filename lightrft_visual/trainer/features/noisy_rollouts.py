"""NoisyRollout (arXiv 2504.13055): some of a prompt's responses are drawn from a noisy copy of its image.

The copy is for generation alone: rewards, group statistics and the update see the prompt with its clean image.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...experience.rollouts import PromptFeatures, Variant
from ...rollout.multimodal import MultimodalDataProcessor
from ...runtime.seeding import derive_seed
from ..hooks import StepData, StepHook

DECAY, MIDPOINT = 30.0, 40 / 60  # lambda, and gamma / t_max, of the paper's sigmoid schedule
NOISE_STEPS = 1000  # of the forward process that says how strong the noise of a step is
T = torch.Tensor


def kept_signal() -> T:
    """(NOISE_STEPS): the share of the variance that is still the image's after each step, the product of 1 - beta."""
    betas = torch.linspace(-6, 6, NOISE_STEPS, dtype=torch.float64).sigmoid() * (0.5e-2 - 1e-5) + 1e-5
    return (1 - betas).cumprod(0)


def noisy(image: Image.Image, strength: int, seed: int) -> Image.Image:
    """sqrt(kept) x + sqrt(1 - kept) e for pixels x in [0, 1], cut to that range; in RGB.

    Args:
        image: of any size, which stays.
        strength: index into `kept_signal`, which says how much is kept.
        seed: of the noise e.
    """
    kept = kept_signal()[strength].item()
    pixels = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32) / 255)
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    mixed = (math.sqrt(kept) * pixels + math.sqrt(1 - kept) * noise).clamp(0, 1)
    return Image.fromarray((mixed * 255).round().byte().numpy())


class NoisyRolloutsHook(StepHook):
    """Gives each request a variant with noisy images for some of its samples; reports what they earned.

    share: of a prompt's `samples` responses; at least one is not drawn from its noisy image. noise_steps: alpha_0 of
    the paper, a step of NOISE_STEPS of the forward process. total_steps: t_max, rollout steps of the run. processor:
    preprocesses the noisy images.
    """

    def __init__(
        self, share: float, noise_steps: int, total_steps: int, samples: int, processor: MultimodalDataProcessor
    ) -> None:
        self.noise_steps, self.total_steps, self.processor = noise_steps, total_steps, processor
        self.count = min(round(share * samples), samples - 1)

    def strength(self, step: int) -> int:
        """The noise of rollout step number `step`, from 0 on: alpha_0 (1 - sigmoid(lambda (t - gamma) / t_max))."""
        return int(self.noise_steps * (1 - 1 / (1 + math.exp(-DECAY * (step / self.total_steps - MIDPOINT)))))

    def on_prompts(self, requests: list[PromptFeatures]) -> list[PromptFeatures]:
        """A prompt without images has a variant too, of another seed alone: each rank draws as often as the others."""
        if not self.count:
            return requests
        strength = self.strength(self.context.step())
        seeds = [derive_seed(each.seed, "noisy copy") for each in requests]
        images = [
            [noisy(image, strength, derive_seed(seed, "distortion", at)) for at, image in enumerate(each.images)]
            for each, seed in zip(requests, seeds)
        ]
        copies = self.processor.with_images(requests, images)
        return [
            replace(each, variants=[Variant(replace(copy, seed=seed), self.count, bool(each.images))])
            for each, copy, seed in zip(requests, copies, seeds)
        ]

    def on_experience(self, step: StepData) -> StepData:
        """`reward_distorted`: of responses that were drawn from noisy images; `noise_strength`: of that noise."""
        step.metrics.add("noise_strength", float(self.strength(self.context.step())))
        rewards = [each.reward for each in step.rollouts if each.distorted and each.valid]
        step.metrics.add_moments("reward_distorted", torch.tensor(rewards))
        return step


def build(parts: Any) -> NoisyRolloutsHook | None:
    """For `noisy_rollout_share`."""
    rollout = parts.config.rollout
    if rollout.noisy_rollout_share == 0:
        return None
    return NoisyRolloutsHook(
        rollout.noisy_rollout_share, rollout.noisy_rollout_strength, parts.loop.total_steps,
        rollout.n_samples_per_prompt, parts.maker.rollout_stage.data_processor,
    )  # fmt: skip
