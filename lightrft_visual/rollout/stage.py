"""The rollout stage: a batch of prompts in, n responses to each out, checked against what the trainer will score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..batches.prompts import PromptBatch
from ..batches.rollouts import PromptFeatures, Rollout
from ..batches.sampling import Completion, SamplingSettings
from ..errors import RolloutError
from ..strategy.seeding import derive_seed
from .distortion import Distortion, noisy_images
from .engine import RolloutEngine
from .multimodal import MultimodalDataProcessor

Taker = Callable[[int, list[Rollout]], None]
Given = Callable[[int, list[Completion]], None]


class RolloutStage:
    """Generates with an engine; prompts are preprocessed once, whatever n is."""

    def __init__(self, engine: RolloutEngine, data_processor: MultimodalDataProcessor, run_seed: int):
        self.engine, self.data_processor, self.run_seed = engine, data_processor, run_seed

    def generate(
        self,
        batch: PromptBatch,
        settings: SamplingSettings,
        *,
        policy_version: int = 0,
        purpose: str = "rollout",
        finished: Taker | None = None,
        seed: int | None = None,
        distortion: Distortion | None = None,
    ) -> list[Rollout]:
        """P * n rollouts, prompt-major. Seeds come from (seed, by default the run's, purpose, prompt id) alone.

        finished(first, rollouts) gets the rollouts of each prompt, and the number of the first of them, once all of
        them are made; engines that do not tell give all of them at the end. distortion: the last responses of a prompt
        are drawn from noisy copies of its images, as strong as it says for step number `policy_version`.

        Raises DataError for prompts that cannot be used, and RolloutError when the engine's prompt ids are not the
        trainer's (then images would land on other tokens).
        """
        prompts = self._seeded(batch, purpose, seed)
        made: dict[int, list[Rollout]] = {number: [] for number in range(len(prompts))}
        noisy = 0 if distortion is None else distortion.distorted(settings.n)

        def take(number: int, responses: list[Completion], distorted: bool = False) -> None:
            own = made[number]
            first = prompts[number].group_id * settings.n + len(own)
            own += _rollouts(prompts[number], responses, first, policy_version, distorted)
            if finished is not None and len(own) == settings.n:
                finished(number * settings.n, own)

        self._draw(prompts, replace(settings, n=settings.n - noisy), take, finished is not None)
        if noisy:
            copies = self._noisy_copies(prompts, distortion.strength(policy_version))
            seen = [bool(prompt.images) for prompt in prompts]
            self._draw(
                copies,
                replace(settings, n=noisy),
                lambda number, responses: take(number, responses, seen[number]),
                finished is not None,
            )
        return [rollout for number in range(len(prompts)) for rollout in made[number]]

    def announce(self, batch: PromptBatch, settings: SamplingSettings) -> None:
        """Let an engine that can begin on a batch for which `generate` will ask later."""
        batch.prepared = self._seeded(batch, "rollout", None)
        self.engine.begin(batch.prepared, settings)

    def _seeded(self, batch: PromptBatch, purpose: str, seed: int | None) -> list[PromptFeatures]:
        prompts = self.data_processor.features(batch) if batch.prepared is None else batch.prepared
        for prompt in prompts:
            prompt.seed = derive_seed(self.run_seed if seed is None else seed, purpose, prompt.group_id)
        return prompts

    def _draw(self, prompts: list[PromptFeatures], settings: SamplingSettings, take: Given, at_once: bool) -> None:
        """take(number, responses) for each prompt; at_once: as soon as its responses are there, if the engine can."""
        given: set[int] = set()

        def pass_on(number: int, responses: list[Completion]) -> None:
            given.add(number)
            take(number, responses)

        if at_once and getattr(self.engine, "streams", False):
            completions = self.engine.generate(prompts, settings, pass_on)
        else:
            completions = self.engine.generate(prompts, settings)
        for number, responses in enumerate(completions):
            if number not in given:
                take(number, responses)

    def _noisy_copies(self, prompts: list[PromptFeatures], strength: int) -> list[PromptFeatures]:
        """The prompts with noisy images, and seeds of their own; one without images stays as it is."""
        seeds = [derive_seed(prompt.seed, "noisy copy") for prompt in prompts]
        images = [noisy_images(prompt.images, strength, seed) for prompt, seed in zip(prompts, seeds)]
        copies = self.data_processor.with_images(prompts, images)
        return [replace(copy, seed=seed) for copy, seed in zip(copies, seeds)]


def _rollouts(
    prompt: PromptFeatures, responses: list[Completion], first: int, policy_version: int, distorted: bool
) -> list[Rollout]:
    """first: the number of the first response among all of the run."""
    for response in responses:
        check_prompt_ids(prompt, response)
    return [
        Rollout(
            prompt,
            response.token_ids,
            response.log_probs,
            response.text,
            response.truncated,
            sample_id=first + place,
            policy_version=policy_version if response.versions is None else min(response.versions),
            versions=response.versions,
            image=response.image,
            distorted=distorted,
        )
        for place, response in enumerate(responses)
    ]


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
