"""From rollouts to experience: rewards, forward passes by role, KL, and what a batch carries into training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...algorithms.kl import compute_approx_kl
from ...experience.model_inputs import ModelInputs
from ...experience.prompts import PromptBatch
from ...experience.rollouts import Rollouts
from ...experience.sampling import ScoringRule
from ...experience.types import Experience, ExperienceVL
from ...rewards.early import EarlyScores
from ...rewards.engine import RewardComputationEngine
from ...runtime.offload import OffloadedModule

T = torch.Tensor


@dataclass
class RewardStage:
    """Scores rollouts; each takes its reward, validity and components with it. chunk: samples of a remote request."""

    rewards: RewardComputationEngine
    chunk: int

    def begin(self, prompts: PromptBatch, n: int) -> EarlyScores | None:
        """Remote scorers at work on n samples a prompt that are still to be generated; None without any."""
        return self.rewards.begin([label for label in prompts.labels for _ in range(n)], self.chunk)

    def run(self, rollouts: Rollouts) -> None:
        """Waits for what `begin` has started. Raises as `RewardComputationEngine.compute_rewards`."""
        output = self.rewards.score_rollouts(rollouts, self.chunk, early=rollouts.pending)
        scores, valid = output.score.tolist(), output.valid.tolist()
        components = {name: values.tolist() for name, values in output.components.items()}
        weights = {name: values.tolist() for name, values in output.weights.items()}
        for index, rollout in enumerate(rollouts):
            rollout.reward, rollout.valid = scores[index], valid[index]
            rollout.components = {name: values[index] for name, values in components.items()}
            rollout.weights = {name: values[index] for name, values in weights.items()}
        rollouts.settle(output.counts)


@dataclass
class ForwardStage:
    """Scores micro-batches with each model in turn, so that each is on the accelerator once a step.

    Micro-batches lie on the host; one at a time goes to `device`, and what comes out goes back to the host.
    actor(inputs, rule) returns log_probs and entropy (None: the training forward will give them);
    reference(inputs, rule) the reference's log_probs, alone or as an actor's (None: no KL); critic(inputs) values (None
    without one). others: (inputs, rule) to what goes into a field of the experience, by its name. All are (B, A).
    """

    actor: Callable[..., Any] | None
    reference: Callable[..., T] | None
    critic: Callable[..., T] | None
    device: torch.device
    kl_estimator: str = "k1"
    others: Mapping[str, Callable[..., T]] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, batches: Sequence[Experience | ExperienceVL], rule: ScoringRule) -> None:
        """Fill action_log_probs, action_entropy, base_action_log_probs, values, kl and the fields of `others` of padded
        micro-batches."""
        inputs = [ModelInputs.of(each) for each in batches]
        if self.actor is not None:
            for experience, each in zip(batches, inputs):
                output = self.actor(each.to(self.device), rule)
                experience.action_log_probs = output.log_probs.cpu()
                experience.action_entropy = output.entropy.cpu()
        if self.reference is not None:
            with self.reference if isinstance(self.reference, OffloadedModule) else nullcontext():
                for experience, each in zip(batches, inputs):
                    scored = self.reference(each.to(self.device), rule)
                    experience.base_action_log_probs = getattr(scored, "log_probs", scored).cpu()
        for name, score in self.others.items():
            for experience, each in zip(batches, inputs):
                setattr(experience, name, score(each.to(self.device), rule).cpu())
        if self.critic is not None:
            for experience, each in zip(batches, inputs):
                experience.values = self.critic(each.to(self.device)).cpu()
        for experience in batches:
            add_kl(experience, self.kl_estimator)


def add_kl(experience: Experience | ExperienceVL, estimator: str) -> None:
    """Fill `kl` (B, A) and info['kl'] (B), the mean over a response's tokens; zero without a reference model."""
    mask = experience.action_mask
    if experience.base_action_log_probs is None:
        experience.kl = torch.zeros(mask.shape)
    else:
        kl = compute_approx_kl(experience.action_log_probs, experience.base_action_log_probs, estimator)
        experience.kl = kl.masked_fill(~mask, 0.0)
    experience.info["kl"] = experience.kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
