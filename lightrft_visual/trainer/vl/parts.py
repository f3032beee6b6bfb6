"""What a vision-language run is made of: `build` puts it together, the trainer works with it."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...algorithms.loss_terms import PartSettings
from ...config.vl import RunConfig
from ...data.bad_rows import BadRow
from ...data.prompts import PromptDataset, PromptRow, is_remote_row
from ...data.rendering import caption_of, messages_of, prompt_ids, render_prompt
from ...data.sampler import PromptSupply
from ...experience.rollouts import Episode, PromptBatch, PromptFeatures, Rollout, Turn
from ...models.loading import Checkpoint
from ...observe.guard.divergence import SIDE, PairedScores, image_statistics
from ...observe.guard.watch import text_statistics
from ...observe.recorder import records_from_rollouts
from ...rewards.batch import RewardBatch, batch_from_rollouts
from ...rewards.engine import RewardComputationEngine
from ...rewards.probe import plausible_image
from ...rollout.parity import ParityGate
from ...rollout.weight_sync import gathered_state_dict
from ...runtime import collectives
from ...runtime.checkpoint.export import export_hf, export_lora
from ...runtime.deepspeed import DeepspeedStrategy
from ...runtime.train_engine import TrainEngine
from ..hooks import StepData
from ..loop import RunParts
from .evaluation import Evaluation, gold_scores, paired_scores_at
from .maker import ExperienceMaker

T = torch.Tensor

Loading = list[Future[PromptRow | BadRow]]


class _Begun(NamedTuple):
    """A batch on its way. samples: whose loading it waits for, in order; batch: None where a row turned out bad."""

    samples: Loading
    ids: T
    batch: Future[PromptBatch | None]


class PromptSource:
    """Hands out this rank's batches of prompts, numbered over the run; the next one may be prepared ahead.

    What comes out is the same with and without preparing, errors included, which are raised where their batch is taken.
    The sampler moves only when a batch is taken, so a run that is resumed starts with the batch that was not.

    Args:
        supply: decoded rows in the sampler's order.
        make: (rows, ids) to the batch of loaded rows.
        features: what engines and trainer read of a batch.
        keeps_ready: prepare another batch as soon as one is taken, for makers that may ask for more than one a step.
    """

    runs_ahead = False

    def __init__(
        self,
        supply: PromptSupply,
        make: Callable[[list[PromptRow], T], PromptBatch],
        features: Callable[[PromptBatch], list[PromptFeatures]],
        keeps_ready: bool = False,
    ) -> None:
        self.supply, self.make, self.features, self.keeps_ready = supply, make, features, keeps_ready
        self.taken, self.epoch = 0, 0.0  # prompts taken so far by all ranks, and epochs
        self._step = 0
        # One thread: processors are not made for several. It leaves the cores of parallel operations to the step.
        self._thread = ThreadPoolExecutor(1, "prompts", _keep_operations_in_this_thread)
        self._begun: _Begun | None = None

    def next(self, step: int, left: int = 1) -> PromptBatch:
        """This rank's next batch. A collective.

        Args:
            step: finished steps, for the list of bad rows.
            left: steps of the run, this one included.

        Raises:
            DataError: as `PromptSupply.next_rows`, and for prompts that cannot be used.
        """
        ids, self._step = self._next_ids(), step
        begun, self._begun = self._begun, None
        samples = self.supply.next_rows(step + 1)
        if (
            begun is not None
            and torch.equal(ids, begun.ids)
            and len(samples) == len(begun.samples)
            and all(own.done() and own.result() is sample for own, sample in zip(begun.samples, samples))
        ):  # it is made of these very samples
            batch = begun.batch.result()
        else:
            batch = self.make(samples, ids)
        self.taken, self.epoch = self.taken + self.supply.sampler.batch_size, self.supply.sampler.epoch
        if self.keeps_ready:
            self.prepare_next()
        return batch

    def next_again(self) -> PromptBatch:
        """A further batch of the step that took the last one. A collective."""
        return self.next(self._step)

    def prepare_next(self) -> None:
        """Start on the next batch, unless it was started; no collective."""
        if self._begun is None:
            samples, ids = self.supply.look_ahead(), self._next_ids()
            self._begun = _Begun(samples, ids, self._thread.submit(self._prepare, samples, ids))

    def first(self, count: int, step: int) -> PromptBatch:
        """Some usable prompts for a probe, alike on all ranks, with numbers below 0; the order stays as it is. A
        collective."""
        samples = self.supply.first_rows(max(1, count), step)
        return self.make(samples, torch.arange(-len(samples), 0))

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, and the bad rows met."""
        sampler, dataset = self.supply.sampler.state_dict(), self.supply.dataset
        met = [asdict(row) for row in dataset.bad.rows.values() if row.found != BadRow.found]  # beside a start's
        told = {"data": dataset.fingerprint, "bad_rows": met, "prompt_max_len": dataset.checks.prompt_max_len}
        return {"sampler": sampler, "taken": self.taken, **told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.supply.sampler.load_state_dict(state["sampler"])
        self.supply.dataset.check_resumed(state["data"])
        self.supply.go_on(state["bad_rows"], state["prompt_max_len"] == self.supply.dataset.checks.prompt_max_len)
        self.taken = state["taken"]

    def _next_ids(self) -> T:
        """The numbers of this rank's prompts in the next batch."""
        return (torch.arange(self.supply.sampler.batch_size) + self.taken)[
            collectives.rank() :: collectives.world_size()
        ]

    def _prepare(self, loading: Loading, ids: T) -> PromptBatch | None:
        samples = [each.result() for each in loading]
        if any(isinstance(sample, BadRow) for sample in samples):
            return None
        batch = self.make(samples, ids)
        batch.prepared = self.features(batch)
        return batch


def _keep_operations_in_this_thread() -> None:
    """From here on parallel operations that this thread calls run in it alone; those of other threads as before.

    Else OpenMP starts a second team, and with more threads than cores every operation of the first one gets slower.
    torch.set_num_threads cannot do it: it also sets MKL's threads, for all of the process.
    """
    torch.get_num_threads()  # at its first use in a thread PyTorch sets the number itself
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(1)


@dataclass(kw_only=True)
class VLParts(RunParts):
    """Everything a vision-language run is made of; `build.build_parts` puts it together from a configuration."""

    kind: ClassVar[str] = "vl"
    records_of = staticmethod(records_from_rollouts)  # of a step's rollouts

    config: RunConfig
    strategy: DeepspeedStrategy
    checkpoint: Checkpoint
    actor: TrainEngine
    critic: TrainEngine | None
    maker: ExperienceMaker
    dataset: PromptDataset
    prompts: PromptSource
    evaluation: Evaluation | None
    loss_parts: list[PartSettings]
    gate: ParityGate | None = None
    reference_module: torch.nn.Module | None = None  # a frozen copy with weights of its own
    gold: RewardComputationEngine | None = None

    def closed_behind(self) -> tuple[Any, ...]:
        return self.maker.rewards, *([self.gold] if self.gold is not None else []), self.maker.engine

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Of the policy."""
        return [parameter for parameter in self.actor.module.parameters() if parameter.requires_grad]

    # -- for `features.guard` ------------------------------------------------------------------------------------

    def add_statistics(self, step: StepData) -> None:
        """Numbers that no reward decides, of texts, and where there are any of drawings. A collective.

        The variety of drawings within groups is `drawing_diversity`, of which no band is learnt: a model that comes to
        draw what its captions say draws one thing for one caption.
        """
        answers = [each for each in step.rollouts if not each.prompt.draws]
        groups = [each.prompt.group_id for each in answers]
        for name, value in text_statistics([each.sampled_ids for each in answers], groups).items():
            step.metrics.add(name, value)
        if len(self.loss_parts) < 2:
            return
        drawn = [each for each in step.rollouts if each.prompt.draws]
        images = [torch.from_numpy(np.array(each.image.convert("RGB"))).permute(2, 0, 1) / 255 for each in drawn]
        media = torch.stack(images) if images else torch.zeros(0, 3, SIDE, SIDE)
        for name, value in image_statistics(media, torch.tensor([each.prompt.group_id for each in drawn])).items():
            step.metrics.add("drawing_diversity" if name == "image_diversity" else name, value)

    def gold_of(self, rollouts: Sequence[Rollout]) -> dict[int, tuple[float, bool]]:
        """What gold says of scored rollouts, whose media are still there, by `sample_id`. A collective."""
        scores = gold_scores(self.gold, rollouts, self.maker.settings.micro_batch_size)
        return {each.sample_id: own for each, own in zip(rollouts, scores)}

    def add_gold(self, step: StepData, scores: Mapping[int, tuple[float, bool]], number: int) -> PairedScores:
        """Reward and gold of each prompt. A collective.

        Args:
            step: whose metrics get `gold`, the mean over the rollouts that could be scored.
            scores: of `gold_of`.
            number: of the step.
        """
        own = [scores.get(each.sample_id, (0.0, False)) for each in step.rollouts]
        for score, valid in own:
            if valid:
                step.metrics.add("gold", score)
        return paired_scores_at(number, step.rollouts, own)


def answered(dataset: PromptDataset, checkpoint: Checkpoint, config: RunConfig, index: int) -> RewardBatch:
    """A sample as rewards see it, with an image where it asks for one and a turn where the run has episodes.

    Args:
        dataset: of prompts.
        checkpoint: which renders them.
        config: of the run.
        index: of the sample; if its media are remote they are not fetched, and made-up images take their place.
    """
    sample = dataset[index]
    if is_remote_row(sample):
        sample = replace(sample, images=[plausible_image() for _ in sample.images], videos=[])
    else:
        sample = dataset.load(index)
    batch = prompt_batch([sample], checkpoint, config.data, torch.tensor([index]))
    text = "" if sample.draw else "an answer" if sample.reference is None else str(sample.reference)
    rendered = checkpoint.processor is None and None not in batch.messages
    (prompt,) = prompt_ids(batch.prompts, checkpoint.tokenizer, rendered)
    completion = checkpoint.tokenizer(text)["input_ids"]
    completion = completion or prompt[-1:]  # an answer has a token at least, and a drawing many
    features = PromptFeatures(
        batch.prompts[0], prompt, images=batch.images[0], videos=batch.videos[0], label=sample.label,
        reference=sample.reference, metadata=sample.metadata, caption=batch.captions[0], group_id=0,
    )  # fmt: skip
    drawn = plausible_image() if sample.draw else None
    episode = Episode([Turn(text)], [0] * len(completion)) if config.episodes.used else None
    return batch_from_rollouts([Rollout(features, completion, None, text, False, 0, image=drawn, episode=episode)])


def prompt_batch(samples: list, checkpoint: Checkpoint, data, ids: torch.Tensor) -> PromptBatch:
    """Rendered prompts.

    Args:
        samples: of the data set.
        checkpoint: for its chat template, and tools.
        data: section of the configuration.
        ids: (P) long, one a sample.
    """
    renderer, family = checkpoint.processor or checkpoint.tokenizer, type(checkpoint.family)
    return PromptBatch.of(
        [render_prompt(sample, renderer, data, family, checkpoint.tools) for sample in samples],
        [sample.images for sample in samples],
        [sample.videos for sample in samples],
        [sample.reference for sample in samples],
        [sample.label for sample in samples],
        [sample.metadata for sample in samples],
        ids,
        [caption_of(sample) for sample in samples],
        [messages_of(sample, data) for sample in samples],
    )


def export_actor(parts: Any, folder: Path) -> None:
    """A checkpoint folder for transformers and vLLM, LoRA merged; the adapter itself in `lora/`. A collective.

    parts: of a run, with the actor, what it was loaded from, and hooks, which may lend other weights.
    """
    actor, checkpoint = parts.actor, parts.checkpoint
    actor.bring_back()
    model = actor.module.model
    named = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    with parts.hooks.weights_for("export") or nullcontext():
        state = gathered_state_dict(actor, keep=collectives.is_rank_0())
        with actor.gathered(list(named.values())):
            adapters = {name: parameter.detach().cpu().clone() for name, parameter in named.items()}
    if parts.config.model.lora_rank and collectives.is_rank_0():
        export_lora(model, folder / "lora", adapters)
    if collectives.is_rank_0():
        export_hf(actor.module.transformer, checkpoint.processor or checkpoint.tokenizer, folder, state)
