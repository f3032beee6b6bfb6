"""Sequences the stages from prompts to experience: rollout, rewards, forward passes by role, advantages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.advantages import assign_advantages, get_advantage_calculator, get_advantages_and_returns
from ..algorithms.dynamic_sampling import DynamicSampling
from ..batches.experience import Experience, ExperienceDiffusion, ExperienceVL
from ..batches.prompts import PromptBatch
from ..batches.rollouts import Rollout, add_rewards, collate, samples_of
from ..batches.samples import Samples, SamplesVL
from ..batches.sampling import SamplingSettings
from ..config.diffusion import DiffusionAlgorithmConfig
from ..config.vl import AlgorithmConfig
from ..errors import ConfigError
from ..rewards.early import EarlyScores
from ..rewards.engine import RewardComputationEngine
from ..rollout.distortion import Distortion
from ..rollout.engine import RolloutEngine
from ..rollout.multimodal import MultimodalDataProcessor
from ..rollout.stage import RolloutStage
from ..strategy import collectives
from ..strategy.phase_timer import PhaseTimer
from .stage_metrics import over_rounds
from .vl.ahead import leave_out_stale
from .vl.stages import ForwardStage, MadeExperience, RewardStage

if TYPE_CHECKING:
    from .diffusion.maker import DiffusersEngine, DiffusionExperienceMaker
    from .diffusion.stages import Sampled

__all__ = ["FastExperienceMaker", "MakerSettings", "MultimodalDataProcessor", "RewardComputationEngine"]

T = torch.Tensor
MorePrompts = Callable[[], PromptBatch]
Scored = Callable[[list[Rollout]], None]


@dataclass
class MakerSettings:
    """What the contract's constructor has no argument for.

    engine: None builds the transformers engine around the actor; a `DiffusersEngine` draws images or videos. diffusion:
    how advantages of that engine's samples are made. data_processor, rewards: None builds them from the constructor's
    arguments. dynamic_sampling_tries: 1 turns dynamic sampling off. weights_follow: the engine is given new weights
    after each batch, so that it need not keep the old ones while it sleeps. score_policy: False leaves the policy's
    log-probs and entropies to the training forward, where nothing reads them before. max_staleness: responses with
    tokens of a policy that is more versions old are left out; 0 looks at none. distortion: of images, for some
    responses of each rollout. teacher: scores rollouts as a reference does, for on-policy distillation.
    """

    engine: RolloutEngine | DiffusersEngine | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    diffusion: DiffusionAlgorithmConfig = field(default_factory=DiffusionAlgorithmConfig)
    micro_batch_size: int = 8
    dynamic_sampling_tries: int = 1
    run_seed: int = 42
    data_processor: MultimodalDataProcessor | None = None
    rewards: RewardComputationEngine | None = None
    timer: PhaseTimer | None = None
    weights_follow: bool = False
    score_policy: bool = True
    max_staleness: int = 0
    distortion: Distortion | None = None
    teacher: Callable[..., T] | None = None


class FastExperienceMaker:
    """Makes experience for one training step (the interface follows LightRFT).

    actor, critic, initial_model: an `Actor`, `Critic` and a reference (a callable like the actor), plain or prepared by
    the strategy; critic and initial_model may be None. reward_model, remote_rm_url, reward_fn, reward_fn_label_map,
    reward_recipe: as in `RewardComputationEngine`. kl_controller: its `value` weighs the KL in the reward.
    processor: the model's multimodal processor, None for text-only models. With a `DiffusersEngine` in the settings,
    which holds the policy, all work is that of `DiffusionExperienceMaker`, and what concerns language models is unused.
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
        self.settings = settings = settings or MakerSettings()
        self.tokenizer, self.kl_controller, self.strategy = tokenizer, kl_controller, strategy
        self.vision = processor is not None
        self.rewards = settings.rewards or RewardComputationEngine(
            reward_model, remote_rm_url, None, reward_fn, reward_fn_label_map, reward_recipe, tokenizer, strategy,
            packing_samples,
        )  # fmt: skip
        self.policy_version = 0
        self._numbered = 0  # prompts of all ranks that came as plain lists; seeds and groups go by their numbers
        # Asked for instead of its class: runs of language models never import diffusers, which takes seconds.
        drawing_maker = getattr(settings.engine, "experience_maker", None)
        self.drawing: DiffusionExperienceMaker | None = None
        if drawing_maker is not None:
            self.drawing = drawing_maker(self.rewards, settings.diffusion, settings.timer)
            return
        data_processor = settings.data_processor or MultimodalDataProcessor(tokenizer, processor, prompt_max_len)
        self.engine = settings.engine or _transformers_engine(actor, tokenizer, settings.micro_batch_size)
        self.rollout_stage = RolloutStage(self.engine, data_processor, settings.run_seed)
        self.reward_stage = RewardStage(self.rewards, settings.micro_batch_size)
        scored = actor if settings.score_policy else None
        self.forward_stage = ForwardStage(
            scored, initial_model, critic, strategy.device, settings.algorithm.kl_estimator, settings.teacher
        )
        self.calculator = get_advantage_calculator(settings.algorithm.advantage_estimator, settings.algorithm)

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

        generate_kwargs: temperature, top_p, top_k, max_new_tokens, min_new_tokens, skip_special_tokens,
        first_token_temperature, gamma, lambd; defaults from the settings. Unknown names raise ConfigError, as do all of
        them with a `DiffusersEngine`, whose sampler has settings of its own; all_images are then first frames. Prompts
        of every call have numbers of their own, so equal ones are sampled anew. Dynamic sampling draws the same prompts
        again, as it has no others.
        """

        def numbered() -> PromptBatch:
            ids = self._next_ids(len(all_prompts))
            return PromptBatch.of(all_prompts, all_images, all_videos, all_references, all_labels, ids=ids)

        if self.drawing is not None:
            return self.drawing.experiences_of(numbered(), self.policy_version, **generate_kwargs)
        return self.make(numbered(), more=numbered, **generate_kwargs).experiences

    def make(
        self, batch: PromptBatch, more: MorePrompts | None = None, scored: Scored | None = None, **generate_kwargs: Any
    ) -> MadeExperience:
        """As `make_experience_list`, for a batch with ids and metadata. `more` brings prompts for dynamic sampling.

        scored: is given the rollouts once they have their rewards, and may let go of their media. That is before the
        forward passes, but where remote scorers work beside these.
        """
        sampling, estimator_kwargs = self._split_kwargs(generate_kwargs)
        rollouts, early, metrics = self._sampled(batch, sampling, more, scored)
        parts = self._parts(rollouts)
        experiences = [collate(part, self.tokenizer.pad_token_id, self.vision) for part in parts]
        with self._phase("forward"):
            self.forward_stage.run(experiences, sampling.scoring)
        if metrics is None:
            metrics = self._score_all(rollouts, early, scored)
        for experience, part in zip(experiences, parts):
            add_rewards(experience, part)
        rewards = [each.info["reward"] for each in experiences]
        estimator_kwargs["max_new_tokens"] = sampling.max_new_tokens
        kl_coef = self.kl_controller.value
        made = assign_advantages(self.calculator, experiences, rewards, kl_coef, estimator_kwargs)
        return MadeExperience(made, rollouts, metrics)

    def generate_samples(
        self,
        all_prompts: list[str],
        all_images: list | None = None,
        all_videos: list | None = None,
        all_references: list | None = None,
        all_labels: list | None = None,
        **generate_kwargs: Any,
    ) -> list[Samples | SamplesVL | Sampled]:
        """Unscored rollouts of P prompts in micro-batches; arguments as in `make_experience_list`."""
        ids = self._next_ids(len(all_prompts))
        batch = PromptBatch.of(all_prompts, all_images, all_videos, all_references, all_labels, ids=ids)
        if self.drawing is not None:
            return self.drawing.draw(batch, self.policy_version)
        sampling, _ = self._split_kwargs(generate_kwargs)
        rollouts = self.generate(batch, sampling)
        return [samples_of(part, self.tokenizer.pad_token_id, self.vision) for part in self._parts(rollouts)]

    def generate(
        self,
        batch: PromptBatch,
        sampling: SamplingSettings,
        purpose: str = "rollout",
        early: EarlyScores | None = None,
        seed: int | None = None,
    ) -> list[Rollout]:
        """Unscored rollouts, prompt-major. early: is given each prompt's as they are finished. seed: see
        `RolloutStage.generate`."""
        with self._phase("sync"):
            self.engine.wake()
        with self._phase("generate"):
            return self.rollout_stage.generate(
                batch,
                sampling,
                policy_version=self.policy_version,
                purpose=purpose,
                finished=None if early is None else early.add,
                seed=seed,
                distortion=self.settings.distortion if purpose == "rollout" else None,
            )

    def score(self, rollouts: list[Rollout], early: EarlyScores | None = None) -> dict[str, float]:
        """Score rollouts in place with the reward engine, which may have begun; its counts of this rank."""
        with self._phase("reward"):
            return self.reward_stage.run(rollouts, early)

    def _sampled(
        self, batch: PromptBatch, sampling: SamplingSettings, more: MorePrompts | None, scored: Scored | None
    ) -> tuple[list[Rollout], EarlyScores | None, dict[str, float] | None]:
        """Rollouts, the engine asleep after them, with metrics of their rewards: None while remote scorers are at work
        on them, whose replies `_score_all` waits for."""
        if more is not None and self.settings.dynamic_sampling_tries > 1:
            rollouts, metrics = self._resampled(batch, sampling, more)
            if scored is not None:
                scored(rollouts)
            return rollouts, None, metrics
        rollouts, early = self._generate_early(batch, sampling)
        self._rest()
        metrics = None if self.rewards.streams else self._score_all(rollouts, early, scored)
        return rollouts, early, metrics

    def _score_all(self, rollouts: list[Rollout], early: EarlyScores | None, scored: Scored | None) -> dict[str, float]:
        """Rewards in place, stale responses left out, and metrics."""
        metrics = over_rounds([self.score(rollouts, early)])
        if self.settings.max_staleness:
            metrics |= leave_out_stale(rollouts, self.policy_version, self.settings.max_staleness)
        if scored is not None:
            scored(rollouts)
        return metrics

    def _generate_early(
        self, batch: PromptBatch, sampling: SamplingSettings
    ) -> tuple[list[Rollout], EarlyScores | None]:
        """Rollouts that remote scorers have worked on since each was finished."""
        early = self.reward_stage.begin(batch, sampling.n)
        try:
            return self.generate(batch, sampling, early=early), early
        except BaseException:
            if early is not None:
                early.cancel()
            raise

    def get_advantages_and_returns(
        self, values: T, rewards: T, action_mask: T, gamma: float, lambd: float
    ) -> tuple[T, T]:
        """GAE of (B, A) values and token rewards: (advantages, returns), each (B, A)."""
        return get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)

    def _resampled(
        self, batch: PromptBatch, sampling: SamplingSettings, more: MorePrompts
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Scored rollouts by dynamic sampling, and metrics. The engine sleeps afterwards."""
        rounds: list[dict[str, float]] = []
        tries = self.settings.dynamic_sampling_tries

        def sample_round(number: int) -> list[Rollout]:
            rollouts, early = self._generate_early(batch if number == 0 else more(), sampling)
            if number + 1 == tries:
                self._rest()  # before rewards, which may be models that need the memory
            rounds.append(self.score(rollouts, early))
            return rollouts

        apart = self.settings.algorithm.estimator.components
        dynamic = DynamicSampling(len(batch), tries, apart)
        rollouts = dynamic.collect(sample_round)
        self._rest()
        return rollouts, over_rounds(rounds) | {
            "dynamic_rounds": dynamic.rounds,
            "dynamic_filled_groups": dynamic.filled,
        }

    def _rest(self) -> None:
        """Let the engine give its memory on the accelerator to rewards and forward passes."""
        with self._phase("sync"):
            self.engine.sleep(keep_weights=not self.settings.weights_follow)

    def _parts(self, rollouts: list[Rollout]) -> list[list[Rollout]]:
        """Those of each micro-batch."""
        size = self.settings.micro_batch_size
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def _split_kwargs(self, generate_kwargs: dict[str, Any]) -> tuple[SamplingSettings, dict[str, Any]]:
        """Sampling settings, and a new dict for the estimator; the caller's dict is only read."""
        known = {item.name for item in fields(self.settings.sampling)} - {"n"}
        sampling = {name: value for name, value in generate_kwargs.items() if name in known}
        estimator = {name: value for name, value in generate_kwargs.items() if name in ("gamma", "lambd")}
        unknown = sorted(set(generate_kwargs) - set(sampling) - set(estimator))
        if unknown:
            raise ConfigError(f"unknown generation argument(s): {', '.join(unknown)}")
        return replace(self.settings.sampling, **sampling), estimator

    def _next_ids(self, count: int) -> T:
        """(count) numbers that no other prompt has, on any rank or in an earlier call. A collective."""
        counts = collectives.all_gather_object(count)
        start = self._numbered + sum(counts[: collectives.rank()])
        self._numbered += sum(counts)
        return torch.arange(start, start + count)

    def _phase(self, name: str):
        return self.settings.timer.phase(name) if self.settings.timer is not None else nullcontext()


def _transformers_engine(actor, tokenizer, micro_batch_size: int) -> RolloutEngine:
    from ..rollout.hf import TransformersEngine

    return TransformersEngine(actor, tokenizer, micro_batch_size)
