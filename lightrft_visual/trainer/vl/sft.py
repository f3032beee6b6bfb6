"""Supervised training: rows with a response, and the mean negative log-probability of its tokens. A thin trainer over
the pieces of the others: the same rows, model, packing, checkpoints and export, without rollouts and rewards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...config.constraints import divisors, nearest
from ...config.sft import SFTRunConfig
from ...config.vl import mixing_probabilities
from ...data.bad_rows import list_bad_rows
from ...data.prompts import PromptDataset, PromptRow, RowChecks
from ...data.rows import response_of
from ...data.sampler import PromptSampler, PromptSupply, epoch_quotas, fitting_batch
from ...data.validation import validation_shard_indices
from ...errors import ConfigError
from ...experience.buffer import NaiveReplayBuffer
from ...experience.rollouts import PromptBatch, Rollout, ScoringRule, collate
from ...experience.types import Experience, ExperienceVL, ModelInputs
from ...models.loading import Checkpoint
from ...observe.console import RunConsole
from ...rollout.multimodal import MultimodalDataProcessor
from ...rollout.weight_sync import gathered_state_dict
from ...runtime import collectives
from ...runtime.checkpoint.same_model import check_model
from ...runtime.files import FolderLock
from ...runtime.phase_timer import PhaseTimer
from ...runtime.seeding import derive_seed
from ...runtime.start_up import log_stage
from ...runtime.train_engine import TrainEngine
from ..hooks import Hooks, StepData
from ..loop import Evaluated, LoopSettings, PolicyTrainer
from ..run_state import (
    check_output,
    folders_held,
    open_recorder,
    refused_data_listed,
    start_strategy,
    synchronize,
)
from .build import load_actor, model_of, open_model, prove
from .parts import PromptSource, export_actor, prompt_batch

logger = logging.getLogger(__name__)


@dataclass
class SFTParts:
    """Everything a supervised run is made of."""

    kind: ClassVar[str] = "sft"

    config: SFTRunConfig
    checkpoint: Checkpoint
    actor: TrainEngine
    encoder: ResponseEncoder
    dataset: PromptDataset
    eval_set: PromptDataset | None
    prompts: PromptSource
    loop: LoopSettings
    recorder: Any
    console: Any
    timer: PhaseTimer
    hooks: Hooks


class ResponseEncoder:
    """Rows and their responses as model inputs. Only the tokens of a response, and the end token behind them, are
    actions: what the loss counts."""

    def __init__(self, checkpoint: Checkpoint, config: SFTRunConfig) -> None:
        self.checkpoint, self.config = checkpoint, config
        data, longest = config.data, config.rollout.prompt_max_len
        self.processor = MultimodalDataProcessor(
            checkpoint.tokenizer, checkpoint.processor, longest, allow_remote=data.allow_remote_media,
            max_image_pixels=data.max_image_pixels,
        )  # fmt: skip

    def batch(self, samples: list[PromptRow], ids: torch.Tensor) -> PromptBatch:
        """Rendered prompts with their responses as references."""
        key = self.config.data.response_key
        answered = [replace(each, reference=response_of(each, key)) for each in samples]
        return prompt_batch(answered, self.checkpoint, self.config.data, ids)

    def experience(self, batch: PromptBatch) -> Experience | ExperienceVL:
        """Prompts and responses, padded, on the host."""
        tokenizer = self.checkpoint.tokenizer
        features = batch.prepared or self.processor.features(batch)
        ids = [
            [*tokenizer.encode(each.reference, add_special_tokens=False), tokenizer.eos_token_id] for each in features
        ]
        answered = [Rollout(each, own, None, each.reference, False, each.group_id) for each, own in zip(features, ids)]
        return collate(answered, tokenizer.pad_token_id, self.checkpoint.processor is not None)


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
        data.metrics.add("epoch", self.prompts.supply.sampler.epoch)
        data.metrics.add("bad_rows", len(self.parts.dataset.bad.rows))
        return data

    def _update(self, data: StepData) -> None:
        train, metrics = self.config.train, data.metrics
        seed = derive_seed(train.seed, "replay", self.step, 0)
        (plan,) = self.buffer.plan(seed, token_budget=train.max_tokens_per_batch or None)
        counts = [int(item.action_mask.sum()) for item in self.buffer]  # response tokens
        total = collectives.all_reduce_sum(torch.tensor([float(sum(counts))], dtype=torch.float64)).item()
        for number, micro_batch in enumerate(plan):
            inputs = ModelInputs.of(self.buffer.load(micro_batch))
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

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self) -> Evaluated:
        """`eval_loss`: nats a token of the held-out responses. A collective."""
        if self.parts.eval_set is None:
            return Evaluated()
        if self.step == 0:
            log_stage("evaluating the model as it is")
        with self.hooks.weights_for("evaluation") or nullcontext():
            loss, tokens = collectives.all_reduce_sum(self._eval_sums(self.parts.eval_set)).tolist()
        return Evaluated({"eval_loss": loss / max(tokens, 1.0)})

    @torch.no_grad()
    def _eval_sums(self, samples: PromptDataset) -> torch.Tensor:
        """(2) float64: negative log-probability and tokens of this rank's share of the held-out responses."""
        sums = torch.zeros(2, dtype=torch.float64)
        for part in _parts_of(len(samples), self.config.train.micro_train_batch_size):
            rows = [samples.load(index) for index, _ in part]
            experience = self.encoder.experience(self.encoder.batch(rows, torch.arange(len(rows))))
            inputs = ModelInputs.of(experience.to_device(self.actor.engine.device))
            scores = self.actor(inputs, ScoringRule(), with_entropy=False).log_probs.double().sum(dim=1).cpu()
            real = torch.tensor([is_real for _, is_real in part])
            lengths = inputs.action_mask.sum(dim=1).cpu()
            sums += torch.stack([-scores[real].sum(), lengths[real].sum().double()])
        return sums

    # -- state ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release what hooks hold."""
        self.hooks.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the rows stand."""
        return self.prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.prompts.load_state_dict(state)

    def save_engines(self, folder: Path) -> None:
        """The model with its optimizer; every rank writes its part."""
        self.actor.save(str(folder), "actor")

    def saved_bytes(self) -> int:
        """About what `save_engines` writes on all ranks together."""
        return self.actor.saved_bytes

    def load_engines(self, folder: Path, saved_ranks: int | None = None) -> None:
        """The inverse of `save_engines`. saved_ranks: how many ranks saved, where they were not as many."""
        self.actor.load(str(folder), "actor", saved_ranks)

    def export(self, folder: Path) -> None:
        """A checkpoint folder for transformers, vLLM and `train grpo`."""
        with self.hooks.weights_for("export") or nullcontext():
            state = gathered_state_dict(self.actor, keep=collectives.is_rank_0())
        export_actor(self.actor, state, self.parts.checkpoint, bool(self.config.model.lora_rank), folder)


def _parts_of(count: int, size: int) -> Iterator[list[tuple[int, bool]]]:
    """This rank's (index, whether it counts) of `count` samples, `size` at a time, as often on every rank."""
    mine = validation_shard_indices(count, rank=collectives.rank(), world_size=collectives.world_size())
    return (mine[start : start + size] for start in range(0, len(mine), size))


