"""The experience maker under LightRFT's name, with its constructor and calls: a façade over the makers of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.advantages import finished_gae, get_advantage_calculator
from ..config import registry
from ..data.rows import as_source_list
from ..errors import ConfigError, DataError
from ..experience.rollouts import PromptBatch
from ..experience.types import Experience, ExperienceDiffusion, ExperienceVL, Samples, SamplesVL
from ..rewards.engine import RewardComputationEngine, model_device
from ..rollout.multimodal import MultimodalDataProcessor
from ..runtime import collectives
from .vl.maker import ExperienceMaker, MakerSettings

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
        strategy: has the `device` of forward passes. Without `settings`, LightRFT's `args` and `config` of a strategy
            say what they hold: n_samples_per_prompt, advantage_estimator, micro_rollout_batch_size and so on.
        packing_samples: torch reward models see no padding.
        processor: the model's multimodal processor, None for text-only models.
        settings: what the contract has no argument for. An engine with an `experience_maker`, such as
            `DiffusersEngine`, holds the policy itself: it makes the experience.

    Raises:
        ConfigError: an estimator that compares the samples of a prompt, and one sample a prompt.
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
        lightrft = registry.service("lightrft")
        settings = settings or (MakerSettings() if lightrft is None else lightrft.maker_settings(strategy))
        settings = replace(settings)  # the caller's is its own
        tokenizer = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
        given = {"reward_model": reward_model, "remote_rm_url": remote_rm_url, "reward_fn": reward_fn}
        for name, value in (given | {"reward_recipe": reward_recipe}).items():
            if settings.rewards is not None and value is not None:
                raise ConfigError(f"settings.rewards scores alone, and {name} is given beside it: leave one out")
        settings.rewards = settings.rewards or RewardComputationEngine(
            reward_model, remote_rm_url, None, reward_fn, reward_fn_label_map, reward_recipe, tokenizer, strategy,
            packing_samples,
        )  # fmt: skip
        self.rewards, self._settings, self._tokenizer = settings.rewards, settings, tokenizer
        self._numbered = 0  # prompts of all ranks that came as plain lists; seeds and groups go by their numbers
        if hasattr(settings.engine, "experience_maker"):
            self.maker = settings.engine.experience_maker(self.rewards)
        else:
            if settings.sampling.n < 2 and settings.algorithm.estimator.grouped:
                raise ConfigError(
                    f"advantage_estimator {settings.algorithm.advantage_estimator} compares samples of one prompt: "
                    f"n_samples_per_prompt is {settings.sampling.n}, it must be at least 2"
                )
            settings.keep_images = settings.keep_images or settings.rewards.shows_images
            settings.data_processor = settings.data_processor or MultimodalDataProcessor(
                tokenizer, processor, prompt_max_len
            )
            if settings.engine is None:
                from ..rollout.hf import TransformersEngine

                settings.engine = TransformersEngine(actor, tokenizer, settings.micro_batch_size)
            self.maker = ExperienceMaker(
                actor, critic, initial_model, tokenizer, kl_controller,
                getattr(strategy, "device", None) or torch.device(model_device()), settings,
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
                first_token_temperature, gamma, lambd; defaults from the settings. Also LightRFT's do_sample,
                max_length, pad_token_id and eos_token_id.

        Raises:
            ConfigError: unknown names, or any of them for an engine whose sampler has settings of its own.
        """
        batch, counts = self._numbered_batch(all_prompts, all_images, all_videos, all_references, all_labels)
        if not any(counts):
            return []
        if not all(counts):
            raise DataError(
                f"rank {counts.index(0)} has no prompts and others have: give each rank one or more, or none"
            )
        return self.maker.experiences(batch, **self._arguments(generate_kwargs))

    def generate_samples(
        self,
        all_prompts: list[str],
        all_images: list | None = None,
        all_videos: list | None = None,
        images_num: list[int] | None = None,
        videos_num: list[int] | None = None,
        all_references: list | None = None,
        all_labels: list | None = None,
        **generate_kwargs: Any,
    ) -> list[Samples | SamplesVL | Sampled]:
        """Unscored rollouts of P prompts in micro-batches.

        Args:
            all_prompts, all_images, all_videos, all_references, all_labels, generate_kwargs: as in
                `make_experience_list`.
            images_num, videos_num: how many each prompt should have; checked where given.

        Raises:
            ConfigError: as `make_experience_list`. DataError: a prompt has another number of images or videos.
        """
        batch, _ = self._numbered_batch(all_prompts, all_images, all_videos, all_references, all_labels)
        for kind, cells, wanted in (("image", batch.images, images_num), ("video", batch.videos, videos_num)):
            found = [len(as_source_list(cell, kind)) for cell in cells]
            if wanted is not None and list(wanted) != found:
                raise DataError(f"{kind}s_num is {list(wanted)}, the prompts have {found}")
        return self.maker.samples(batch, **self._arguments(generate_kwargs))

    def get_advantages_and_returns(
        self, values: T, rewards: T, action_mask: T | None, gamma: float, lambd: float
    ) -> tuple[T, T, float]:
        """GAE: advantages and returns (B, A), and the share of clipped tokens; see `finished_gae`. A collective with
        advantages_norm.

        Args:
            values: (B, A) of the critic.
            rewards: (B, A) of the tokens.
            action_mask: (B, A); None: every position is an action.
            gamma: discount.
            lambd: 0: one step ahead of the critic; 1: the whole return.
        """
        mask = torch.ones_like(values).bool() if action_mask is None else action_mask
        return finished_gae(values, rewards, mask, gamma, lambd, self._settings.algorithm)

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The maker's generation arguments."""
        lightrft = registry.service("lightrft")
        return given if lightrft is None else lightrft.sampling_arguments(given, self._tokenizer)

    def _numbered_batch(self, prompts: list[str], *columns: list | None) -> tuple[PromptBatch, list[int]]:
        """With numbers that no other prompt has, on any rank or in an earlier call; and how many each rank has. A
        collective."""
        counts = collectives.all_gather_object(len(prompts))
        start = self._numbered + sum(counts[: collectives.rank()])
        self._numbered += sum(counts)
        return PromptBatch.of(prompts, *columns, ids=torch.arange(start, start + len(prompts))), counts
