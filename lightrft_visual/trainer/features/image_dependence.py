"""How many tokens of the rollouts depend on the image: scored with it, and again with all of its patches hidden."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...experience.rollouts import Rollout, ScoringRule, collate
from ...experience.types import ModelInputs
from ...models.vlm.actor import ActorOutput
from ...models.vlm.masked_images import beside_hidden, halves
from ...observe.metrics import MetricsAccumulator
from ...runtime import collectives
from ...runtime.sequence import own_scores
from ..hooks import StepData, StepHook
from .dynamic_sampling import by_group

NAME = "image_dependence"
MOVED = 0.1  # nats by which the log-prob of a sampled token, or the entropy, must move
PROMPTS = 16  # measured each time, on every rank
MAX_LABELS = 24  # with columns of their own


@dataclass
class ImageDependenceHook(StepHook):
    """Measures a step's rollouts now and then; one response of some prompts goes through the model twice.

    micro_batch_size: samples of a forward. every: steps between two measurements. labels: of all prompts; up to
    MAX_LABELS of them get columns of their own.
    """

    actor: Callable[..., ActorOutput]
    rule: ScoringRule
    pad_id: int
    device: torch.device
    micro_batch_size: int
    every: int
    labels: set[str | None]

    def on_experience(self, step: StepData) -> StepData:
        """The first step is measured, and every `every` steps one after it."""
        if self.context.step() % self.every == 0:
            with self.context.timer.phase("forward"):
                self.measure(step.rollouts, step.metrics)
        return step

    @torch.no_grad()
    def measure(self, rollouts: Sequence[Rollout], metrics: MetricsAccumulator) -> None:
        """Add the share of tokens that depend on the image: `image_dependence` over responses to prompts with images or
        videos, and `image_dependence_<label>` over all of a label. Every rank calls it, with one rollout or more."""
        first = [group[0] for group in by_group(rollouts).values()]
        chosen, size = first[:PROMPTS], max(1, self.micro_batch_size // 2)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        most = int(collectives.all_reduce_max(torch.tensor(float(len(parts)), device=self.device)).item())
        for number in range(most):  # a rank with fewer parts keeps step: ZeRO-3 gathers weights on all at once
            self._measure_part(parts[number % len(parts)], metrics if number < len(parts) else MetricsAccumulator())

    def _measure_part(self, chosen: list[Rollout], metrics: MetricsAccumulator) -> None:
        inputs = ModelInputs.of(collate(chosen, self.pad_id, vision=True)).to(self.device)
        shown, hidden = halves(self.actor(beside_hidden(inputs, 1.0, seed=0), self.rule))
        moved = (shown.log_probs - hidden.log_probs).abs() > MOVED
        moved |= (shown.entropy - hidden.entropy).abs() > MOVED
        for rollout, own, mask in zip(chosen, moved.float(), inputs.action_mask):
            if rollout.prompt.images or rollout.prompt.videos:
                metrics.add_mean(NAME, own, mask)
            if rollout.prompt.label is not None and len(self.labels) <= MAX_LABELS:
                metrics.add_mean(f"{NAME}_{rollout.prompt.label}", own, mask)


def build(parts: Any) -> ImageDependenceHook | None:
    """For `image_dependence_every`, of a model that sees and does not draw."""
    every, checkpoint = parts.config.rollout.image_dependence_every, parts.checkpoint
    if every == 0 or checkpoint.processor is None or checkpoint.family.draws:
        return None
    return ImageDependenceHook(
        own_scores(parts.actor, parts.strategy.sequence),
        parts.maker.settings.sampling.scoring,
        checkpoint.tokenizer.pad_token_id,
        parts.strategy.device,
        parts.maker.settings.micro_batch_size,
        every,
        parts.dataset.labels,
    )
