"""What every rollout engine takes and gives back, so that the experience maker does not know which one it drives."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Protocol

import torch

from ..config import registry
from ..config.vl import RunConfig
from ..errors import ConfigError, NonFiniteError, RolloutError
from ..experience.rollouts import Completion, PromptBatch, PromptFeatures, Rollout, SamplingSettings
from ..models.loading import Checkpoint
from ..runtime.seeding import derive_seed
from ..runtime.train_engine import TrainEngine
from .multimodal import MultimodalDataProcessor

Finished = Callable[[int, list[Completion]], None]


class RolloutEngine(Protocol):
    """Generation on this rank. All calls are made by all ranks of a tensor-parallel group together. What an engine has
    not of its own does nothing.

    shares_weights: it samples from the trainer's own parameters, not from a copy that `update_weights` replaces.
    lacks_weights: it slept without them, and must be given new ones before it generates. streams: whether `generate`
    takes a third argument, which it calls with the number of each prompt and its completions once they are finished.
    in_step: whether ranks call `generate` together, and equally often; default: each when it likes. adapters_alone:
    whether `update_weights` takes LoRA's adapters by the names of the trainer's model, and nothing else. file_names:
    whether it takes weights by the names and in the parts of a checkpoint's files.
    """

    shares_weights: bool = False
    lacks_weights: bool = False
    streams: bool = False
    in_step: bool = False
    adapters_alone: bool = False
    file_names: bool = False

    def generate(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> list[list[Completion]]:
        """n completions a prompt, in order. settings: n, and how tokens are chosen."""

    def admission(self, settings: SamplingSettings) -> Any:
        """An `episodes.Admission`, for requests one after the other; None where the engine has none."""
        return None

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over weights by the names of the actor's checkpoint; caches of the old ones are void.

        Once it has returned the trainer's own may leave the device. Memory that only `generate` needs may come after.
        """
        return

    def reset_caches(self) -> None:
        """Forget what was computed of earlier prompts."""
        return

    def sleep(self, keep_weights: bool = True) -> None:
        """Free accelerator memory while training. Without its weights it takes new ones before it generates again."""
        return

    def wake(self) -> None:
        """Make ready for weights and generation again."""
        return

    def close(self) -> None:
        """Release everything; nothing may be called afterwards."""
        return


def build_engine(config: RunConfig, checkpoint: Checkpoint, actor: TrainEngine) -> RolloutEngine:
    """The engine that `rollout.engine_type` names in the registry. Raises ConfigError, RolloutError.

    Args:
        config: of the run.
        checkpoint: that the engine starts from.
        actor: which is trained; its weights are sent, or sampled from.
    """
    name = config.rollout.engine_type
    engine = registry.engines.load(name)(config, checkpoint, actor)
    if not hasattr(engine, "generate"):
        raise ConfigError(f"rollout engine {name!r} is a {type(engine).__name__}; it must be a RolloutEngine")
    return engine


def engine_in_words(config: RunConfig, checkpoint: Checkpoint) -> str:
    """Which engine a run uses, and why not vLLM where vLLM lacks the model."""
    name = config.rollout.engine_type
    if not checkpoint.family.served:
        return f"{name}: vLLM has no model of type {checkpoint.config.model_type}"
    return name


def check_engine(config: RunConfig, checkpoint: Checkpoint) -> None:
    """ConfigError for settings that the engine would refuse, before any model is loaded."""
    name = config.rollout.engine_type
    engine = registry.engines[name]
    if config.asynchronous.partial_rollouts and checkpoint.family.draws:
        raise ConfigError("partial_rollouts are for responses in text, and this model draws")
    engine.check_settings(config, checkpoint)
    if checkpoint.family.draws and not engine.draws:
        raise ConfigError(f"engine {name} only writes, and this model also draws: use --engine_type hf")


Taker = Callable[[int, list[Rollout]], None]


