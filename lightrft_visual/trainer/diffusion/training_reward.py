"""The reward that Reward FL trains on: which one it is, and what can be known of it before any model loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...algorithms.diffusion.reward_fl import DifferentiableScore
from ...config import registry
from ...config.diffusion import DiffusionRunConfig
from ...data.drawing_prompts import FIRST_FRAME, DrawPrompts
from ...data.prompts import PromptRow
from ...errors import ConfigError, RewardError
from ...rewards.differentiable import PixelReward, check_scores, load_differentiable, with_gradient
from .stages import DrawingBatch, drawing_batch


@dataclass(frozen=True)
class TrainingReward:
    """A differentiable reward as a function of (media, rows) to a `DifferentiableScore`; name: as the run gives it."""

    name: str
    function: PixelReward

    @classmethod
    def from_config(cls, config: DiffusionRunConfig) -> TrainingReward | None:
        """Reward FL's; None for the other algorithms. ConfigError where a run on its own prompts names none."""
        algorithm = config.algorithm
        if algorithm.entry.trains_on != "reward":
            return None
        name = algorithm.differentiable_reward
        prompts = config.data.prompt_data
        if name is None and prompts in registry.drawing_tasks:
            name = registry.drawing_tasks[prompts].training_reward
        if name is None:
            raise ConfigError(
                f"{algorithm.entry.name} trains on the gradient of --differentiable_reward, and none is given. What "
                "--reward_fn, reward.components.NAME=WEIGHT and the like name has no gradient and scores evaluations "
                f"only. {with_gradient()}"
            )
        return cls(name, load_differentiable(name, algorithm.differentiable_kwargs))

    def __call__(self, media: torch.Tensor, requests: DrawingBatch) -> DifferentiableScore:
        metadata = [_with_first_frame(sample, images) for sample, images in zip(requests.metadata, requests.images)]
        scores, valid = self.function(media, requests.prompts, metadata)
        check_scores(scores, valid, len(requests), self.name)
        return DifferentiableScore(scores, valid)

    def check_prompts(self, prompts: DrawPrompts, most_invalid: float) -> None:
        """Raise ConfigError where the reward says of more than this share of the prompts, or of all, that it could
        score no image of them."""
        knows = getattr(self.function, "knows", None)
        if knows is None:
            return
        unknown = [own for own in prompts.rows if not knows(own.prompt, _with_first_frame(own.metadata, own.images))]
        share = len(unknown) / len(prompts)
        if share >= 1 or share > most_invalid:
            raise ConfigError(
                f"differentiable_reward {self.name} cannot score {len(unknown)} of {len(prompts)} prompts "
                f"({_first(unknown)}): it needs {self.function.needs}. {with_gradient()}"
            )

    def check_gradient(self, sample: PromptRow, shape: tuple[int, ...], device: torch.device) -> None:
        """Score noise of this shape (1, 3, H, W) or (1, 3, T, H, W) for a prompt. RewardError where the reward fails,
        or its score has no gradient."""
        media = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        try:
            self(media, drawing_batch([sample], [0], first=0))
        except RewardError as error:
            raise RewardError(f"{error}\nit was given noise before any model is loaded. {with_gradient()}") from error


def _first(samples: list[PromptRow]) -> str:
    return f"the first is {ascii(samples[0].prompt)[:80]}"


def _with_first_frame(metadata: dict[str, Any], images: list[Any]) -> dict[str, Any]:
    """Metadata of a row, in which the first frame of image-to-video, or the image to edit, is `input_image`."""
    return {FIRST_FRAME: images[0]} | metadata if images else metadata
