"""One engine beside one trainer model, and what the tests ask of the two."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from tiny_models import perturb

from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.prompts import PromptBatch
from lightrft_visual.experience.rollouts import collate
from lightrft_visual.experience.sampling import SamplingSettings
from lightrft_visual.models.loading import Checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.engine import RolloutEngine
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.rollout.parity import ParityGate, log_prob_difference
from lightrft_visual.rollout.stage import RolloutStage
from lightrft_visual.rollout.weight_sync import named_weights
from lightrft_visual.runtime.deepspeed import TrainEngine


class Rig:
    """actor: what would be trained; engine: what samples from a copy of its weights."""

    def __init__(self, checkpoint: Checkpoint, actor: Actor, engine: RolloutEngine):
        self.checkpoint, self.actor, self.engine = checkpoint, actor, engine
        self.stage = self.stage_with(checkpoint.processor)
        self.seed = 10

    def stage_with(self, processor) -> RolloutStage:
        data = MultimodalDataProcessor(self.checkpoint.tokenizer, processor, 1024)
        return RolloutStage(self.engine, data, run_seed=3)

    def weights(self, actor: Actor | None = None):
        engine = SimpleNamespace(module=actor or self.actor)
        return named_weights(TrainEngine(engine, zero_stage=0, max_norm=1.0))

    def sync(self) -> None:
        self.engine.update_weights(self.weights())

    def move(self, scale: float = 0.02) -> None:
        """Change all weights of the trainer, as an update would."""
        self.seed += 1
        perturb(self.actor.model, self.seed, scale)

    @torch.no_grad()
    def score(self, inputs: ModelInputs, rule, actor: Actor | None = None) -> torch.Tensor:
        return (actor or self.actor)(inputs, rule, with_entropy=False).log_probs

    def difference(self, batch: PromptBatch, settings: SamplingSettings, actor: Actor | None = None) -> float:
        """Largest |difference| of a token's log-prob between engine and trainer."""
        rollouts = self.stage.generate(batch, settings)
        samples = collate(rollouts, self.checkpoint.tokenizer.pad_token_id, self.checkpoint.vision)
        ours = self.score(ModelInputs.of(samples), settings.scoring, actor)
        return log_prob_difference(ours, samples.rollout_log_probs, samples.action_mask)

    def gate(self, stage: RolloutStage | None = None, tolerance: float = 1e-5) -> ParityGate:
        return ParityGate(
            stage=stage or self.stage,
            engine=self.engine,
            score=self.score,
            reload=self.sync,
            pad_id=self.checkpoint.tokenizer.pad_token_id,
            vision=self.checkpoint.vision,
            device=torch.device("cpu"),
            tolerance=tolerance,
        )

    def token_ids(self, batch: PromptBatch, settings: SamplingSettings) -> list[list[int]]:
        return [rollout.token_ids for rollout in self.stage.generate(batch, settings)]


@contextmanager
def environment_restored():
    """vLLM and torch's launcher read and set environment variables; what follows must not see them."""
    import os

    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
