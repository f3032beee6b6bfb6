"""Single rollouts, and how they become padded micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ConfigError, DataError
from .types import Experience, ExperienceVL, Samples, SamplesVL, pad_rollouts
from .vision import VisionTensors

T = torch.Tensor


@dataclass(frozen=True)
class ScoringRule:
    """What turns logits into the distribution that was sampled from, beside the banned tokens.

    first_token_temperature: FIRE's, None without it; eos_banned_tokens: leading tokens that could not be an end token.
    guidance_scale: of the distribution of drawn tokens that is scored; 1 is the one with the prompt.
    """

    temperature: float = 1.0
    first_token_temperature: float | None = None
    eos_banned_tokens: int = 0
    guidance_scale: float = 1.0


ENVIRONMENT = "environment"  # the component of the reward that comes from the environment of an episode
# Settings of the rollout section that have other names than the fields of SamplingSettings.
CONFIG_NAMES = {"n": "n_samples_per_prompt", "max_new_tokens": "generate_max_len"}


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn. Lengths in tokens, of text; `first_token_temperature` turns FIRE sampling on.
    max_episode_tokens: of several responses with what is observed between them.

    guidance_scale: of drawn images, 1 for none. guidance_log_probs: whether their tokens' log-probs are those of the
    'guided' distribution that they are drawn from, or of the 'conditional' one, with the prompt alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    min_new_tokens: int = 1
    skip_special_tokens: bool = True
    first_token_temperature: float | None = None
    guidance_scale: float = 1.0
    guidance_log_probs: str = "guided"
    max_episode_tokens: int | None = None

    @classmethod
    def from_config(cls, rollout: Any, max_episode_tokens: int | None = None) -> SamplingSettings:
        """Those of a run's rollout section: every field from the setting of its name, or of `CONFIG_NAMES`.
        max_episode_tokens: where responses are episodes."""
        own = {item.name: CONFIG_NAMES.get(item.name, item.name) for item in fields(cls)}
        values = {name: vars(rollout)[setting] for name, setting in own.items() if setting in vars(rollout)}
        if not rollout.use_fire:
            values["first_token_temperature"] = None
        return cls(**values, max_episode_tokens=max_episode_tokens)

    @property
    def most_tokens(self) -> int:
        """Of everything behind a prompt."""
        return self.max_new_tokens if self.max_episode_tokens is None else self.max_episode_tokens

    @property
    def full_distribution(self) -> bool:
        """Whether every token but the banned ones can be drawn: only then are sampled log-probs a softmax."""
        return self.top_p == 1.0 and self.top_k == -1

    @property
    def eos_banned_tokens(self) -> int:
        """Leading tokens that may not be the end token; every response has one token, so a minimum of 1 bans none."""
        return self.min_new_tokens if self.min_new_tokens > 1 else 0

    @property
    def scoring(self) -> ScoringRule:
        """What the trainer must score these samples with."""
        guidance = self.guidance_scale if self.guidance_log_probs == "guided" else 1.0
        return ScoringRule(self.temperature, self.first_token_temperature, self.eos_banned_tokens, guidance)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0.0

    def text(self, token_ids: list[int], truncated: bool, tokenizer: Any) -> str:
        """A response as text; with `skip_special_tokens` without its end token, which need not be a special one.

        Args:
            token_ids: of the response.
            truncated: it has no end token.
            tokenizer: decodes it.
        """
        shown = token_ids[:-1] if self.skip_special_tokens and not truncated else token_ids
        return tokenizer.decode(shown, skip_special_tokens=self.skip_special_tokens)


@dataclass
class Completion:
    """One response. `log_probs` has one number per token; None when truncated sampling leaves no softmax.

    image: what was drawn, as PIL, where the prompt asked for one. versions: of the policy that drew each token, where
    they may differ from the present one's. experts: of a mixture of experts, those that each token of prompt and
    response but the last went through (tokens, layers, k); None where the engine does not say. prompt: what an episode
    began with, where its environment changed the prompt that was asked for.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    text: str
    truncated: bool
    prompt_token_ids: list[int]
    image: Any = None
    versions: list[int] | None = None
    experts: T | None = None
    prompt: PromptFeatures | None = None


