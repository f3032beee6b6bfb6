"""The loop's hooks for models that see: GRPO, RLOO, REINFORCE and, with a critic, PPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...batches.prompts import PromptBatch
from ...checkpoint.export import export_hf, export_lora
from ...config.vl import ADVANTAGE_ESTIMATORS, RunConfig, one_of
from ...data.prompts import PromptDataset, PromptSampler, render_prompt
from ...models.loading import Checkpoint
from ...models.weight_copies import WeightAverage
from ...observe.rollouts import gather_records, records_from_samples
from ...replay.buffer import NaiveReplayBuffer
from ...rollout.parity import ParityGate, log_prob_difference
from ...rollout.weight_sync import gathered_state_dict, named_weights
from ...strategy import collectives
from ...strategy.deepspeed import DeepspeedStrategy, TrainEngine
from ...strategy.seeding import derive_seed
from ..fast_exp_maker import FastExperienceMaker
from ..loop import LoopSettings, PolicyTrainer
from .evaluation import Evaluation
from .updates import PolicyUpdate, ValueUpdate, plan_batch


@dataclass
class VLParts:
    """Everything a vision-language run is made of; `build.build_vl` puts it together from a configuration."""

    config: RunConfig
    strategy: DeepspeedStrategy
    checkpoint: Checkpoint
    actor: TrainEngine
    critic: TrainEngine | None
    maker: FastExperienceMaker
    dataset: PromptDataset
    sampler: PromptSampler
    evaluation: Evaluation | None
    loop: LoopSettings
    recorder: Any
    console: Any
    timer: Any
    gate: ParityGate | None = None
    ema: WeightAverage | None = None


class VLTrainer(PolicyTrainer):
    """Trains an actor, and a critic where there is one, on rollouts of prompts with images.

    estimators: values of `advantage_estimator` that a subclass stands for; ConfigError for another one.
    """

    estimators: tuple[str, ...] = ADVANTAGE_ESTIMATORS

    def __init__(self, parts: VLParts):
        estimator = parts.config.algorithm.advantage_estimator
        one_of(f"advantage_estimator of {type(self).__name__}", estimator, self.estimators)
        super().__init__(parts.loop, parts.recorder, parts.console, parts.timer)
        self.parts, self.config = parts, parts.config
        train, algorithm = parts.config.train, parts.config.algorithm
        self.maker, self.actor, self.critic = parts.maker, parts.actor, parts.critic
        self.buffer = NaiveReplayBuffer(
            train.micro_train_batch_size, packing_samples=train.packing_samples, seed=train.seed
        )
        rule = parts.maker.settings.sampling.scoring
        self.policy_update = PolicyUpdate(parts.actor, algorithm, rule, self.metrics)
        self.value_update = ValueUpdate(parts.critic, algorithm, self.metrics) if parts.critic else None
        self.rounds = 0  # batches of prompts taken so far; numbers the prompts of the run
        self.probe: PromptBatch | None = None
        self.parity = 0.0

    @classmethod
    def from_config(cls, config: RunConfig) -> VLTrainer:
        """The trainer of a run; see `build.build_trainer`."""
        from .build import build_trainer

        return build_trainer(config, cls)

    # -- stages --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the rollout engine and the reward workers; call it after `fit`, before the process group ends."""
        self.maker.engine.close()
        self.maker.rewards.close()

    def start(self) -> None:
        self._load_engine_weights()
        self.maker.policy_version = self.step
        self.probe = self._probe_of(self._prompts(self._peek(), torch.arange(-len(self._peek()), 0)))
        reported = self.parity
        self._check_parity()
        if self.step > 0:
            self.parity = reported  # a resumed run: the next row shows the gate after the sync that it continues from

    def collect(self) -> None:
        # What was asked before (gate, evaluation) differs after a resume; a prefix found in a cache is worked out in
        # another order than a fresh one, which shows in the last bits.
        self.maker.engine.reset_caches()
        batch = self._next_prompts()
        experiences = self.maker.make_experiences(batch, more=self._next_prompts)
        with self.timer.phase("sync"):
            self.maker.engine.sleep()
        self.probe = self._probe_of(batch)
        self._check_rollouts(experiences)
        self._record_rollouts(experiences)
        for experience in experiences:
            self.buffer.append(experience)

    def learn(self) -> None:
        config = self.config
        budget = config.train.max_tokens_per_batch or None
        update_number = 0
        for epoch in range(config.train.max_epochs):
            seed = derive_seed(config.train.seed, "replay", self.step, epoch)
            steps = self.buffer.plan(seed, step_size=config.train.train_batch_size, token_budget=budget)
            for micro_batches in steps:
                batch = plan_batch(self.buffer, micro_batches, config.algorithm, config.rollout.generate_max_len)
                self._update(batch, first=update_number == 0)
                update_number += 1
        self.buffer.clear()

    def _update(self, batch, first: bool) -> None:
        if self.value_update is not None:
            self.count_step(self.value_update.step(self.buffer, batch), "critic_")
        if self.step >= self.config.train.freezing_actor_steps:
            kl_coef = self.maker.kl_controller.value
            result = self.policy_update.step(self.buffer, batch, kl_coef, first)
            self.count_step(result)
            if result.applied and self.parts.ema is not None:
                self.parts.ema.step()

    def sync(self) -> None:
        self.maker.engine.wake()
        self._load_engine_weights()
        self.maker.policy_version = self.step
        self._check_parity()

    def evaluate(self) -> dict[str, float]:
        if self.parts.evaluation is None:
            return {}
        with self._evaluated_weights():
            return self.parts.evaluation.run(self.step)

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """The engine holds the EMA weights inside when they are to be evaluated."""
        if not self.config.output.eval_ema:
            yield
            return
        shared = self.maker.engine.shares_weights
        with self.parts.ema.swapped():
            self._load_engine_weights()
            if shared:
                yield
        if not shared:
            yield  # the trainer has its own weights back: what fails in here needs no collective to restore them
        self._load_engine_weights()

    # -- prompts -------------------------------------------------------------------------------------------------

    def _next_prompts(self) -> PromptBatch:
        """This rank's prompts of the next global batch, numbered over the whole run."""
        order = self.parts.sampler.next_batch()
        numbers = torch.arange(len(order)) + self.rounds * len(order)
        self.rounds += 1
        mine = slice(collectives.rank(), None, collectives.world_size())
        return self._prompts(PromptSampler.shard(order, collectives.rank(), collectives.world_size()), numbers[mine])

    def _peek(self) -> list[int]:
        """A few data set rows for the first parity check; the sampler's order stays as it is."""
        return list(range(min(len(self.parts.dataset), max(1, self.config.rollout.parity_samples))))

    def _prompts(self, indices: list[int], ids: torch.Tensor) -> PromptBatch:
        return prompt_batch([self.parts.dataset[i] for i in indices], self.parts.checkpoint, self.config.data, ids)

    def _probe_of(self, batch: PromptBatch) -> PromptBatch | None:
        count = min(self.config.rollout.parity_samples, len(batch))
        return batch.select(list(range(count))) if count else None

    # -- engine and parity ---------------------------------------------------------------------------------------

    def _load_engine_weights(self) -> None:
        self.maker.engine.update_weights(named_weights(self.actor))

    def _check_parity(self) -> None:
        if self.parts.gate is not None and self.probe is not None:
            self.parity = self.parts.gate.check(self.probe, self.config.rollout.temperature)

    def _check_rollouts(self, experiences: list) -> None:
        """What the engine sampled against the trainer's own scores, over the whole rollout of all ranks."""
        gate = self.parts.gate
        largest = held = 0.0
        for each in experiences:
            if each.rollout_log_probs is not None:
                pair = each.action_log_probs, each.rollout_log_probs, each.action_mask
                largest = max(largest, log_prob_difference(*pair))
                held = max(held, gate.figure(*pair)) if gate is not None else 0.0
        largest, held = collectives.all_reduce_max(torch.tensor([largest, held])).tolist()
        if gate is not None:
            gate.check_rollouts(held)
        self.metrics.add_max("rollout_logp_diff_max", largest)
        self.metrics.add_max("parity", self.parity)

    # -- figures and records -------------------------------------------------------------------------------------

    def _record_rollouts(self, experiences: list) -> None:
        metrics = self.metrics
        for each in experiences:
            valid = each.valid.bool()
            metrics.add_moments("reward", each.info["reward"][valid])
            metrics.add_mean("reward_invalid_share", (~valid).float())
            metrics.add_mean("response_length", each.info["response_length"])
            metrics.add_mean("truncated_share", each.info["truncated"])
            metrics.add_total("tokens", each.info["total_length"].sum())
            metrics.add_mean("kl", each.kl, each.action_mask)
            metrics.add_mean("entropy", each.action_entropy, each.action_mask)
            metrics.add_mean("advantage_abs", each.advantages.abs(), each.action_mask)
            for name in ("comparable", "shaped_reward", "advantage_clip_frac", "overlong_penalty", "reward_clipped"):
                if name in each.info:
                    metrics.add_mean(name, each.info[name])
            for name, values in each.info["reward_metrics"].items():
                metrics.add_mean(f"reward/{name}", values, ~values.isnan())
        self._record_groups(experiences)
        for name, value in self.maker.stage_metrics.items():
            metrics.add(name, value)
        kl = torch.cat([each.info["kl"] for each in experiences])
        totals = collectives.all_reduce_sum(torch.stack([kl.sum(), torch.tensor(float(len(kl)))]))
        self.maker.kl_controller.update((totals[0] / totals[1]).item(), int(totals[1]))
        metrics.add("kl_coef", self.maker.kl_controller.value)
        metrics.add("policy_version", self.maker.policy_version)
        metrics.add("epoch", self.parts.sampler.epoch)

    def _record_groups(self, experiences: list) -> None:
        """Share of groups whose valid rewards are all equal: they teach nothing."""
        rewards = torch.cat([each.info["reward"] for each in experiences])
        groups = torch.cat([each.group_id for each in experiences])
        valid = torch.cat([each.valid.bool() for each in experiences])
        for group in groups.unique():
            own = rewards[(groups == group) & valid]
            self.metrics.add("zero_std_ratio", float(len(own) < 2 or bool(own.max() == own.min())))

    def step_records(self) -> list[dict[str, Any]]:
        records = [record for each in self.maker.last_samples for record in records_from_samples(each)]
        count = self.config.output.num_trajectories_to_save
        return gather_records(records, count, self.config.train.seed, self.step)

    def eval_records(self) -> list[dict[str, Any]]:
        return self.parts.evaluation.records if self.parts.evaluation is not None else []

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self.parts.sampler.state_dict(),
            "rounds": self.rounds,
            "parity": self.parity,
            "init_kl_coef": self.config.algorithm.init_kl_coef,
            "kl_controller": self.maker.kl_controller.state_dict(),
            "calculator": self.maker.calculator.state_dict(),
            "ema": self.parts.ema.state_dict() if self.parts.ema is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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

    def save_engines(self, folder: Path) -> None:
        for name, engine in self._engines():
            engine.save(str(folder), name)

    def load_engines(self, folder: Path) -> None:
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


def prompt_batch(rows: list, checkpoint: Checkpoint, data, ids: torch.Tensor) -> PromptBatch:
    """Rendered prompts of data rows."""
    renderer = checkpoint.processor or checkpoint.tokenizer
    return PromptBatch.of(
        [render_prompt(row, renderer, data) for row in rows],
        [row.images for row in rows],
        [row.videos for row in rows],
        [row.reference for row in rows],
        [row.label for row in rows],
        [row.metadata for row in rows],
        ids,
    )


class GRPOTrainer(VLTrainer):
    """GRPO (arXiv 2402.03300) and its relatives without a critic: Dr. GRPO, REINFORCE, REINFORCE++-baseline, CPGD."""

    estimators = ("group_norm", "grpo", "dr_grpo", "reinforce", "reinforce_baseline", "cpgd")


class RLOOTrainer(VLTrainer):
    """RLOO (arXiv 2402.14740): REINFORCE with a leave-one-out baseline among each prompt's samples."""

    estimators = ("rloo",)


class PPOTrainer(VLTrainer):
    """PPO (arXiv 1707.06347): advantages from a critic that is trained beside the actor, values clipped."""

    estimators = ("gae",)
