"""The loop's hooks for models that see: GRPO, RLOO, REINFORCE and, with a critic, PPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from ...batches.prompts import PromptBatch
from ...batches.rollouts import Rollout, let_go_of_media
from ...checkpoint.export import export_hf, export_lora
from ...config import registry
from ...config.vl import AlgorithmConfig, RunConfig
from ...data.prompts import PromptRow
from ...data.supply import PromptSupply
from ...errors import ConfigError
from ...observe.metrics import MetricsAccumulator
from ...observe.rollouts import Record, gather_records, own_choice, records_from_rollouts
from ...replay.buffer import NaiveReplayBuffer
from ...replay.selective import SelectiveReplay
from ...rollout.parity import RolloutCheck
from ...rollout.weight_sync import gathered_state_dict
from ...strategy import collectives
from ...strategy.deepspeed import TrainEngine
from ...strategy.host import give_back_freed_memory
from ...strategy.seeding import derive_seed
from ...strategy.sequence import own_scores
from ...strategy.start_up import say
from ..loop import Evaluated, PolicyTrainer, StepData
from ..stage_metrics import add_stage_metrics
from .ahead import RolloutsAhead, add_staleness
from .build import build_parts, engine_weights
from .image_dependence import ImageDependence
from .metrics import (
    add_distorted,
    add_gold,
    add_image_metrics,
    add_rollout_metrics,
    add_text_metrics,
    kl_per_token,
)
from .parts import VLParts, prompt_batch
from .prompts_ahead import PromptsAhead
from .updates import PolicyUpdate, TrainBatch, ValueUpdate, comparable, has_dropout, plan_batch

PROBE_PROMPTS = 4  # that engine and trainer both score when the parity gate looks


class VLTrainer(PolicyTrainer):
    """Trains an actor, and a critic where there is one, on rollouts of prompts with images.

    Raises ConfigError for an advantage estimator that another trainer runs, as the registry says.
    """

    def __init__(self, parts: VLParts):
        check_trainer(type(self), parts.config.algorithm.advantage_estimator)
        super().__init__(parts.loop, parts.recorder, parts.console, parts.timer)
        self.parts, self.config = parts, parts.config
        train, algorithm = parts.config.train, parts.config.algorithm
        self.maker, self.actor, self.critic = parts.maker, parts.actor, parts.critic
        self.guard.penalties = self.maker.rewards.penalties
        self.separate_scores = train.separate_old_log_probs or has_dropout(parts.actor.module)
        self.buffer = NaiveReplayBuffer(
            train.micro_train_batch_size,
            packing_samples=train.packing_samples,
            seed=train.seed,
            share_prefix=bool(train.share_prefix),
            sequence=parts.strategy.sequence,
            homogeneous=train.homogeneous_batches,
        )
        self.policy_update = PolicyUpdate(parts.actor, algorithm, parts.maker.settings.sampling.scoring, train.seed)
        self.policy_update.behaviour = parts.config.asynchronous.stale_correction == "behaviour"
        self.replay = _selective_replay(algorithm, train.seed)
        self.value_update = ValueUpdate(parts.critic, algorithm) if parts.critic else None
        drawing = parts.actor.module.drawing
        self.image_tokens = None if drawing is None else drawing.tokens
        check_budget(parts.config, self.image_tokens or 0)
        self.dependence = _image_dependence(parts)
        self.supply = PromptSupply(parts.dataset, parts.sampler)
        features = parts.maker.rollout_stage.data_processor.features
        self.prompts_ahead = PromptsAhead(self.supply, self._prompts, features)
        self.most_stale, self.ahead = parts.config.asynchronous.max_staleness, None
        if self.most_stale:
            stage, sampling = parts.maker.rollout_stage, parts.maker.settings.sampling
            self.ahead = RolloutsAhead(
                parts.config.asynchronous.ahead,
                self._next_prompts,
                self._prompts_state,
                lambda batch: stage.announce(batch, sampling),
            )
        self.rounds = 0  # batches of prompts taken so far; numbers the prompts of the run
        self.synced = False  # whether the engine was given trained weights, after those of the start
        self.probe: PromptBatch | None = None
        self.parity = 0.0

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """The trainer of a run. Raises as `build.build_parts`, and ConfigError for an estimator of another class."""
        check_trainer(cls, config.algorithm.advantage_estimator)
        return cls(build_parts(config))

    # -- stages --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the rollout engine and the reward workers; call it after `fit`, before the process group ends."""
        self.maker.engine.close()
        self.maker.rewards.close()
        if self.parts.gold is not None:
            self.parts.gold.close()

    def start(self) -> None:
        """The engine gets the weights that training starts or goes on from, and a first look through the gate."""
        say("giving the engine its weights, and comparing it with the trainer")
        self._offload()
        self._load_engine_weights()
        self._policy_is_new()
        # A few rows for the first parity check; the sampler's order stays as it is.
        rows = self.supply.first_rows(PROBE_PROMPTS, self.step)
        self.probe = self._probe_of(self._prompts(rows, torch.arange(-len(rows), 0)))
        reported = self.parity
        self._check_parity()
        reference = self.maker.forward_stage.reference
        if self.step == 0 and self.parts.gate is not None and reference is not None:
            self.parts.gate.check_reference(reference, self.probe, self.config.rollout.temperature)
        if self.step > 0:
            self.parity = reported  # a resumed run: the next row shows the gate after the sync that it continues from

    def collect(self) -> StepData:
        """Experience of this rank's next prompts, checked against what the engine sampled."""
        # What was asked before (gate, evaluation) differs after a resume; a prefix found in a cache is worked out in
        # another order than a fresh one, which shows in the last bits.
        self.maker.engine.reset_caches()
        weights = self.maker.rewards.refresh_weights()
        left = self.settings.total_steps - self.step
        batch = self._next_prompts() if self.ahead is None else self.ahead.next(left)
        self.probe = self._probe_of(batch)
        self.policy_update.version = self.step
        made = self.maker.make(batch, more=self._next_prompts, scored=partial(self._let_go_of_media, batch))
        if self.step + 1 < self.settings.total_steps:
            self.prompts_ahead.begin(self._next_ids())  # while this step is trained on
        data = StepData(made.experiences, records=self._records(made.rollouts))
        if self.config.algorithm.reads_log_probs:
            check = self._rollout_check()
            for each in made.experiences:
                mask = comparable(each, each.action_mask, self.step)
                check.add(each.action_log_probs, each.rollout_log_probs, mask)
            check.settle()
            self._report_check(check, data.metrics)
        if self.dependence is not None and self.dependence.due(self.step + 1):
            with self.timer.phase("forward"):
                self.dependence.measure(made.rollouts, data.metrics)
        add_rollout_metrics(data.metrics, made.experiences, draws=self.image_tokens is not None)
        add_stage_metrics(data.metrics, made.metrics)
        if self.maker.settings.distortion is not None:
            add_distorted(data.metrics, made.rollouts, self.maker.settings.distortion.strength(self.step))
        for name, weight in weights.items():
            data.metrics.add(f"reward_weight/{name}", weight)
        if self.config.guard.watch:
            add_text_metrics(data.metrics, made.rollouts)
            if self.image_tokens is not None:
                add_image_metrics(data.metrics, made.rollouts)
            if self.parts.gold is not None and self._gold_due():
                data.look = add_gold(data.metrics, self.parts.gold, made.rollouts, self.step + 1)
        if self.ahead is not None:
            add_staleness(data.metrics, made.experiences, self.step, self.most_stale)
            for name, value in self.maker.engine.measured().items():
                data.metrics.add(name, value)
        data.metrics.add("policy_version", self.maker.policy_version)
        data.metrics.add("epoch", self.parts.sampler.epoch)
        data.metrics.add("bad_rows", len(self.parts.dataset.bad))
        return data

    def learn(self, data: StepData) -> None:
        """One KL controller update, then `max_epochs` passes over the step's samples."""
        config = self.config
        self._steer_kl(data)
        while data.batches:
            self.buffer.append(data.batches.pop(0))
        if self.replay is not None:
            self._replay(data.metrics)
        self.buffer.share()
        check = None if config.algorithm.reads_log_probs else self._rollout_check()
        for epoch in range(config.train.max_epochs):
            batches = self._planned(epoch)
            if check is not None and epoch == 0:
                with self.timer.phase("forward"):
                    self.policy_update.score(self.buffer, batches[0 if self.separate_scores else 1 :], check)
            for number, batch in enumerate(batches):
                first = epoch == number == 0
                self._update(batch, data.metrics, first, check if first else None)
        if check is not None:
            self._report_check(check, data.metrics)
        self.buffer.clear()

    def _planned(self, epoch: int) -> list[TrainBatch]:
        """The train batches of one pass over the buffer. A collective."""
        config = self.config
        seed, budget = derive_seed(config.train.seed, "replay", self.step, epoch), config.train.max_tokens_per_batch
        steps = self.buffer.plan(seed, step_size=config.train.train_batch_size, token_budget=budget or None)
        lengths = config.rollout.generate_max_len, self.image_tokens
        return [plan_batch(self.buffer, step, config.algorithm, *lengths) for step in steps]

    def _replay(self, metrics: MetricsAccumulator) -> None:
        """Samples of earlier steps in the places of those without advantage."""
        refilled = self.replay.refill(self.buffer, self.step)
        metrics.add("replayed_share", refilled.replaced / refilled.samples)
        for version in refilled.versions:
            metrics.add("replayed_age", self.step - version)

    def _steer_kl(self, data: StepData) -> None:
        """The controller sees the mean KL per token and the number of samples, over all ranks."""
        controller = self.maker.kl_controller
        mean, samples = kl_per_token(data.batches)
        controller.update(mean, samples)
        data.metrics.add("kl_coef", controller.value)

    def _update(self, batch: TrainBatch, metrics: MetricsAccumulator, first: bool, check: RolloutCheck | None) -> None:
        if self.value_update is not None:
            self.count_step(self.value_update.step(self.buffer, batch, metrics), metrics, "critic_")
        if self.step >= self.config.train.freezing_actor_steps:
            kl_coef = self.maker.kl_controller.value
            result = self.policy_update.step(self.buffer, batch, kl_coef, metrics, first, check)
            self.count_step(result, metrics)
            if result.applied and self.parts.ema is not None:
                self.parts.ema.step()

    def sync(self) -> None:
        """The engine gets the trained weights. Whether they are the same, the next rollout shows before anything is
        trained on it; a probe is made where none follows or would show it, and now and then. Rollouts ahead show
        nothing, as their policy is gone when they are trained on, so there the first sync of a run is probed too."""
        if self.parts.following is not None:
            self.parts.following.step(self.step)
        self._offload()
        self.maker.engine.wake()
        self._load_engine_weights()
        self._policy_is_new()
        every = self.config.rollout.parity_every
        evaluated = self.parts.evaluation is not None and self.evaluation_due()
        unseen = not self.maker.settings.sampling.full_distribution or (self.ahead is not None and not self.synced)
        self.synced = True
        if evaluated or unseen or (every and self.step % every == 0):
            self._check_parity()

    def evaluate(self) -> Evaluated:
        """See `Evaluation.run`; with the EMA weights where `eval_ema` asks for them."""
        if self.parts.evaluation is None:
            return Evaluated({}, [])
        if self.step == 0:
            say("evaluating the model as it is")
        with self._evaluated_weights():
            evaluated = self.parts.evaluation.run(self.step)
        if evaluated.drawings:
            self.recorder.save_contact_sheet(self.step, evaluated.drawings)
        return evaluated

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """The engine holds the EMA weights inside when they are to be evaluated."""
        if not self.config.output.eval_ema:
            yield
            return
        shared = self.maker.engine.shares_weights
        self.actor.bring_back()
        with self.parts.ema.swapped():
            self._load_engine_weights(lent=True)
            if shared:
                yield
        if not shared:
            yield  # the trainer has its own weights back: what fails in here needs no collective to restore them
        self._load_engine_weights()

    # -- prompts -------------------------------------------------------------------------------------------------

    def _next_prompts(self) -> PromptBatch:
        """This rank's prompts of the next global batch, numbered over the whole run."""
        batch = self.prompts_ahead.next(self.step + 1, self._next_ids())
        self.rounds += 1
        if self.maker.settings.dynamic_sampling_tries > 1:  # this step may ask for another batch
            self.prompts_ahead.begin(self._next_ids())
        return batch

    def _next_ids(self) -> torch.Tensor:
        """The numbers of this rank's prompts in the next batch."""
        count = self.parts.sampler.batch_size
        return (torch.arange(count) + self.rounds * count)[collectives.rank() :: collectives.world_size()]

    def _prompts(self, rows: list[PromptRow], ids: torch.Tensor) -> PromptBatch:
        return prompt_batch(rows, self.parts.checkpoint, self.config.data, ids)

    def _probe_of(self, batch: PromptBatch) -> PromptBatch | None:
        count = min(PROBE_PROMPTS, len(batch)) if self.parts.gate is not None else 0
        return batch.select(list(range(count))) if count else None

    # -- engine and parity ---------------------------------------------------------------------------------------

    def _offload(self) -> None:
        """Room for the engine, where it is asked for; training takes back by itself what it needs."""
        if self.config.rollout.offload_trainer:
            for _, engine in self._engines():
                engine.offload()
            if self.parts.critic is not None:
                self.parts.critic.offload_weights()

    def _policy_is_new(self) -> None:
        self.maker.policy_version = self.step
        if self.ahead is not None:
            self.maker.engine.note_policy(self.step)

    def _load_engine_weights(self, lent: bool = False) -> None:
        """The engine takes over the actor's weights. Those then make room for what it wakes next, where that is asked
        for and the engine keeps a copy: not before it has returned, as engines read the last ones after all were named.

        lent: the actor has other weights for a while, and stays where it is.
        """
        engine = self.maker.engine
        engine.update_weights(engine_weights(engine, self.actor))
        if self.config.rollout.offload_trainer and not (lent or engine.shares_weights):
            self.actor.offload_weights()

    def _check_parity(self) -> None:
        if self.parts.gate is not None and self.probe is not None:
            self.parity = self.parts.gate.check(self.probe, self.config.rollout.temperature)

    def _rollout_check(self) -> RolloutCheck:
        return RolloutCheck(self.parts.gate, self.probe, self.config.rollout.temperature)

    def _report_check(self, check: RolloutCheck, metrics: MetricsAccumulator) -> None:
        """parity: the gate's latest figure, of these rollouts or, where they cannot be compared, of the last probe.
        Ahead of the trainer only tokens of the present weights can be; without any no difference is told."""
        if check.compared and check.gate is not None:
            self.parity = check.figure
        if check.compared or self.ahead is None:
            metrics.add_max("rollout_logp_diff_max", check.largest)
        metrics.add_max("parity", self.parity)

    def _let_go_of_media(self, batch: PromptBatch, rollouts: list[Rollout]) -> None:
        """Decoded media of scored rollouts, but those that this rank's records will show, leave the host's memory."""
        if self.parts.gold is not None:  # scores them again
            return
        output, seed = self.config.output, self.config.train.seed
        count = output.num_trajectories_to_save if output.save_trajectories else 0
        records = own_choice(records_from_rollouts(rollouts), count, seed, self.step + 1)
        batch.let_go_of_media()
        give_back_freed_memory(let_go_of_media(rollouts, {record["sample_id"] for record in records}))

    def _records(self, rollouts: list[Rollout]) -> list[Record]:
        """Of the step in progress, to be kept and shown; none where nobody asks for them. A collective."""
        output = self.config.output
        if not output.save_trajectories:
            return []
        records = records_from_rollouts(rollouts)
        return gather_records(records, output.num_trajectories_to_save, self.config.train.seed, self.step + 1)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts, the KL controller, the reward statistics and the averages stand."""
        return (self._prompts_state() if self.ahead is None else self.ahead.state_now()) | {
            "parity": self.parity,
            "init_kl_coef": self.config.algorithm.init_kl_coef,
            "kl_controller": self.maker.kl_controller.state_dict(),
            "calculator": self.maker.calculator.state_dict(),
            "ema": self.parts.ema.state_dict() if self.parts.ema is not None else None,
            "replay": self.replay.state_dict() if self.replay is not None else None,
            "reference": self.parts.following.state_dict() if self.parts.following is not None else None,
        }

    def _prompts_state(self) -> dict[str, Any]:
        return {"sampler": self.parts.sampler.state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s; an `init_kl_coef` that the resuming command changed counts from here on."""
        self.parts.sampler.load_state_dict(state["sampler"])
        self.rounds = int(state["rounds"])
        self.parity = float(state["parity"])
        coefficient = self.config.algorithm.init_kl_coef
        if state["init_kl_coef"] == coefficient:
            self.maker.kl_controller.load_state_dict(state["kl_controller"])
        else:  # asked for with the command that resumes
            self.console.message(f"init_kl_coef was {state['init_kl_coef']:g}; from here on it is {coefficient:g}")
        self.maker.calculator.load_state_dict(state["calculator"])
        if self.parts.ema is not None:
            self.parts.ema.resume(state["ema"])
        if self.replay is not None and state.get("replay") is not None:
            self.replay.load_state_dict(state["replay"])
        if self.parts.following is not None and state.get("reference") is not None:
            self.parts.following.load_state_dict(state["reference"])

    def save_engines(self, folder: Path) -> None:
        """Actor and critic with their optimizers; every rank writes its part."""
        for name, engine in self._engines():
            engine.save(str(folder), name)

    def load_engines(self, folder: Path) -> None:
        """The inverse of `save_engines`."""
        for name, engine in self._engines():
            engine.load(str(folder), name)

    def _engines(self) -> list[tuple[str, TrainEngine]]:
        engines = [("actor", self.actor)]
        return engines + ([("critic", self.critic)] if self.critic is not None else [])

    def export(self, folder: Path) -> None:
        """A checkpoint folder for transformers and vLLM, LoRA merged; the adapter itself in `lora/`."""
        model = self.actor.module.model
        with self.parts.ema.swapped() if self.config.output.eval_ema else nullcontext():
            state = gathered_state_dict(self.actor, keep=collectives.is_rank_0())
        if self.config.model.lora_rank:
            self._export_adapter(model, folder)
        if collectives.is_rank_0():
            saver = self.parts.checkpoint.processor or self.parts.checkpoint.tokenizer
            export_hf(self.actor.module.transformer, saver, folder, state)

    def _export_adapter(self, model, folder: Path) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
        with self.actor.gathered(list(named.values())):
            state = {name: parameter.detach().cpu().clone() for name, parameter in named.items()}
        if collectives.is_rank_0():
            export_lora(model, folder / "lora", state)


