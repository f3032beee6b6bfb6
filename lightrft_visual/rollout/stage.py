"""The rollout stage: a batch of prompts in, n responses to each out, checked against what the trainer will score."""

from __future__ import annotations

from ..batches.prompts import PromptBatch
from ..batches.rollouts import PromptFeatures, Rollout
from ..batches.sampling import Completion, SamplingSettings
from ..errors import RolloutError
from ..strategy.seeding import derive_seed
from .engine import RolloutEngine
from .multimodal import MultimodalDataProcessor


class RolloutStage:
    """Generates with an engine; prompts are preprocessed once, whatever n is."""

    def __init__(self, engine: RolloutEngine, data_processor: MultimodalDataProcessor, run_seed: int):
        self.engine, self.data_processor, self.run_seed = engine, data_processor, run_seed

    def generate(
        self, batch: PromptBatch, settings: SamplingSettings, *, policy_version: int = 0, purpose: str = "rollout"
    ) -> list[Rollout]:
        """P * n rollouts, prompt-major. Seeds come from (run seed, purpose, prompt id) alone.

        Raises DataError for prompts that cannot be used, and RolloutError when the engine's prompt ids are not the
        trainer's (then images would land on other tokens).
        """
        prompts = self.data_processor.features(batch)
        for prompt in prompts:
            prompt.seed = derive_seed(self.run_seed, purpose, prompt.group_id)
        completions = self.engine.generate(prompts, settings)
        rollouts = []
        for prompt, responses in zip(prompts, completions, strict=True):
            for place, response in enumerate(responses):
                check_prompt_ids(prompt, response)
                rollouts.append(
                    Rollout(
                        prompt,
                        response.token_ids,
                        response.log_probs,
                        response.text,
                        response.truncated,
                        sample_id=prompt.group_id * settings.n + place,
                        policy_version=policy_version,
                    )
                )
        return rollouts


def check_prompt_ids(prompt: PromptFeatures, response: Completion) -> None:
    """Raise RolloutError unless the engine saw exactly the prompt that the trainer will score."""
    ours, theirs = prompt.token_ids, response.prompt_token_ids
    if ours == theirs:
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    raise RolloutError(
        f"prompt {prompt.group_id}: the engine's prompt has {len(theirs)} tokens, the trainer's {len(ours)}, and they "
        f"differ from token {place} on. Likely cause: expansion (the engine and the processor turn an image into "
        "different placeholder tokens; check the processor settings, min_pixels and max_pixels)"
    )