class RolloutStage:
    """Generates with an engine; prompts are preprocessed once, whatever n is."""

    def __init__(self, engine: RolloutEngine, data_processor: MultimodalDataProcessor, run_seed: int):
        self.engine, self.data_processor, self.run_seed = engine, data_processor, run_seed

    def generate(
        self,
        batch: PromptBatch,
        settings: SamplingSettings,
        policy_version: int = 0,
        purpose: str = "rollout",
        seed: int | None = None,
    ) -> list[Rollout]:
        """`requests` and `draw` in one. Args: as of `requests` and `draw`."""
        return self.draw(self.requests(batch, purpose, seed), settings, policy_version)

    def requests(self, batch: PromptBatch, purpose: str = "rollout", seed: int | None = None) -> list[PromptFeatures]:
        """What the engine is asked to continue, one a prompt.

        Args:
            batch: the prompts; DataError for those that cannot be used.
            purpose: what is sampled for; with the seed and the prompt's id it alone decides the random stream.
            seed: default: the run's.
        """
        prompts = self.data_processor.features(batch) if batch.prepared is None else batch.prepared
        for prompt in prompts:
            prompt.seed = derive_seed(self.run_seed if seed is None else seed, purpose, prompt.group_id)
        return prompts

    def draw(
        self,
        requests: list[PromptFeatures],
        settings: SamplingSettings,
        policy_version: int = 0,
        finished: Taker | None = None,
    ) -> list[Rollout]:
        """P * n rollouts, prompt-major.

        Args:
            requests: of `requests`; variants give the last samples of a prompt.
            settings: n and how responses are drawn.
            policy_version: of the engine's weights.
            finished: is given the rollouts of each prompt, and the number of the first of them, once all are made;
                engines that do not stream give all of them at the end.

        Raises:
            RolloutError: the engine's prompt ids are not the trainer's (images would land on other tokens).
        """
        made: dict[int, list[Rollout]] = {number: [] for number in range(len(requests))}
        counts = [variant.count for variant in requests[0].variants] if requests else []
        if any([variant.count for variant in each.variants] != counts for each in requests):
            raise RolloutError("all requests of a step must have variants of the same counts")

        def take(number: int, responses: list[Completion], distorted: bool = False) -> None:
            own = made[number]
            first = requests[number].group_id * settings.n + len(own)
            own += self._rollouts(requests[number], responses, first, policy_version, distorted)
            if finished is not None and len(own) == settings.n:
                finished(number * settings.n, own)

        at_once = finished is not None
        self._generate(requests, replace(settings, n=settings.n - sum(counts)), take, at_once)
        for index, count in enumerate(counts):
            variants = [each.variants[index] for each in requests]
            self._generate(
                [each.features for each in variants],
                replace(settings, n=count),
                lambda number, responses, variants=variants: take(number, responses, variants[number].distorted),
                at_once,
            )
        return [rollout for number in range(len(requests)) for rollout in made[number]]

    def announce(self, batch: PromptBatch, settings: SamplingSettings) -> None:
        """Let an engine that can begin on a batch for which `generate` will ask later."""
        batch.prepared = self.requests(batch)
        self.engine.begin(batch.prepared, settings)

    def _rollouts(
        self, prompt: PromptFeatures, responses: list[Completion], first: int, policy_version: int, distorted: bool
    ) -> list[Rollout]:
        """Of one prompt. first: the number of the first response among all of the run."""
        return [
            Rollout(
                prompt,
                response.token_ids,
                response.log_probs,
                response.text,
                response.truncated,
                sample_id=first + index,
                policy_version=policy_version if response.versions is None else min(response.versions),
                versions=response.versions,
                image=response.image,
                distorted=distorted,
                experts=response.experts,
            )
            for index, response in enumerate(responses)
        ]

    def _generate(
        self, prompts: list[PromptFeatures], settings: SamplingSettings, take: Finished, at_once: bool
    ) -> None:
        """take(number, responses) for each prompt; at_once: as soon as its responses are there, if the engine can."""
        given: set[int] = set()

        def pass_on(number: int, responses: list[Completion]) -> None:
            check_completions(self.engine, [prompts[number]], [responses], settings)
            given.add(number)
            take(number, responses)

        streamed = (pass_on,) if at_once and self.engine.streams else ()
        made = list(self.engine.generate(prompts, settings, *streamed))
        check_completions(self.engine, prompts, made, settings)
        for number, responses in enumerate(made):
            if number not in given:
                take(number, responses)


def diverged(what: str, model: torch.nn.Module | None = None) -> NonFiniteError:
    """The error for a policy whose `what` are not finite. model: whose weights are looked at."""
    named = model.named_parameters() if model is not None else ()
    broken = next((name for name, weight in named if not weight.isfinite().all()), None)
    weights = f" ({broken} holds some too)" if broken else "" if model is None else " (its weights are finite)"
    return NonFiniteError(
        f"{what} hold NaN or infinities{weights}: the policy has diverged, or was broken from the start. Go on from an "
        "earlier checkpoint with a lower --actor_learning_rate or --max_norm or a higher --init_kl_coef; before the "
        "first step look at the model of --pretrain"
    )


def _wrong_of(response: Completion, most: int) -> str:
    """What keeps an engine's response from being trained on; "" for a right one, which may be empty: of an episode that
    could not begin. most: tokens of text."""
    ids, log_probs = getattr(response, "token_ids", None), getattr(response, "log_probs", None)
    if not isinstance(ids, list):
        return f"a {type(response).__name__} whose token_ids are a {type(ids).__name__}, not a list"
    wrong = [each for each in ids if not isinstance(each, (int, Integral)) or each < 0]
    if wrong:
        return f"token ids that are no whole numbers from 0 on, such as {wrong[0]!r}"
    if log_probs is not None and len(log_probs) != len(ids):
        return f"{len(log_probs)} log-probs for {len(ids)} tokens"
    return f"{len(ids)} tokens, {most} are the most" if len(ids) > most and response.image is None else ""


def check_completions(
    engine: object,
    prompts: Sequence[PromptFeatures],
    made: Sequence[Sequence[Completion]],
    settings: SamplingSettings,
) -> None:
    """Raise RolloutError unless an engine gave what it was asked for, and saw the prompts that the trainer will score.

    Args:
        engine: which is named.
        prompts: that it was given.
        made: its completions of each.
        settings: that it was asked with.
    """
    n = settings.n
    if (counts := [len(each) for each in made]) != [n] * len(prompts):
        least, most = min(counts, default=0), max(counts, default=0)
        given = f"{least} to {most}" if least < most else f"{most}"
        told = f"engine {type(engine).__name__} was asked for {n} completions of each of {len(prompts)} prompts"
        raise RolloutError(f"{told}, and gave {given} of each of {len(counts)}")
    for prompt, responses in zip(prompts, made):
        for response in responses:
            if wrong := _wrong_of(response, settings.most_tokens):
                raise RolloutError(f"prompt {prompt.group_id}: engine {type(engine).__name__} gave {wrong}")
            ours, theirs = (response.prompt or prompt).token_ids, response.prompt_token_ids
            if ours != theirs:
                index = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
                raise RolloutError(
                    f"prompt {prompt.group_id}: the engine's prompt has {len(theirs)} tokens, the trainer's "
                    f"{len(ours)}, and they differ from token {index} on. Likely cause: expansion (the engine and the "
                    "processor turn an image into different placeholder tokens; check the processor settings, "
                    "min_pixels and max_pixels)"
                )