@dataclass
class PromptBatch:
    """Rendered prompts with their media and what the reward needs; every list has length P.

    prompts: strings after the chat template, one placeholder per image. images, videos: a list of sources a prompt, or
    of functions that give one.
    captions: what a prompt that asks for an image wants drawn, without the template around it; None says nothing.
    messages: what the prompts were rendered of, where it is known; empty or P.
    ids (P) long: a number that no other prompt of the run has, the same for any rank count; seeds and groups use it.
    prepared: what was preprocessed of them ahead of time, for as long as its media are held; a selection has none.
    """

    prompts: list[str]
    images: list[list]
    videos: list[list]
    references: list[Any]
    labels: list[str | None]
    metadata: list[dict[str, Any]]
    captions: list[str | None]
    ids: T
    messages: list[list[dict[str, Any]] | None] = field(default_factory=list)
    prepared: list[PromptFeatures] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: list[int]) -> PromptBatch:
        """The prompts at `indices`, in that order."""
        lists = (
            self.prompts, self.images, self.videos, self.references, self.labels, self.metadata, self.captions
        )  # fmt: skip
        messages = [self.messages[i] for i in indices] if self.messages else []
        own = ([column[i] for i in indices] for column in lists)
        return PromptBatch(*own, ids=self.ids[indices], messages=messages)

    def release_media(self) -> None:
        """Images and videos are not needed here any more."""
        self.images, self.videos = ([[] for _ in self.prompts] for _ in range(2))

    @classmethod
    def of(
        cls,
        prompts: list[str],
        images: list | None = None,
        videos: list | None = None,
        references: list | None = None,
        labels: list | None = None,
        metadata: list | None = None,
        ids: T | None = None,
        captions: list[str | None] | None = None,
        messages: list[list[dict[str, Any]] | None] | None = None,
    ) -> PromptBatch:
        """A batch of P prompts from plain lists with an entry for each; DataError for another length, and as
        `check_texts`.

        Args:
            prompts: strings after the chat template, one placeholder per image or video.
            images: of each prompt a list of sources, a single source, or None.
            videos: likewise.
            references: what rewards compare a response with; None: none.
            labels: what kind of question each is, for rewards and metrics; None: none.
            metadata: further columns of the data, a dict each; None: empty dicts.
            ids: (P) long, which no other prompt of the run has; None: 0 to P - 1, for batches that stand alone.
            captions: what is to be drawn, None for prompts that ask for text; None: for all.
            messages: what each prompt was rendered of; None: unknown.
        """
        check_texts(prompts)
        count = len(prompts)
        columns = {"images": images, "videos": videos, "references": references, "labels": labels, "metadata": metadata}
        columns["captions"] = captions
        given: dict[str, list] = {}
        for name, column in columns.items():
            check_column(column, name)
            if column is not None and len(column) != count:
                raise DataError(f"{count} prompts but {len(column)} {name}")
            given[name] = [None] * count if column is None else list(column)
        given |= {name: [media_list(cell) for cell in given[name]] for name in ("images", "videos")}
        if metadata is None:
            given["metadata"] = [{} for _ in prompts]
        ids = torch.arange(count) if ids is None else ids
        return cls(list(prompts), **given, ids=ids, messages=list(messages or ()))


