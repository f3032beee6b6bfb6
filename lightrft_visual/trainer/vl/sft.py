"""Supervised training: rows with a response, and the mean negative log-probability of its tokens. A thin trainer over
the pieces of the others: the same rows, model, packing, checkpoints and export, without rollouts and rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...config.constraints import divisors
from ...config.kinds import check_hooks
from ...config.sft import SFTRunConfig
from ...config.vl import mixing_probabilities
from ...data.prompts import PromptDataset, PromptRow, RowChecks
from ...data.rendering import render_answer, template_arguments
from ...data.rows import response_of
from ...data.sampler import PromptSupply, epoch_quotas, fitting_batch
from ...data.validation import EvaluationRows, validation_shard_indices
from ...experience.buffer import NaiveReplayBuffer
from ...experience.rollouts import PromptBatch, PromptFeatures, Rollout, ScoringRule, collate
from ...experience.types import Experience, ExperienceVL, ModelInputs
from ...models.loading import Checkpoint
from ...runtime import collectives
from ...runtime.checkpoint.same_model import check_model
from ...runtime.files import FolderLock
from ...runtime.seeding import derive_seed
from ...runtime.start_up import log_stage
from ...runtime.train_engine import TrainEngine
from ..hooks import StepData
from ..loop import Evaluated, LoopSettings, PolicyTrainer, RunParts
from ..run_state import check_output
from ..start import check_update, folders_held, open_run, refused_data_listed, start_strategy
from .build import datasets_of, load_actor, model_of, open_model, prompt_schedule, prove
from .episodes import data_processor
from .parts import PromptSource, export_actor, prompt_batch

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SFTParts(RunParts):
    """Everything a supervised run is made of."""

    kind: ClassVar[str] = "sft"

    config: SFTRunConfig
    checkpoint: Checkpoint
    actor: TrainEngine
    encoder: ResponseEncoder
    dataset: PromptDataset
    evaluation: HeldOutLoss | None
    prompts: PromptSource


class ResponseEncoder:
    """Rows and their responses as model inputs. Only the tokens of a response, as `render_answer` has it, and the end
    token behind them are actions: what the loss counts."""

    def __init__(self, checkpoint: Checkpoint, config: SFTRunConfig) -> None:
        self.checkpoint, self.config, self.ends = checkpoint, config, checkpoint.ends
        self.processor = data_processor(config, checkpoint)

    def batch(self, samples: list[PromptRow], ids: torch.Tensor) -> PromptBatch:
        """Rendered prompts with their responses as references."""
        key = self.config.data.response_key
        answered = [replace(each, reference=response_of(each, key)) for each in samples]
        return prompt_batch(answered, self.checkpoint, self.config.data, ids)

    def experience(self, batch: PromptBatch) -> Experience | ExperienceVL:
        """Prompts and responses, padded, on the host."""
        tokenizer = self.checkpoint.tokenizer
        features = batch.prepared or self.processor.features(batch)
        ids = [self._response(each) for each in features]
        answered = [Rollout(each, own, None, each.reference, False, each.group_id) for each, own in zip(features, ids)]
        return collate(answered, tokenizer.pad_token_id, self.checkpoint.processor is not None)

    def _response(self, prompt: PromptFeatures) -> list[int]:
        model_input = self.checkpoint.processor or self.checkpoint.tokenizer
        given = template_arguments(self.config.data, self.checkpoint.tools)
        text, end = render_answer(prompt.reference, prompt.text, prompt.messages, model_input, self.ends, given)
        return [*self.checkpoint.tokenizer.encode(text, add_special_tokens=False), end]


class SupervisedTrainer(PolicyTrainer):
    """Trains a vision-language or text model on responses."""

    def __init__(self, parts: SFTParts, callbacks: Sequence[Any] = ()) -> None:
        super().__init__(parts, callbacks)
        self.actor, self.prompts, self.encoder = parts.actor, parts.prompts, parts.encoder
        train = parts.config.train
        self.buffer = NaiveReplayBuffer(
            train.micro_train_batch_size, packing_samples=train.packing_samples, seed=train.seed
        )

    # -- a step --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Nothing: there is no engine."""

    def train_step(self) -> StepData:
        """Rows, their micro-batches, one guarded optimizer step. A collective."""
        batch = self.prompts.next(self.step, self.settings.total_steps - self.step)
        self.buffer.append(self.encoder.experience(batch))
        if self.step + 1 < self.settings.total_steps:
            self.prompts.prepare_next()  # while this step is trained on
        data = StepData([])
        with self.timer.phase("train"):
            self._update(data)
            self.buffer.clear()
        data.metrics.add("epoch", self.prompts.epoch)
        data.metrics.add("bad_rows", len(self.parts.dataset.bad.rows))
        return data

    def _update(self, data: StepData) -> None:
        train, metrics = self.config.train, data.metrics
        seed = derive_seed(train.seed, "replay", self.step, 0)
        (plan,) = self.buffer.plan(seed, token_budget=train.max_tokens_per_batch or None)
        counts = [int(item.action_mask.sum()) for item in self.buffer]  # response tokens
        total = collectives.all_reduce_sum(torch.tensor([float(sum(counts))], dtype=torch.float64)).item()
        for number, micro_batch in enumerate(plan):
            inputs = ModelInputs.of(self.buffer.load(micro_batch), micro_batch.media)
            share = -self.actor(inputs, ScoringRule(), with_entropy=False).log_probs.sum() / total
            share = share * (not micro_batch.filler)  # a filler keeps ranks in step, and counts for nothing
            self.actor.accumulate(share, number == len(plan) - 1)
            metrics.add("loss", share.detach() * total, 0.0)
        metrics.add("loss", 0.0, sum(counts))
        for count, item in zip(counts, self.buffer):
            metrics.add("response_length", count)
            metrics.add_total("tokens", len(item.sequences))
        result = self.actor.step()
        self.count_step(result, metrics)
        self.hooks.on_update(result)

    def sync(self) -> None:
        """Nothing: there is no engine."""

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts.load_state_dict(state)

    def engines(self) -> dict[str, TrainEngine]:
        return {"actor": self.actor}

    def export(self, folder: Path) -> None:
        """A checkpoint folder for transformers, vLLM and `train grpo`."""
        export_actor(self.parts, folder)


