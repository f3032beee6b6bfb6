"""The experience maker under LightRFT's name, with its constructor and calls: a façade over the makers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.advantages import get_advantage_calculator, get_advantages_and_returns
from ..experience.rollouts import PromptBatch
from ..experience.types import Experience, ExperienceDiffusion, ExperienceVL, Samples, SamplesVL
from ..rewards.engine import RewardComputationEngine
from ..rollout.multimodal import MultimodalDataProcessor
from ..runtime import collectives
from .vl.maker import MakerSettings, build_maker

if TYPE_CHECKING:
    from .diffusion.stages import Sampled

__all__ = [
    "FastExperienceMaker",
    "MakerSettings",
    "MultimodalDataProcessor",
    "RewardComputationEngine",
    "get_advantage_calculator",
]

T = torch.Tensor


class FastExperienceMaker:
    """Makes experience for one training step (the interface follows LightRFT).

    Args:
        actor, critic, initial_model: an `Actor`, `Critic` and a reference (a callable like the actor), plain or
            prepared by the strategy; critic and initial_model may be None.
        reward_model, remote_rm_url, reward_fn, reward_fn_label_map, reward_recipe: as in `RewardComputationEngine`.
        tokenizer, prompt_max_len: of the prompts.
        kl_controller: its `value` weighs the KL in the reward.
        strategy: has the `device` of forward passes.
        packing_samples: torch reward models see no padding.
        processor: the model's multimodal processor, None for text-only models.
        settings: what the contract has no argument for. An engine with an `experience_maker`, such as
            `DiffusersEngine`, holds the policy itself: it makes the experience.
    """

    def __init__(
        self,
        actor,
        critic,
        reward_model,
        initial_model,
        tokenizer,
        prompt_max_len: int,
        kl_controller,
        strategy,
        remote_rm_url=None,
        reward_fn=None,
        reward_fn_label_map=None,
        reward_recipe=None,
        packing_samples: bool = False,
        processor=None,
        settings: MakerSettings | None = None,
    ):
        settings = settings or MakerSettings()
        settings.rewards = settings.rewards or RewardComputationEngine(
            reward_model, remote_rm_url, None, reward_fn, reward_fn_label_map, reward_recipe, tokenizer, strategy,
            packing_samples,
        )  # fmt: skip
        self.rewards = settings.rewards
        self._numbered = 0  # prompts of all ranks that came as plain lists; seeds and groups go by their numbers
        if hasattr(settings.engine, "experience_maker"):
            self.maker = settings.engine.experience_maker(self.rewards)
        else:
            settings.data_processor = settings.data_processor or MultimodalDataProcessor(
                tokenizer, processor, prompt_max_len
            )
            settings.engine = settings.engine or _transformers_engine(actor, tokenizer, settings.micro_batch_size)
            self.maker = build_maker(
                actor, critic, initial_model, tokenizer, kl_controller, strategy.device, settings,
                vision=processor is not None,
            )  # fmt: skip

    @property
    def policy_version(self) -> int:
        """Of the weights that the engine has."""
        return self.maker.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Of new weights that were given to the engine."""
        self.maker.policy_version = version

    def make_experience_list(
        self,
        all_prompts: list[str],
        all_images: list | None = None,
        all_videos: list | None = None,
        all_references: list | None = None,
        all_labels: list | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience | ExperienceVL | ExperienceDiffusion]:
        """Experience of P prompts with n samples each, in padded micro-batches on the host. A collective.

        Args:
            all_prompts, all_images, all_videos, all_references, all_labels: one entry a prompt. Prompts of every call
                have numbers of their own, so equal ones are sampled anew.
            generate_kwargs: temperature, top_p, top_k, max_new_tokens, min_new_tokens, skip_special_tokens,
                first_token_temperature, gamma, lambd; defaults from the settings.

        Raises:
            ConfigError: unknown names, or any of them for an engine whose sampler has settings of its own.
        """
        batch = self._numbered_batch(all_prompts, all_images, all_videos, all_references, all_labels)
        return self.maker.experiences(batch, **generate_kwargs)

    def generate_samples(
        self,
        all_prompts: list[str],
        all_images: list | None = None,
        all_videos: list | None = None,
        all_references: list | None = None,
        all_labels: list | None = None,
        **generate_kwargs: Any,
    ) -> list[Samples | SamplesVL | Sampled]:
        """Unscored rollouts of P prompts in micro-batches; arguments as in `make_experience_list`."""
        batch = self._numbered_batch(all_prompts, all_images, all_videos, all_references, all_labels)
        return self.maker.samples(batch, **generate_kwargs)

    def get_advantages_and_returns(
        self, values: T, rewards: T, action_mask: T, gamma: float, lambd: float
    ) -> tuple[T, T]:
        """GAE of (B, A) values and token rewards: (advantages, returns), each (B, A)."""
        return get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)

    def _numbered_batch(self, prompts: list[str], *columns: list | None) -> PromptBatch:
        """With numbers that no other prompt has, on any rank or in an earlier call. A collective."""
        counts = collectives.all_gather_object(len(prompts))
        start = self._numbered + sum(counts[: collectives.rank()])
        self._numbered += sum(counts)
        return PromptBatch.of(prompts, *columns, ids=torch.arange(start, start + len(prompts)))


def _transformers_engine(actor, tokenizer, micro_batch_size: int):
    from ..rollout.hf import TransformersEngine

    return TransformersEngine(actor, tokenizer, micro_batch_size)