def check_texts(prompts: Sequence[Any]) -> None:
    """Raise DataError for one text alone, of which each letter would be a prompt, and for a prompt that is no text."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise DataError("prompts are given as a list of texts, one for each prompt")


def check_column(column: Any, name: str) -> None:
    """Raise DataError for one text, image or mapping in place of a list with an entry for each prompt."""
    if column is not None and (isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__")):
        raise DataError(f"{name} is a {type(column).__name__}: give a list with one entry for each prompt")


def media_list(cell: Any) -> list:
    """What a media cell holds: nothing, one or several; a decoded video is a named tuple, and one item."""
    if cell is None or (isinstance(cell, str | bytes) and not cell):
        return []
    if isinstance(cell, np.ndarray) and cell.dtype == object:
        return cell.tolist()
    return list(cell) if isinstance(cell, list | tuple) and not hasattr(cell, "_fields") else [cell]


@dataclass
class PromptFeatures:
    """One prompt, as engines are asked to continue it; all its rollouts share it by reference.

    text: with one placeholder per image or video, never already expanded ones; token_ids: the expanded ids that the
    trainer will use: an engine's must equal them. unexpanded: ids with one placeholder a medium, for engines that
    expand by themselves, in place of the text where that is not what the ids were made of. messages: what was rendered,
    where it is known. limit: most tokens of the response, where the settings' own limit is larger. images, videos:
    decoded media, each None once it is let go of; vision: what the model reads of them, which an engine that
    preprocesses by itself leaves aside. seed: fixes the sampling of all its responses, whatever else is in the batch.
    caption: what is to be drawn, where the response is an image; None where it is text. continued: tokens of a response
    that is already begun, which goes on behind them; copy: which of the prompt's it is. variants: what some of its
    samples are drawn from instead. loss_part: the part of the loss that its samples belong to.
    """

    text: str
    token_ids: list[int]
    group_id: int
    reference: Any = None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    vision: VisionTensors = field(default_factory=VisionTensors)
    seed: int = 0
    caption: str | None = None
    continued: list[int] = field(default_factory=list)
    copy: int = 0
    variants: list[Variant] = field(default_factory=list)
    loss_part: int = 0
    messages: list[dict[str, Any]] | None = None
    unexpanded: list[int] | None = None
    limit: int | None = None

    @property
    def draws(self) -> bool:
        """Whether the response is an image."""
        return self.caption is not None


class Variant(NamedTuple):
    """What the last `count` of a prompt's samples are drawn from; `distorted` where its media are others.

    Rewards, statistics and the update see the prompt itself. All requests of a step have variants of the same counts.
    """

    features: PromptFeatures
    count: int
    distorted: bool


@dataclass
class Turn:
    """One response of an episode and what the environment made of it. observation: messages with their parts, the media
    left out; empty behind the last turn. calls: (tool, error or None). info: the environment's own."""

    text: str
    reward: float = 0.0
    observation: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """Several turns in one rollout, whose tokens run from the first sampled one to the last.

    turn_ids: for each token the turn that sampled it, from 0; -1 for tokens of observations. images, videos, vision: of
    observations, in the order of their tokens. gamma: discount of a reward by each turn before it. rewarded: whether
    the environment gave any. failure: why its environment could not go on; limit: what it ended at, turns or tokens;
    failed: whether the sample teaches nothing for either.
    """

    turns: list[Turn] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    images: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    vision: list[VisionTensors] = field(default_factory=list)
    gamma: float = 1.0
    rewarded: bool = False
    failure: str | None = None
    limit: str | None = None
    failed: bool = False

    def add_reward(self, rollout: Rollout) -> None:
        """The environment's share of the score of this episode's rollout, unless it is one of its components already;
        what others gave is discounted as the last turn is."""
        own = self.reward
        if ENVIRONMENT in rollout.weights:  # of a recipe, maybe for other labels; a metric may have this name too
            weight, given = rollout.weights[ENVIRONMENT], rollout.components.get(ENVIRONMENT, float("nan"))
            share = 0.0 if given != given else weight * given  # NaN: no part of this sample's recipe
        else:
            share, rollout.components[ENVIRONMENT] = own, own
            rollout.reward += own
            if rollout.weights:
                rollout.weights[ENVIRONMENT] = 1.0
        discount = self.gamma ** max(0, len(self.turns) - 1)
        rollout.reward = share + discount * (rollout.reward - share)
        rollout.weights |= {name: w * discount for name, w in rollout.weights.items() if name != ENVIRONMENT}
        if self.failed:  # as where a reward failed, no mean holds it
            rollout.valid, rollout.components = False, dict.fromkeys(rollout.components, float("nan"))

    @property
    def reason(self) -> str | None:
        """Why it could not go on, or teaches nothing."""
        return f"it reached its limit of {self.limit}" if self.failed and self.failure is None else self.failure

    @property
    def reward(self) -> float:
        """Of the environment, each turn's discounted by the turns before it."""
        return sum(self.gamma**number * turn.reward for number, turn in enumerate(self.turns))


