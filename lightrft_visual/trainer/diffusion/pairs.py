"""Experience of offline Diffusion-DPO: pairs of a file, encoded, in the place of rollouts. No engine, no reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...algorithms.diffusion.denoising_batch import experience_of
from ...algorithms.diffusion.diffusion_dpo import PAIR
from ...data.preference_pairs import PreferencePairs
from ...data.prompt_sampling import distributed_k_repeat_indices
from ...data.prompts import PromptRow
from ...experience.diffusion_sampling import SamplingResult
from ...experience.types import ExperienceDiffusion
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ...runtime.phase_timer import PhaseTimer
from ..hooks import StepData
from .maker import DiffusersEngine
from .stages import DiffusionSampling, DrawingBatch, drawing_batch

T = torch.Tensor


@dataclass
class PairExperience:
    """Draws pairs and makes experience of them. sampling: for prompts, sizes and the schedule of timesteps.

    pairs_per_rank: of a step. rewards, engine: of evaluations.
    """

    pairs: PreferencePairs
    sampling: DiffusionSampling
    pairs_per_rank: int
    rewards: RewardComputationEngine
    engine: DiffusersEngine
    timer: PhaseTimer

    def generate(self, seed: int, step: int) -> list[ExperienceDiffusion]:
        """This rank's pairs of one step, in micro-batches: finished latents (B, 1, …), advantages 1 of chosen and -1 of
        rejected images, and as group the pair."""
        with self.timer.phase("encode"):
            return self._encoded(seed, step)

    def score(self, encoded: list[ExperienceDiffusion]) -> list[ExperienceDiffusion]:
        """Which image is the better one is known."""
        return encoded

    def make_experience(self, encoded: list[ExperienceDiffusion]) -> StepData:
        """What `generate` made."""
        return StepData(encoded)

    def _encoded(self, seed: int, step: int) -> list[ExperienceDiffusion]:
        drawn = distributed_k_repeat_indices(
            dataset_length=len(self.pairs), batch_size=self.pairs_per_rank, repeats_per_prompt=1,
            world_size=collectives.world_size(), rank=collectives.rank(), seed=seed,
        ).local_indices  # fmt: skip
        pairs = [self.pairs[index] for index in drawn]
        requests = drawing_batch(pairs, drawn, first=collectives.rank() * self.pairs_per_rank)
        self.sampling.remember(requests)
        size = max(1, self.sampling.settings.micro_batch_size // PAIR)
        parts = [slice(at, at + size) for at in range(0, len(requests), size)]
        return [self._micro(requests.select(part), pairs[part], step) for part in parts]

    @torch.no_grad()
    def _micro(self, requests: DrawingBatch, pairs: list[PromptRow], step: int) -> ExperienceDiffusion:
        settings, sampling = self.sampling.settings, self.sampling
        images = [image for pair in pairs for image in pair.images]
        latents = sampling.model.policy.encode_images(images, settings.height, settings.width)
        timesteps, sigmas = sampling.sampler.schedule(sampling.model, sampling.latent_shape)
        conditions = {name: each.repeat_interleave(PAIR, dim=0) for name, each in sampling.conditions(requests).items()}
        sides = torch.arange(PAIR).repeat(len(requests))
        experience = experience_of(
            SamplingResult(latents, timesteps, sigmas),
            conditions,
            group_id=requests.sample_ids.repeat_interleave(PAIR),
            sample_id=requests.sample_ids.repeat_interleave(PAIR) * PAIR + sides,
            policy_version=step,
        )
        experience.advantages = 1.0 - 2.0 * sides
        return experience
