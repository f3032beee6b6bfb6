"""From scored rollouts to experience: forward passes by role, KL, and what a batch of samples carries into training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...algorithms.kl import compute_approx_kl
from ...batches.experience import Experience, ExperienceVL
from ...batches.model_inputs import ModelInputs
from ...batches.samples import Samples, SamplesVL
from ...batches.sampling import ScoringRule

T = torch.Tensor


@dataclass
class ForwardStage:
    """Scores micro-batches with each model in turn, so that each is on the accelerator once a step.

    actor(inputs, rule) returns log_probs and entropy; reference(inputs, rule) the reference's log_probs (None: no KL);
    critic(inputs) values (None without one). All (B, A).
    """

    actor: Callable[..., Any]
    reference: Callable[..., T] | None
    critic: Callable[..., T] | None
    device: torch.device
    kl_estimator: str = "k1"

    @torch.no_grad()
    def run(self, samples: Sequence[Samples], rule: ScoringRule) -> list[Experience | ExperienceVL]:
        """One experience per micro-batch, on the host."""
        inputs = [ModelInputs.of(each).to(self.device) for each in samples]
        outputs = [self.actor(each, rule) for each in inputs]
        experiences = [to_experience(each) for each in samples]
        for experience, output in zip(experiences, outputs):
            experience.action_log_probs = output.log_probs.cpu()
            experience.action_entropy = output.entropy.cpu()
        if self.reference is not None:
            for experience, each in zip(experiences, inputs):
                experience.base_action_log_probs = self.reference(each, rule).cpu()
        if self.critic is not None:
            for experience, each in zip(experiences, inputs):
                experience.values = self.critic(each).cpu()
        for experience in experiences:
            add_kl(experience, self.kl_estimator)
        return experiences


def to_experience(samples: Samples) -> Experience | ExperienceVL:
    """The experience of a scored micro-batch; log-probs, values, KL and advantages are still to come."""
    info: dict[str, Any] = {
        "reward": samples.rewards,
        "response_length": samples.response_length.float(),
        "total_length": samples.total_length.float(),
        "truncated": samples.truncated.float(),
        "reward_metrics": dict(samples.reward_metrics),
    }
    shared = {
        "sequences": samples.sequences,
        "action_log_probs": None,
        "base_action_log_probs": None,
        "values": None,
        "returns": None,
        "advantages": None,
        "attention_mask": samples.attention_mask,
        "action_mask": samples.action_mask,
        "info": info,
        "rollout_log_probs": samples.rollout_log_probs,
        "group_id": samples.group_ids,
        "sample_id": samples.sample_ids,
        "policy_version": torch.full_like(samples.group_ids, samples.policy_version),
        "valid": samples.reward_valid,
    }
    if not isinstance(samples, SamplesVL):
        return Experience(**shared)
    # raw_images stay behind: the reward has seen them, and training reads patches.
    return ExperienceVL(
        **shared, vision=samples.vision, image_counts=samples.image_counts, video_counts=samples.video_counts
    )


def add_kl(experience: Experience | ExperienceVL, estimator: str) -> None:
    """Fill `kl` (B, A) and info['kl'] (B), the sum over a response; zero without a reference model."""
    mask = experience.action_mask
    if experience.base_action_log_probs is None:
        experience.kl = torch.zeros_like(experience.action_log_probs)
    else:
        kl = compute_approx_kl(experience.action_log_probs, experience.base_action_log_probs, estimator)
        experience.kl = kl.masked_fill(~mask, 0.0)
    experience.info["kl"] = experience.kl.sum(dim=1)