@dataclass
class Rollout:
    """One response, or an episode of several. `log_probs` are the engine's; reward fields are set once it is scored.
    image: what was drawn.

    distorted: it was drawn from noisy copies of the prompt's images, so `log_probs` are not of `prompt`. episode: of
    several turns; text is that of the last one then.
    """

    prompt: PromptFeatures
    token_ids: list[int]
    log_probs: list[float] | None
    text: str
    truncated: bool
    sample_id: int
    policy_version: int = 0
    reward: float | None = None
    valid: bool = True
    components: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    image: Any = None
    versions: list[int] | None = None  # of the policy that drew each token; None where all are policy_version
    distorted: bool = False
    episode: Episode | None = None
    experts: T | None = None  # as of a `Completion`

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens without those of observations."""
        if self.episode is None:
            return self.token_ids
        return [token for token, turn in zip(self.token_ids, self.episode.turn_ids, strict=True) if turn >= 0]

    @property
    def images(self) -> list:
        """Of the prompt and of observations."""
        return self.prompt.images if self.episode is None else [*self.prompt.images, *self.episode.images]

    @property
    def videos(self) -> list:
        """Of the prompt and of observations."""
        return self.prompt.videos if self.episode is None else [*self.prompt.videos, *self.episode.videos]

    @property
    def vision(self) -> VisionTensors:
        """One sample's: what the model reads of all its images and videos."""
        if self.episode is None or not self.episode.vision:
            return self.prompt.vision
        return VisionTensors.in_order([self.prompt.vision, *self.episode.vision])


def one_each(which: T | Sequence[bool], count: int) -> T:
    """A mask (count) bool of rollouts on the host. Raises ConfigError for another number of them."""
    mask = torch.as_tensor(which).cpu().bool()
    if mask.shape != (count,):
        raise ConfigError(f"leave_out was given a mask of shape {tuple(mask.shape)}; it must be ({count},)")
    return mask


class Rollouts(list[Rollout]):
    """This rank's rollouts of one call, prompt-major.

    sampling: how they were drawn. pending: scores that remote scorers are at work on. counts: plain numbers of the
    stages, of this rank. scored: whether each has its reward.
    """

    def __init__(
        self,
        rollouts: Iterable[Rollout],
        sampling: SamplingSettings | None = None,
        pending: Any = None,
        counts: dict[str, float] | None = None,
        scored: bool = False,
    ) -> None:
        super().__init__(rollouts)
        self.sampling, self.pending, self.scored = sampling or SamplingSettings(), pending, scored
        self.counts: dict[str, float] = dict(counts or {})

    def follow(self, earlier: Rollouts) -> None:
        """What a hook that made these did not say is as of those that it was given."""
        if self.sampling == SamplingSettings():
            self.sampling = earlier.sampling
        self.counts = earlier.counts | self.counts
        self.scored = self.scored or (earlier.scored and all(each.reward is not None for each in self))
        self.pending = None if self.scored else self.pending or earlier.pending

    @property
    def versions(self) -> T:
        """(B): the earliest policy that drew a token of each."""
        return torch.tensor([each.policy_version for each in self])

    def leave_out(self, which: T | Sequence[bool]) -> None:
        """Rollouts (B) bool that teach nothing."""
        for rollout, left_out in zip(self, one_each(which, len(self)).tolist()):
            rollout.valid = rollout.valid and not left_out

    def settle(self, counts: dict[str, float]) -> None:
        """Each has its reward now; counts: the reward engine's."""
        self.pending, self.scored = None, True
        self.counts |= counts


