"""From rows of prompts to diffusion experience: sampling, decoding, rewards, group advantages."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...algorithms.diffusion.advantages import gathered_group_advantages
from ...algorithms.diffusion.diffusion_dpo import gathered_pairs
from ...algorithms.diffusion.rows import experience_of
from ...batches.diffusion_sampling import KeptSteps
from ...batches.experience import ExperienceDiffusion
from ...batches.prompts import PromptBatch
from ...config.diffusion import DiffusionAlgorithmConfig
from ...errors import ConfigError
from ...models.weight_copies import WeightCopy
from ...rewards.batch import RewardOutput
from ...rewards.engine import RewardComputationEngine
from ...strategy.phase_timer import PhaseTimer
from .graphs import Graphed, RolloutGraphs
from .stages import DiffusionSampling, DrawingBatch, Sampled

T = torch.Tensor


@dataclass
class DiffusersEngine:
    """The `diffusers` engine: draws with the policy under training.

    old: rollouts are drawn with these weights where the algorithm keeps an old policy.
    """

    sampling: DiffusionSampling
    n_samples_per_prompt: int
    old: WeightCopy | None = None

    def rows(self, batch: PromptBatch) -> DrawingBatch:
        """Every prompt of the batch `n_samples_per_prompt` times, prompt-major."""
        n = self.n_samples_per_prompt
        columns = (batch.prompts, batch.images, batch.labels, batch.references, batch.metadata)
        repeated = [[cell for cell in column for _ in range(n)] for column in columns]
        ids = batch.ids.repeat_interleave(n)
        return DrawingBatch(*repeated, group_ids=ids, sample_ids=ids * n + torch.arange(n).repeat(len(batch)))

    def experience_maker(
        self, rewards: RewardComputationEngine, algorithm: DiffusionAlgorithmConfig, timer: PhaseTimer | None = None
    ) -> DiffusionExperienceMaker:
        """What makes experience with this engine; `FastExperienceMaker` asks for it."""
        return DiffusionExperienceMaker(self, rewards, algorithm, timer)

    def generate(self, rows: DrawingBatch, step: int, graphs: RolloutGraphs | None = None) -> list[Sampled]:
        """Rollouts by micro-batch, in the order of the rows. graphs: those that are kept."""
        with self.old.swapped() if self.old is not None else nullcontext():
            return self.sampling.draw(rows, step, graphs=graphs)


@dataclass
class DrawnExperience:
    """What the maker makes of a step's rows on this rank.

    experiences: micro-batches with rewards and advantages, in the order of the rows. media (B, 3, …) in 0..1 on the
    host. metrics: numbers of the whole batch, the same on every rank. kept: graphs of the experiences' steps, or empty.
    """

    experiences: list[ExperienceDiffusion]
    media: T
    metrics: dict[str, float]
    kept: list[KeptSteps]

    @property
    def batches(self) -> list[ExperienceDiffusion] | list[Graphed]:
        """What is trained on."""
        return [*map(Graphed, self.experiences, self.kept)] if self.kept else self.experiences


@dataclass
class DiffusionExperienceMaker:
    """Sequences the stages for models that draw: sampling and decoding, rewards, advantages within prompts."""

    engine: DiffusersEngine
    rewards: RewardComputationEngine
    algorithm: DiffusionAlgorithmConfig
    timer: PhaseTimer | None = None
    max_staleness: int = 0  # 0 looks at no sample's age

    def make(self, rows: DrawingBatch, step: int, graphs: RolloutGraphs | None = None) -> DrawnExperience:
        """Experience of one step's rows; `step` is the policy's version, by which noise is drawn. A collective."""
        with self._phase("generate"):
            drawn = self.engine.generate(rows, step, graphs)
        media = torch.cat([each.media for each in drawn]).cpu()
        with self._phase("reward"):
            scored = score_samples(self.rewards, rows, media)
        experiences, start = [], 0
        for each in drawn:
            part = slice(start, start + len(each.media))
            experiences.append(scored_experience(each, rows.select(part), rewards_at(scored, part), step))
            start = part.stop
        counts = scored.counts | self._leave_out_stale(experiences, step)
        kept = [each.result.kept for each in drawn if each.result.kept is not None]
        return DrawnExperience(experiences, media, counts | self._advantages(experiences, scored), kept)

    def _leave_out_stale(self, experiences: list[ExperienceDiffusion], step: int) -> dict[str, float]:
        """Samples of a policy that is more than `max_staleness` versions old become invalid; their share."""
        if not self.max_staleness:
            return {}
        stale = [step - each.policy_version > self.max_staleness for each in experiences]
        for each, old in zip(experiences, stale):
            each.valid = each.valid & ~old
        return {"dropped_stale_share": torch.cat(stale).float().mean().item()}

    def experiences_of(self, batch: PromptBatch, step: int, **generate_kwargs: Any) -> list[ExperienceDiffusion]:
        """`make` for prompts with ids. Raises ConfigError for generation arguments: the sampler has its settings."""
        if generate_kwargs:
            raise ConfigError(f"the diffusers engine takes no generation arguments: {', '.join(generate_kwargs)}")
        return self.make(self.engine.rows(batch), step).experiences

    def draw(self, batch: PromptBatch, step: int) -> list[Sampled]:
        """Unscored images or videos of prompts with ids, in micro-batches."""
        return self.engine.generate(self.engine.rows(batch), step)

    def _advantages(self, experiences: list[ExperienceDiffusion], scored: RewardOutput) -> dict[str, float]:
        """Advantages within prompts; or which pair a sample belongs to, as its group, and 1 or -1 for its side."""
        judged = [
            torch.cat([each.info["reward"] for each in experiences]),
            torch.cat([each.group_id for each in experiences]),
            torch.cat([each.valid for each in experiences]),
        ]
        sizes = [len(each.latents) for each in experiences]
        if self.algorithm.entry.coupled == "pairs":
            signs, pairs, metrics = gathered_pairs(*judged)
            for each, sign, pair in zip(experiences, signs.split(sizes), pairs.split(sizes)):
                each.advantages, each.group_id = sign, pair
            return metrics
        decoupled = None
        if self.algorithm.gdpo:
            whole = rewards_at(scored, slice(None))
            decoupled = whole.components, whole.weights
        advantages, metrics = gathered_group_advantages(
            *judged,
            global_std=self.algorithm.global_std,
            clip=self.algorithm.adv_clip_max,
            decoupled=decoupled,
        )
        for each, part in zip(experiences, advantages.split(sizes)):
            each.advantages = part
        return metrics

    def _phase(self, name: str):
        return self.timer.phase(name) if self.timer is not None else nullcontext()


def score_samples(rewards: RewardComputationEngine, rows: DrawingBatch, media: T) -> RewardOutput:
    """Rewards of media (B, 3, H, W) or (B, 3, T, H, W) for their rows."""
    kind = "videos" if media.dim() == 5 else "images"
    return rewards.score_media(
        rows.prompts,
        **{kind: list(media)},
        labels=rows.labels,
        references=rows.references,
        metadata=rows.metadata,
        source_images=rows.images,
        ids=rows.sample_ids.tolist(),
        group_ids=rows.group_ids.tolist(),
    )


def rewards_at(output: RewardOutput, part: slice) -> RewardOutput:
    """The rewards of some samples, on the host."""
    components, weights = (
        {name: values[part].cpu() for name, values in each.items()} for each in (output.components, output.weights)
    )
    return RewardOutput(output.score[part].cpu(), components, output.valid[part].cpu(), weights=weights)


def scored_experience(drawn: Sampled, rows: DrawingBatch, scored: RewardOutput, step: int) -> ExperienceDiffusion:
    """The experience of one micro-batch; advantages are still to come."""
    version = step if drawn.policy_version is None else drawn.policy_version
    experience = experience_of(
        drawn.result, drawn.conditions, group_id=rows.group_ids, sample_id=rows.sample_ids, policy_version=version,
        shared=drawn.shared,
    )  # fmt: skip
    experience.valid = scored.valid
    experience.info |= {"reward": scored.score, "reward_metrics": scored.components}
    return experience