@dataclass
class HeldOutLoss:
    """`eval_loss`: nats a token of the held-out responses; `eval_bad_rows` where rows may have to be fetched."""

    samples: EvaluationRows
    encoder: ResponseEncoder
    actor: TrainEngine
    micro_batch_size: int

    @torch.no_grad()
    def run(self, step: int) -> Evaluated:
        """Of the present weights. Each rank takes a share, as many micro-batches as the others. A collective."""
        rank, world = collectives.rank(), collectives.world_size()
        shard = validation_shard_indices(len(self.samples.dataset), rank=rank, world_size=world)
        fetched = self.samples.fetch([index for index, _ in shard], step)
        counted = torch.tensor([is_real and not masked for (_, is_real), masked in zip(shard, fetched.masked)])
        sums = torch.zeros(2, dtype=torch.float64)  # negative log-probability, tokens
        for start in range(0, len(shard), self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            rows = [fetched.rows.get(index) or self.samples.dataset.load(index) for index in fetched.indices[part]]
            experience = self.encoder.experience(self.encoder.batch(rows, torch.arange(len(rows))))
            inputs = ModelInputs.of(experience.to_device(self.actor.engine.device))
            scores = self.actor(inputs, ScoringRule(), with_entropy=False).log_probs.double().sum(dim=1).cpu()
            real, lengths = counted[part], inputs.action_mask.sum(dim=1).cpu()
            sums += torch.stack([-scores[real].sum(), lengths[real].sum().double()])
        loss, tokens = collectives.all_reduce_sum(sums).tolist()
        bad = {"eval_bad_rows": float(fetched.lost)} if self.samples.remote else {}
        return Evaluated({"eval_loss": loss / max(tokens, 1.0)} | bad)


# -- from a configuration --------------------------------------------------------------------------------------------


def build_supervised(config: SFTRunConfig, callbacks: Sequence[Any] = ()) -> SupervisedTrainer:
    """The trainer of a run. callbacks: hooks of a user. Raises ConfigError or DataError before any model is loaded for
    whatever can be known by then."""
    check_hooks(callbacks)
    strategy = start_strategy(config)
    world = collectives.world_size()
    check_update(config.train, world, divisors(config.train.train_batch_size * world, world))
    with folders_held(config.output) as locks:
        return SupervisedTrainer(_parts(config, strategy, locks), callbacks)


def _parts(config: SFTRunConfig, strategy: Any, locks: list[FolderLock]) -> SFTParts:
    resume_folder, named = check_output(config.output), config.model.pretrain
    log_stage("reading tokenizer, processor and data")
    config, checkpoint = open_model(config)
    if config.train.packing_samples:
        checkpoint.family.require_packing()
    model = model_of(named, config, checkpoint, critic=False)
    check_model(resume_folder, model, config.output.resume_other_model)
    with refused_data_listed(config.output.output_dir):
        checks = RowChecks(
            model_input=checkpoint.processor or checkpoint.tokenizer,
            prompt_max_len=config.rollout.prompt_max_len,
            media=type(checkpoint.family),
            response_key=config.data.response_key,
            response_max_len=config.rollout.generate_max_len,
            ends=checkpoint.ends,
        )
        dataset, eval_set = datasets_of(config.data, checks)
    longest = dataset.longest
    if config.data.allow_remote_media:  # what is not here may have any size
        longest = config.rollout.prompt_max_len + config.rollout.generate_max_len
    config.train.check_budget(longest, f"the longest row of the data has {longest} tokens")
    size, step_size = _fitted_size(config, dataset)
    steps, sampler = prompt_schedule(config, dataset, size)
    loop = LoopSettings(steps, config.output, resume_folder, model, step_size)
    run = open_run(config, loop, locks, [each for each in (dataset, eval_set) if each is not None])
    log_stage("loading the model")
    actor, _ = load_actor(config, strategy, checkpoint, steps)
    prove(config, actor.module, checkpoint, model)
    encoder, micro_batch = ResponseEncoder(checkpoint, config), config.train.micro_train_batch_size
    return SFTParts(
        **run._asdict(),
        config=config,
        checkpoint=checkpoint,
        actor=actor,
        encoder=encoder,
        dataset=dataset,
        evaluation=None if eval_set is None else HeldOutLoss(EvaluationRows(eval_set), encoder, actor, micro_batch),
        prompts=PromptSource(PromptSupply(dataset, sampler), encoder.batch, encoder.processor.features),
    )


def _fitted_size(config: SFTRunConfig, dataset: PromptDataset) -> tuple[int, int]:
    """train_batch_size, cut to the rows that there are, and that is said; and as it would be on one rank."""
    train = config.train
    rows = sum(epoch_quotas(dataset.sizes, mixing_probabilities(config.data.prompt_data_probs)))
    alone = min(train.train_batch_size, rows)
    size = fitting_batch(train.train_batch_size, rows, collectives.world_size())
    if size != train.train_batch_size:
        if collectives.is_rank_0():
            text = "train_batch_size %d is more than the %d rows of a pass over the data: a step takes %d"
            logger.warning(text, train.train_batch_size, rows, size)
        train.train_batch_size = size
    return size, alone