def release_media(rollouts: list[Rollout], shown: set[int]) -> int:
    """Decoded images and videos of the prompts, but those of the samples `shown`, become None: they were generated from
    and scored, and models read the patches. Returns about how many bytes that frees."""
    kept = {id(rollout.prompt) for rollout in rollouts if rollout.sample_id in shown}
    prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts if id(rollout.prompt) not in kept}
    freed = 0
    for rollout in rollouts:
        if rollout.episode is not None and rollout.sample_id not in shown:
            own = rollout.episode
            freed += sum(4 * image.width * image.height for image in own.images if image is not None)
            own.images, own.videos = [None] * len(own.images), [None] * len(own.videos)
    for prompt in prompts.values():
        freed += sum(4 * image.width * image.height for image in prompt.images)  # as Pillow holds colours
        freed += sum(video.frames.nbytes for video in prompt.videos)
        prompt.images, prompt.videos = [None] * len(prompt.images), [None] * len(prompt.videos)
    return freed


def release_vision(rollouts: list[Rollout]) -> int:
    """What models read of images and videos is dropped, where no forward follows. Returns about how many bytes that
    frees."""
    freed = 0
    for prompt in {id(rollout.prompt): rollout.prompt for rollout in rollouts}.values():
        freed += prompt.vision.nbytes()
        prompt.vision = VisionTensors()
    for episode in (rollout.episode for rollout in rollouts if rollout.episode is not None):
        freed += sum(vision.nbytes() for vision in episode.vision)
        episode.vision = []
    return freed


def collate(rollouts: list[Rollout], pad_id: int, vision: bool) -> Experience | ExperienceVL:
    """A padded micro-batch of B rollouts, in order.

    Log-probs, values and advantages of the trainer are still to come. info: response_length, total_length, truncated,
    loss_part, distorted (B) float32; experts of each sample, where they are known; of episodes turns and turn_gamma
    (B), turn_ids (A_i) and, where they are scored, turn_rewards (turns) of each sample; and, where the rollouts are
    scored, reward (B) and reward_metrics {name: (B)}, NaN where a component did not apply; reward_weights {name: (B)}
    where their weighted sum is the reward. Vision tensors are referred to, not copied; the images stay behind.

    Args:
        rollouts: at least one; either all of them are scored, or none.
        pad_id: token id left of prompts and right of responses; the masks leave it out.
        vision: whether the model sees: then an ExperienceVL, also without any image.
    """
    sequences, attention_mask, action_mask = pad_rollouts(
        [rollout.prompt.token_ids for rollout in rollouts], [rollout.token_ids for rollout in rollouts], pad_id
    )
    for index, rollout in enumerate(rollouts):
        if rollout.episode is not None:
            own = torch.tensor(rollout.episode.turn_ids)
            action_mask[index, : len(own)] = own >= 0
    episodes = any(rollout.episode is not None for rollout in rollouts)
    info: dict[str, Any] = {
        "response_length": action_mask.sum(dim=1).float(),
        "total_length": attention_mask.sum(dim=1).float(),
        "truncated": torch.tensor([float(rollout.truncated) for rollout in rollouts]),
        "loss_part": torch.tensor([float(rollout.prompt.loss_part) for rollout in rollouts]),
        "distorted": torch.tensor([float(rollout.distorted) for rollout in rollouts]),
    } | (_episodes(rollouts) if episodes else {})
    if any(rollout.experts is not None for rollout in rollouts):
        info["experts"] = [rollout.experts for rollout in rollouts]
    shared: dict[str, Any] = dict.fromkeys(
        ("action_log_probs", "base_action_log_probs", "values", "returns", "advantages")
    ) | {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "action_mask": action_mask,
        "info": info | rewards_of(rollouts),
        "rollout_log_probs": _padded([rollout.log_probs for rollout in rollouts], action_mask, 0.0),
        "token_versions": _padded([rollout.versions for rollout in rollouts], action_mask, -1),
        "group_id": torch.tensor([rollout.prompt.group_id for rollout in rollouts]),
        "sample_id": torch.tensor([rollout.sample_id for rollout in rollouts]),
        "policy_version": torch.tensor([rollout.policy_version for rollout in rollouts]),
        "valid": torch.tensor([rollout.valid for rollout in rollouts]),
    }
    if not vision:
        return Experience(**shared)
    return ExperienceVL(
        **shared,
        vision=VisionTensors.gather(rollout.vision for rollout in rollouts),
        image_counts=torch.tensor([len(rollout.images) for rollout in rollouts]),
        video_counts=torch.tensor([len(rollout.videos) for rollout in rollouts]),
    )