def _selective_replay(algorithm: AlgorithmConfig, seed: int) -> SelectiveReplay | None:
    if algorithm.selective_replay == 0:
        return None
    share = max(1, algorithm.selective_replay // collectives.world_size())
    return SelectiveReplay(share, seed)


def _image_dependence(parts: VLParts) -> ImageDependence | None:
    """None for a model that reads text only, or draws."""
    every, checkpoint = parts.config.rollout.image_dependence_every, parts.checkpoint
    if checkpoint.processor is None or parts.actor.module.drawing is not None or every == 0:
        return None
    rule = parts.maker.settings.sampling.scoring
    pad, device = checkpoint.tokenizer.pad_token_id, parts.strategy.device
    score = own_scores(parts.actor, parts.strategy.sequence)
    return ImageDependence(score, rule, pad, device, every, parts.dataset.labels)


def check_budget(config: RunConfig, image_tokens: int) -> None:
    """Raise ConfigError where a micro-batch's budget of tokens does not hold a prompt with an image drawn for it."""
    budget, longest = config.train.max_tokens_per_batch, config.rollout.prompt_max_len + image_tokens
    if 0 < budget < longest:
        raise ConfigError(
            f"max_tokens_per_batch {budget} is less than a drawing may have: prompt_max_len + the {image_tokens} "
            f"tokens of an image = {longest}"
        )


def check_trainer(kind: type[VLTrainer], estimator: str) -> None:
    """Raise ConfigError for a trainer class of some estimators that does not run this one."""
    runs = {entry.name: entry.trainer_class() for entry in registry.advantage_estimators}
    wanted = runs[registry.advantage_estimators[estimator].name]
    if not issubclass(kind, wanted) and any(issubclass(kind, each) for each in runs.values()):
        own = ", ".join(name for name, trainer in runs.items() if issubclass(kind, trainer))
        raise ConfigError(
            f"advantage_estimator is {estimator!r}, which {wanted.__name__} runs; {kind.__name__} runs: {own}"
        )


class GRPOTrainer(VLTrainer):
    """GRPO (arXiv 2402.03300) and its relatives without a critic: Dr. GRPO, REINFORCE, REINFORCE++-baseline, CPGD."""


class RLOOTrainer(VLTrainer):
    """RLOO (arXiv 2402.14740): REINFORCE with a leave-one-out baseline among each prompt's samples."""


class PPOTrainer(VLTrainer):
    """PPO (arXiv 1707.06347): advantages from a critic that is trained beside the actor, values clipped."""


def build_trainer(config: RunConfig) -> VLTrainer:
    """The trainer that `advantage_estimator` asks for."""
    return config.algorithm.estimator.trainer_class().from_config(config)
