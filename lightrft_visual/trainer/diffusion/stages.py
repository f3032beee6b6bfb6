"""From prompts to images: rows of a step (K-repeat), conditions, sampling, decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...algorithms.diffusion.denoising_batch import first_share
from ...config.diffusion import DiffusionRunConfig, DiffusionSamplingConfig
from ...config.placement import GIB
from ...experience.diffusion_sampling import TRAIN_TIMESTEPS, DiffusionBatch, KeptSteps, SamplingResult
from ...experience.types import ExperienceDiffusion
from ...experience.vision import Conditions, stacked
from ...models.diffusion.forward_graphs import on_graphs
from ...models.diffusion.policy import DiffusionPolicy
from ...rollout.diffusion_sampler import DiffusionSampler, draw_noise, sample_generators, window_start
from ...runtime import collectives
from ...runtime.host_copies import HostCopies

logger = logging.getLogger(__name__)
T = torch.Tensor

WORTH = 0.5  # share of samples that count, below which a replay of them is quicker than the backward of all


class Graphed(NamedTuple):
    """A micro-batch of the rollout with the graph of its trained steps."""

    experience: ExperienceDiffusion
    kept: KeptSteps


@dataclass
class RolloutGraphs:
    """Which steps of a rollout keep their graph.

    weights: of the policy, which are there anyway. limit: bytes of all graphs of a rank's step. fraction: share of the
    stochastic steps that is trained on, from the first.
    """

    weights: list[T]
    limit: float
    fraction: float
    bytes: float | None = None  # of all graphs, once they are measured

    @classmethod
    def from_config(cls, config: DiffusionRunConfig, policy: DiffusionPolicy) -> RolloutGraphs | None:
        """Those of a run; None where an update takes more or other forwards than the rollout's.

        Of several experts a window may leave one without any step, and DeepSpeed needs a gradient of each.
        """
        if not config.rollout_graphs_serve or len(policy.denoisers) > 1:
            return None
        limit = config.train.rollout_graph_gib * GIB
        return cls(list(policy.parameters()), limit, config.algorithm.timestep_fraction)

    def fit(self, forward: Callable[[], T], samples: int, sampler: DiffusionSampler) -> bool:
        """Whether the graphs of a rollout are within the limit on all ranks; the first call is a collective.

        Args:
            forward: that of one sample, which the first call measures.
            samples: of the rollout on this rank.
            sampler: for the steps that keep one.
        """
        if self.bytes is None:
            mine = kept_bytes(forward, self.weights) * samples * len(self.steps(sampler, 0))
            self.bytes = collectives.all_reduce_max(torch.tensor(float(mine), dtype=torch.float64)).item()
            does = "are kept for" if self.bytes <= self.limit else "would be too large to keep for"
            if collectives.is_rank_0():
                logger.info(
                    "graphs of the rollout %s its update: %.2f GiB, rollout_graph_gib %g",
                    does, self.bytes / GIB, self.limit / GIB,
                )  # fmt: skip
        return self.bytes <= self.limit

    def steps(self, sampler: DiffusionSampler, window: int) -> list[int]:
        """The trained ones of a rollout whose window begins there."""
        return first_share(sampler.stochastic_steps(window), self.fraction).tolist()


@torch.enable_grad()
def kept_bytes(forward: Callable[[], T], weights: Iterable[T]) -> int:
    """Bytes of what autograd keeps of a forward, without the weights."""
    own, found = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def note(tensor: T) -> T:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself it would hold the graph for good, where its own operation saves it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result  # until here it holds what is counted: no two of them lie at one address
    return sum(found.values())


def worth_using(graphed: list[Graphed], only_advantages_count: bool) -> float | None:
    """The kept steps of valid samples over all ranks, at least one, which the mean of an update on the graphs counts;
    None where a backward of all samples is more work than the replay of those that count, and where that of an invalid
    one would make gradients NaN. A collective."""
    numbers = torch.zeros(4, dtype=torch.float64)
    for experience, kept in graphed:
        valid = experience.valid.bool()
        moving = experience.advantages.bool().view(len(valid), -1).any(dim=1)  # (B), also of advantages (B, K)
        broken = not (valid.all() or kept.log_probs.isfinite().all())  # the device is asked where any is invalid
        own = int(valid.sum()) * len(kept.steps), int((valid & moving).sum()), len(valid), broken
        numbers += torch.tensor(own, dtype=torch.float64)
    steps, counted, samples, broken = collectives.all_reduce_sum(numbers).tolist()
    return None if broken or (only_advantages_count and counted < WORTH * samples) else max(steps, 1.0)


@dataclass
class DrawingBatch:
    """Prompts of one step on this rank, one row a sample; lists of length B.

    images: what comes with the prompt (PIL): the first frame of image-to-video models, or images to edit. group_ids
    (B): the prompt; sample_ids (B): place in the global batch, the same for any rank count.
    """

    prompts: list[str]
    images: list[list[Any]]
    labels: list[str | None]
    references: list[Any]
    metadata: list[dict[str, Any]]
    group_ids: T
    sample_ids: T

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, part: slice) -> DrawingBatch:
        """The samples of a slice."""
        return DrawingBatch(**{name: value[part] for name, value in vars(self).items()})


class TrainedVelocity:
    """What the sampler asks of a model, answered through the training engine, so that ZeRO's hooks run.

    graphs: setting `cuda_graphs`.
    """

    def __init__(self, engine: Callable[..., T], policy: DiffusionPolicy, graphs: bool):
        self.policy, self.family = policy, policy.family
        self.velocity = on_graphs(engine, policy) if graphs else engine


@dataclass
class Sampled:
    """One micro-batch as drawn: result of the sampler, conditions of each sample's own (first frames), decoded media
    (B, 3, …) in 0..1 on the host.

    policy_version: of the weights that drew it. shared: conditions on the host that samples refer to, one dict a
    prompt.
    """

    result: Any
    conditions: dict[str, T]
    media: T
    policy_version: int
    shared: list[Conditions] | None = None


def joined_media(samples: list[Sampled]) -> T:
    """Media (B, 3, …) of all samples, of which those of each micro-batch are a part afterwards: videos of a step take
    gigabytes of the host, and are there once. Parts in page-locked memory, as of images, leave it taken."""
    sizes = [len(each.media) for each in samples]
    media = samples[0].media.new_empty((sum(sizes), *samples[0].media.shape[1:]), device="cpu")
    for index, part in enumerate(media.split(sizes)):
        samples[index] = replace(samples[index], media=part.copy_(samples[index].media))
    return media


class DiffusionSampling:
    """Draws and decodes images or videos for rows of prompts (the `diffusers` engine).

    settings: their size, guidance and batch; run_seed: of the noise.
    """

    def __init__(
        self, model: TrainedVelocity, sampler: DiffusionSampler, settings: DiffusionSamplingConfig, run_seed: int
    ):
        self.model, self.sampler, self.settings, self.run_seed = model, sampler, settings, run_seed

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        s = self.settings
        return self.model.policy.latent_shape(s.height, s.width, s.num_frames)

    def encoded(self, requests: DrawingBatch) -> list[Conditions]:
        """Embedded prompts, the negative one under guidance, and images where the family takes them: of each sample,
        (1, …) on the host, for micro-batches of them. The encoders work once."""
        return [shared | frame for shared, frame in zip(self.shared(requests), self._first_frames(requests))]

    def on_device(self, conditions: list[Conditions]) -> Conditions:
        """Of samples, as one batch."""
        return stacked(conditions, self.model.policy.device)

    def _first_frames(self, requests: DrawingBatch) -> list[Conditions]:
        s, policy = self.settings, self.model.policy
        if not policy.family.takes_first_frame:
            return [{}] * len(requests)
        first = [images[0] for images in requests.images]
        return policy.encode_first_frames(first, s.height, s.width, s.num_frames)

    @property
    def edits(self) -> bool:
        """Whether prompts come with images to edit."""
        return self.model.policy.family.most_source_images > 0

    def shared(self, requests: DrawingBatch) -> list[Conditions]:
        """What each sample refers to, on the host, one dict a prompt."""
        if self.edits:
            return self.model.policy.encode_edits(requests.prompts, requests.images, self._negative)
        return self.model.policy.conditions_of(requests.prompts, self._negative)

    @property
    def _negative(self) -> str | None:
        return self.settings.negative_prompt if self.settings.guidance_scale > 1 else None

    def draw(
        self, requests: DrawingBatch, step: int, purpose: str = "noise", graphs: RolloutGraphs | None = None
    ) -> list[Sampled]:
        """Micro-batches of all samples, in order.

        Args:
            requests: what is drawn.
            step: of the policy; noise depends on it, the run's seed, `purpose` and the sample's id.
            purpose: what is drawn for.
            graphs: which of them are kept for the update, if any; the first call with them is a collective. Those of
                edits are not: their conditions differ in size from sample to sample.
        """
        policy, size, host = self.model.policy, self.settings.micro_rollout_batch_size, HostCopies()
        shared, frames = self.shared(requests), self._first_frames(requests)
        graphs = None if self.edits else graphs
        if graphs is not None and not graphs.fit(partial(self.one_forward, requests), len(requests), self.sampler):
            graphs = None
        made = []
        for part in (slice(start, start + size) for start in range(0, len(requests), size)):
            own = self.on_device(frames[part])
            result = self._sampled(requests.select(part), self.on_device(shared[part]) | own, step, purpose, graphs)
            made.append((result, own, shared[part]))
        decoded = policy.decode_each(result.latents for result, _, _ in made)
        drawn = [
            Sampled(result, own, host.of(media.clamp(0, 1)), step, refers)
            for media, (result, own, refers) in zip(decoded, made)
        ]
        host.wait()
        return drawn

    def one_forward(self, requests: DrawingBatch, velocity: Callable[..., T] | None = None) -> T:
        """Of the first sample, as a rollout would make it. velocity: which answers; None: the policy itself."""
        policy, conditions = self.model.policy, self.on_device(self.encoded(requests.select(slice(1))))
        latents = torch.zeros(1, *self.latent_shape, device=policy.device)
        times = torch.full((1,), TRAIN_TIMESTEPS / 2, device=policy.device)
        return (velocity or policy.velocity)(latents, times, conditions, self.settings.guidance_scale)

    @torch.no_grad()
    def _sampled(
        self, requests: DrawingBatch, conditions: Conditions, step: int, purpose: str, graphs: RolloutGraphs | None
    ) -> SamplingResult:
        batch = self.batch(requests, conditions, step, purpose)
        generators = sample_generators(self.run_seed, step, requests.sample_ids.tolist(), purpose)
        start = window_start(self.sampler.config.moving_steps, self.sampler.noise, self.run_seed, step)
        keep = () if graphs is None else graphs.steps(self.sampler, start)
        return self.sampler.sample(self.model, batch, generator=generators, window=start, keep=keep)

    def batch(self, requests: DrawingBatch, conditions: dict[str, T], step: int, purpose: str) -> DiffusionBatch:
        """The sampler's input; with same_latent every sample of a prompt starts from the prompt's own noise.

        Args:
            requests: B samples.
            conditions: {name: (B, …)} of them.
            step: of the policy, for the noise, as `purpose` is.
            purpose: what is drawn for.
        """
        s, shape = self.settings, self.latent_shape
        latents = None
        if s.same_latent:
            generators = sample_generators(self.run_seed, step, requests.group_ids.tolist(), f"{purpose}/prompt")
            latents = draw_noise(shape, generators, torch.float32, self.model.policy.device)
        return DiffusionBatch(conditions, shape, len(requests), s.guidance_scale, latents)


def own_share(dataset: list, indices: list[int], first: int = 0) -> DrawingBatch:
    """This rank's samples of a global batch. Each prompt is read once.

    Args:
        dataset: of prompts.
        indices: of the global batch's samples in it.
        first: the number of the global batch's first sample.
    """
    mine = len(indices) // collectives.world_size()
    start = collectives.rank() * mine
    chosen = indices[start : start + mine]
    known = {index: dataset[index] for index in dict.fromkeys(chosen)}
    return drawing_batch([known[index] for index in chosen], chosen, first + start)


def drawing_batch(prompts: list, indices: list[int], first: int) -> DrawingBatch:
    """Requests for samples of data set entries.

    Args:
        prompts: an entry for each sample.
        indices: of the entries in the data set, which are their groups.
        first: id of the first sample; the others count on from it.
    """
    return DrawingBatch(
        prompts=[each.prompt for each in prompts],
        images=[each.images for each in prompts],
        labels=[each.label for each in prompts],
        references=[each.reference for each in prompts],
        metadata=[each.metadata for each in prompts],
        group_ids=torch.tensor(indices),
        sample_ids=torch.arange(first, first + len(indices)),
    )