def _episodes(rollouts: list[Rollout]) -> dict[str, Any]:
    """turns, turn_gamma (B); turn_ids: of each sample a tensor of its own length."""
    found = [Episode([Turn("")], [0] * len(r.token_ids)) if r.episode is None else r.episode for r in rollouts]
    return {
        "turns": torch.tensor([float(len(each.turns)) for each in found]),
        "turn_gamma": torch.tensor([each.gamma for each in found]),
        "turn_ids": [torch.tensor(each.turn_ids) for each in found],
    }


def rewards_of(rollouts: list[Rollout]) -> dict[str, Any]:
    """reward (B), its components by name, and rewards of turns, for `info`; {} before they are scored."""
    if rollouts[0].reward is None:
        return {}
    found: dict[str, Any] = {
        "reward": torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        "reward_metrics": _by_name([rollout.components for rollout in rollouts], float("nan")),
    }
    if any(rollout.episode is not None for rollout in rollouts):
        found["turn_rewards"] = [
            torch.tensor([turn.reward * r.weights.get(ENVIRONMENT, 1.0) for turn in r.episode.turns])
            if r.episode
            else torch.zeros(1)
            for r in rollouts
        ]
    weights = _by_name([rollout.weights for rollout in rollouts], 0.0)
    return found | ({"reward_weights": weights} if weights else {})


def _by_name(samples: list[dict[str, float]], missing: float) -> dict[str, T]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: torch.tensor([sample.get(name, missing) for sample in samples]) for name in names}


def _padded(lists: list[list | None], action_mask: T, fill: float) -> T | None:
    """(B, A) of a number a token, in the type of `fill`; None where a sample has none."""
    if any(each is None for each in lists):
        return None
    padded = torch.full(action_mask.shape, fill)
    for index, each in enumerate(lists):
        padded[index, : len(each)] = torch.tensor(each)
    return padded


def samples_of(rollouts: list[Rollout], pad_id: int, vision: bool) -> Samples | SamplesVL:
    """The same micro-batch with its texts and images, for those who score samples by themselves.

    Args:
        rollouts: as of `collate`; the policy version is that of the first.
        pad_id: as of `collate`.
        vision: whether the model sees: then a SamplesVL, with decoded images and videos.
    """
    batch, prompts = collate(rollouts, pad_id, vision), [rollout.prompt for rollout in rollouts]
    same = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "token_versions")
    fields: dict[str, Any] = {name: getattr(batch, name) for name in same} | {
        "group_ids": batch.group_id,
        "sample_ids": batch.sample_id,
        "truncated": batch.info["truncated"].bool(),
        "prompts": [prompt.text for prompt in prompts],
        "responses": [rollout.text for rollout in rollouts],
        "labels": [prompt.label for prompt in prompts],
        "references": [prompt.reference for prompt in prompts],
        "metadata": [prompt.metadata for prompt in prompts],
        "policy_version": rollouts[0].policy_version,
    }
    if not isinstance(batch, ExperienceVL):
        return Samples(**fields)
    return SamplesVL(
        **fields,
        vision=batch.vision,
        image_counts=batch.image_counts,
        video_counts=batch.video_counts,
        raw_images=[rollout.images for rollout in rollouts],
        raw_videos=[rollout.videos for rollout in rollouts],
        drawn_images=[rollout.image for rollout in rollouts],
        captions=[prompt.caption for prompt in prompts],
    )
