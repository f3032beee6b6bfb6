"""What a vision-language run is made of: `build` puts it together, the trainer works with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...algorithms.aggregation import PartSettings
from ...config.vl import DataConfig, RunConfig
from ...data.prompts import PromptDataset, caption_of, is_remote_row, render_prompt
from ...experience.prompts import PromptBatch
from ...experience.rollouts import PromptFeatures, Rollout
from ...models.loading import Checkpoint
from ...observe.rollouts import Record, records_from_rollouts
from ...rewards.batch import RewardBatch, batch_from_rollouts
from ...rewards.engine import RewardComputationEngine
from ...rewards.probe import plausible_image
from ...rollout.parity import ParityGate
from ...runtime.deepspeed import DeepspeedStrategy, TrainEngine
from ..hooks import Hooks
from ..loop import LoopSettings
from .evaluation import Evaluation
from .judging import VLWatched
from .maker import ExperienceMaker
from .prompts import PromptSource


@dataclass
class VLParts:
    """Everything a vision-language run is made of; `build.build_parts` puts it together from a configuration."""

    kind: ClassVar[str] = "vl"

    config: RunConfig
    strategy: DeepspeedStrategy
    checkpoint: Checkpoint
    actor: TrainEngine
    critic: TrainEngine | None
    maker: ExperienceMaker
    dataset: PromptDataset
    prompts: PromptSource
    evaluation: Evaluation | None
    loop: LoopSettings
    loss_parts: list[PartSettings]
    recorder: Any
    console: Any
    timer: Any
    hooks: Hooks
    gate: ParityGate | None = None
    reference_module: torch.nn.Module | None = None  # a frozen copy with weights of its own
    gold: RewardComputationEngine | None = None

    @property
    def has_gold(self) -> bool:
        """Whether a judge that training never sees is named."""
        return self.gold is not None

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Of the policy."""
        return [parameter for parameter in self.actor.module.parameters() if parameter.requires_grad]

    def records_of(self, rollouts: Any) -> list[Record]:
        """Of a step's rollouts."""
        return records_from_rollouts(rollouts)

    def watched(self) -> VLWatched:
        """What the guard looks at."""
        return VLWatched(self.gold, draws=len(self.loss_parts) > 1)


def answered(dataset: PromptDataset, index: int, checkpoint: Checkpoint, data: DataConfig) -> RewardBatch:
    """A sample of the data as rewards see it; for remote media stand images: nothing is fetched here.

    Args:
        dataset: whose sample it is; it is answered by its reference, or with an image where it asks for one.
        index: of the sample.
        checkpoint, data: how its prompt is written.
    """
    sample = dataset[index]
    if is_remote_row(sample):
        sample = replace(sample, images=[plausible_image() for _ in sample.images], videos=[])
    else:
        sample = dataset.load(index)
    batch = prompt_batch([sample], checkpoint, data, torch.tensor([index]))
    text = "" if sample.draw else "an answer" if sample.reference is None else str(sample.reference)
    prompt, completion = (checkpoint.tokenizer(each)["input_ids"] for each in (batch.prompts[0], text))
    features = PromptFeatures(
        batch.prompts[0], prompt, images=batch.images[0], videos=batch.videos[0], label=sample.label,
        reference=sample.reference, metadata=sample.metadata, caption=batch.captions[0], group_id=0,
    )  # fmt: skip
    drawn = plausible_image() if sample.draw else None
    return batch_from_rollouts([Rollout(features, completion, None, text, False, 0, image=drawn)])


def prompt_batch(samples: list, checkpoint: Checkpoint, data, ids: torch.Tensor) -> PromptBatch:
    """Rendered prompts of data rows."""
    renderer, family = checkpoint.processor or checkpoint.tokenizer, type(checkpoint.family)
    return PromptBatch.of(
        [render_prompt(sample, renderer, data, family) for sample in samples],
        [sample.images for sample in samples],
        [sample.videos for sample in samples],
        [sample.reference for sample in samples],
        [sample.label for sample in samples],
        [sample.metadata for sample in samples],
        ids,
        [caption_of(sample) for sample in samples],
    )