# -- from a configuration --------------------------------------------------------------------------------------------


def build_supervised(config: SFTRunConfig, callbacks: Sequence[Any] = ()) -> SupervisedTrainer:
    """The trainer of a run. callbacks: hooks of a user. Raises ConfigError or DataError before any model is loaded for
    whatever can be known by then."""
    strategy = start_strategy(config)
    size, world = config.train.train_batch_size, collectives.world_size()
    if size % world:
        works = nearest(size, divisors(size * world, world))
        raise ConfigError(f"train_batch_size {size} does not divide over {world} ranks; use {works}")
    with folders_held(config.output) as locks:
        return SupervisedTrainer(_parts(config, strategy, locks), callbacks)


def _parts(config: SFTRunConfig, strategy: Any, locks: list[FolderLock]) -> SFTParts:
    resume_folder, named = check_output(config.output), config.model.pretrain
    log_stage("reading tokenizer and processor")
    config, checkpoint = open_model(config)
    if config.train.packing_samples:
        checkpoint.family.require_packing()
    model = model_of(named, config, checkpoint, critic=False)
    check_model(resume_folder, model, config.output.resume_other_model)
    log_stage("reading the data")
    with refused_data_listed(config.output.output_dir):
        dataset, eval_set = _datasets(config, checkpoint)
    steps, sampler = _schedule(config, dataset)
    recorder = open_recorder(config, resumed=resume_folder is not None, locks=locks)
    list_bad_rows(
        config.output.output_dir, resume_folder is not None, *(each.bad for each in (dataset, eval_set) if each)
    )
    log_stage("loading the model")
    actor, _ = load_actor(config, strategy, checkpoint, steps)
    prove(config, actor.module, checkpoint, model)
    encoder = ResponseEncoder(checkpoint, config)
    return SFTParts(
        config=config,
        checkpoint=checkpoint,
        actor=actor,
        encoder=encoder,
        dataset=dataset,
        eval_set=eval_set,
        prompts=PromptSource(PromptSupply(dataset, sampler), encoder.batch, encoder.processor.features),
        loop=LoopSettings(steps, config.output, config.train, resume_folder, model),
        recorder=recorder,
        console=RunConsole(steps, line_every=config.output.logging_steps, active=collectives.is_rank_0()),
        timer=PhaseTimer(synchronize),
        hooks=Hooks(),
    )


def _datasets(config: SFTRunConfig, checkpoint: Checkpoint) -> tuple[PromptDataset, PromptDataset | None]:
    """Rows of training and of evaluation, if there are any."""
    checks = partial(
        RowChecks,
        model_input=checkpoint.processor or checkpoint.tokenizer,
        prompt_max_len=config.rollout.prompt_max_len,
        media=type(checkpoint.family),
        response_key=config.data.response_key,
        response_max_len=config.rollout.generate_max_len,
    )
    evaluated = config.data.eval_data is not None and config.data.max_eval_samples > 0
    return (
        PromptDataset.for_training(config.data, checks()),
        PromptDataset.for_evaluation(config.data, checks()) if evaluated else None,
    )


def _schedule(config: SFTRunConfig, dataset: PromptDataset) -> tuple[int, PromptSampler]:
    """(steps, the order of the rows); the batch is cut to the rows that there are, and that is said."""
    train, shares = config.train, mixing_probabilities(config.data.prompt_data_probs)
    rows = sum(epoch_quotas(dataset.sizes, shares))
    size = fitting_batch(train.train_batch_size, rows, collectives.world_size())
    if size != train.train_batch_size:
        if collectives.is_rank_0():
            text = "train_batch_size %d is more than the %d rows of a pass over the data: a step takes %d"
            logger.warning(text, train.train_batch_size, rows, size)
        train.train_batch_size = size
    sampler = PromptSampler(
        dataset.sizes, size, seed=train.seed, probabilities=shares, mixing=config.data.prompt_mixing
    )  # fmt: skip
    return (train.max_steps if train.max_steps > 0 else sampler.num_batches(train.num_episodes)), sampler
