"""The loop's hooks for models that draw: Flow-GRPO, DanceGRPO, DiffusionNFT, DDPO, DPOK and Reward FL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...algorithms.diffusion import DiffusionAlgorithm, Loss
from ...algorithms.diffusion.context import LossContext, LossOutcome
from ...algorithms.diffusion.nft import old_policy_decay
from ...algorithms.diffusion.reward_fl import DifferentiableScore
from ...algorithms.diffusion.rows import grouped_steps, noisy_steps, rows_at, shuffled_steps, trainable_steps
from ...config.diffusion import DiffusionRunConfig
from ...data.validation import validation_shard_indices
from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightAverage, WeightCopy
from ...observe.rollouts import gather_records, records_from_media
from ...replay.buffer import NaiveReplayBuffer
from ...rewards.engine import RewardComputationEngine
from ...rollout.diffusion_sampler import sample_generators
from ...strategy import collectives
from ...strategy.deepspeed import TrainEngine
from ...strategy.seeding import derive_seed
from ..fast_exp_maker import FastExperienceMaker
from ..loop import LoopSettings, PolicyTrainer
from .stages import DiffusionRows, DiffusionSampling, k_repeat_rows, rows_of, score_rows

T = torch.Tensor


@dataclass
class DiffusionParts:
    """Everything a diffusion run is made of; `build.build_diffusion` puts it together from a configuration."""

    config: DiffusionRunConfig
    policy: DiffusionPolicy
    engine: TrainEngine
    algorithm: DiffusionAlgorithm
    loss: Loss
    maker: FastExperienceMaker
    evaluation: DiffusionSampling
    held_out: RewardComputationEngine | None
    prompts: Any
    eval_prompts: Any
    loop: LoopSettings
    recorder: Any
    console: Any
    timer: Any
    old: WeightCopy | None = None
    ema: WeightAverage | None = None
    differentiable: Any = None


class DiffusionTrainer(PolicyTrainer):
    """Trains a diffusion policy on its own pictures or videos."""

    def __init__(self, parts: DiffusionParts):
        super().__init__(parts.loop, parts.recorder, parts.console, parts.timer)
        self.parts, self.config, self.engine, self.maker = parts, parts.config, parts.engine, parts.maker
        self.buffer = NaiveReplayBuffer(parts.config.train.micro_train_batch_size, seed=parts.config.train.seed)
        self.updates = 0
        self._step_records: list[dict[str, Any]] = []
        self._eval_records: list[dict[str, Any]] = []
        self._rows: DiffusionRows | None = None

    # -- stages --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sampling uses the trained weights themselves: there is nothing to bring over."""

    def sync(self) -> None:
        """See `start`; the old policy of DiffusionNFT follows the weights here, after the updates of the step."""
        if self.parts.old is not None:
            self.parts.old.update(old_policy_decay(self.step, self.config.algorithm.decay_type))

    def close(self) -> None:
        """Release the reward workers."""
        self.maker.rewards.close()

    def collect(self) -> None:
        sampling = self.config.sampling
        per_rank = sampling.rollout_batch_size * sampling.n_samples_per_prompt // collectives.world_size()
        seed = derive_seed(self.config.train.seed, "k_repeat", self.step)
        self._rows = k_repeat_rows(self.parts.prompts, per_rank, sampling.n_samples_per_prompt, seed)
        if self.parts.algorithm.trains_on == "reward":
            return
        self.maker.policy_version = self.step
        experiences = self.maker.make_experiences(self._rows)
        for experience in experiences:
            self._record_rewards(experience)
            self.buffer.append(experience)
        for name, value in self.maker.stage_metrics.items():
            self.metrics.add(name, value)
        self._keep_records(self._rows, self.maker.last_media, experiences)

    def learn(self) -> None:
        if self.parts.algorithm.trains_on == "reward":
            self._learn_from_reward()
            return
        for epoch in range(self.config.train.max_epochs):
            seed = derive_seed(self.config.train.seed, "replay", self.step, epoch)
            for place, batches in enumerate(self.buffer.plan(seed, step_size=self.config.train.train_batch_size)):
                self._update(batches, derive_seed(seed, place), first=epoch == place == 0)
        self.buffer.clear()

    def _update(self, micro_batches: list, seed: int, first: bool) -> None:
        """One optimizer step over (sample, denoising step) rows, each sample in an order of steps of its own."""
        context = self._context()
        loaded = [self.buffer.load(micro_batch) for micro_batch in micro_batches]
        plans = []
        for place, experience in enumerate(loaded):
            generator = torch.Generator().manual_seed(derive_seed(seed, collectives.rank(), place))
            steps = shuffled_steps(self._trained_steps(experience), generator)
            timesteps = experience.timesteps.gather(1, steps.to(experience.timesteps.device))
            plans.append(grouped_steps(steps, self.parts.policy.family.expert_index(timesteps)))
        rows = sum(int(each.valid.sum()) * plan.shape[1] for each, plan in zip(loaded, plans))
        total = collectives.all_reduce_sum(torch.tensor(float(rows))).item()
        for place, (experience, plan) in enumerate(zip(loaded, plans)):
            for column in range(plan.shape[1]):
                part = rows_at(experience, plan[:, column])
                last = place == len(loaded) - 1 and column == plan.shape[1] - 1
                whole = last or place == column == 0
                with self.parts.policy.all_experts() if whole else nullcontext():
                    outcome = self.parts.loss.loss(context, part, max(total, 1.0))
                self.engine.accumulate(outcome.loss, last)
                self._record_loss(outcome, int(part.valid.sum()), last, first)
        self._finish_update()

    def _trained_steps(self, experience) -> T:
        """(B, n): stochastic steps for losses on SDE steps, any step of the schedule for losses on data."""
        steps = trainable_steps if self.parts.algorithm.trains_on == "steps" else noisy_steps
        return steps(experience, self.config.algorithm.timestep_fraction)

    def _learn_from_reward(self) -> None:
        """Reward FL: no replay; the gradient goes through the decoded pictures of this very forward."""
        sampling, rows = self.maker.engine.sampling, self._rows
        size = self.config.train.micro_train_batch_size
        starts = range(0, len(rows), size)
        context, drawn = self._context(), []
        for start in starts:
            part = rows.select(slice(start, start + size))
            conditions = sampling.conditions(part)
            noise = self._starting_noise(part, conditions)
            shape = sampling.model.policy.latent_shape(
                sampling.settings.height, sampling.settings.width, sampling.settings.frames
            )
            schedule = sampling.sampler.schedule(sampling.model, shape)
            reward = partial(self._differentiable, part, drawn)
            total = float(len(rows) * collectives.world_size())
            outcome = self.parts.loss.loss(context, noise, conditions, schedule, reward, total)
            last = start + size >= len(rows)
            self.engine.accumulate(outcome.loss, last)
            self._record_loss(outcome, len(part), last, first=True)
        self._finish_update()
        self._record_drawn(rows, drawn)

    def _starting_noise(self, rows: DiffusionRows, conditions: dict[str, T]) -> T:
        sampling = self.maker.engine.sampling
        batch = sampling.batch(rows, conditions, self.step, "noise")
        if batch.latents is not None:
            return batch.latents
        generators = sample_generators(self.config.train.seed, self.step, rows.sample_ids.tolist())
        noise = torch.stack([torch.randn(batch.latent_shape, generator=each) for each in generators])
        return noise.to(self.parts.policy.device)

    def _differentiable(self, rows: DiffusionRows, drawn: list, media: T) -> DifferentiableScore:
        scored = self.parts.differentiable(media, rows)
        drawn.append((media.detach().clamp(0, 1).cpu(), scored.scores.detach().cpu(), scored.valid.cpu()))
        return scored

    def _context(self) -> LossContext:
        seed = derive_seed(self.config.train.seed, "loss", self.step, self.updates)
        return LossContext(self.engine, self.parts.policy, self.parts.old, seed)

    def _finish_update(self) -> None:
        result = self.engine.step()
        self.updates += 1
        self.count_step(result)
        if result.applied and self.parts.ema is not None:
            self.parts.ema.step()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Fixed prompts and noise, an ODE, the EMA weights where there are any; the same on any rank count."""
        if self.parts.eval_prompts is None:
            return {}
        prompts = self.parts.eval_prompts
        shard = validation_shard_indices(len(prompts), rank=collectives.rank(), world_size=collectives.world_size())
        indices = [index for index, _ in shard]
        rows = rows_of([prompts[i] for i in indices], indices, first=0)
        rows.sample_ids = torch.tensor(indices)
        with self._evaluated_weights():
            media = torch.cat([each.media for each in self.parts.evaluation.draw(rows, 0, purpose="eval")]).cpu()
        scored = score_rows(self.maker.rewards, rows, media)
        figures = {"eval_reward": scored.score, **{f"validation/reward/{k}": v for k, v in scored.components.items()}}
        if self.parts.held_out is not None:
            figures["eval_quality"] = score_rows(self.parts.held_out, rows, media).score
        real = torch.tensor([is_real for _, is_real in shard])
        records = records_from_media(
            rows.prompts, list(media), scored.score, scored.components, valid=scored.valid, group_ids=rows.group_ids
        )
        for record, index in zip(records, indices):
            record["sample_id"] = index
        self._gather_eval_records([record for record, is_real in zip(records, real.tolist()) if is_real])
        return {name: _mean_over_ranks(values, rows.sample_ids, real) for name, values in figures.items()}

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        with self.parts.ema.swapped() if self.config.output.eval_ema else nullcontext():
            yield

    def _gather_eval_records(self, records: list[dict[str, Any]]) -> None:
        everyone = [record for part in collectives.all_gather_object(records) for record in part]
        everyone.sort(key=lambda record: record["sample_id"])
        self._eval_records = everyone
        self.recorder.save_contact_sheet(self.step, everyone[: self.SHEET_PICTURES])

    SHEET_PICTURES = 48

    # -- figures and records -------------------------------------------------------------------------------------

    def _record_rewards(self, experience) -> None:
        valid = experience.valid.bool()
        self.metrics.add_moments("reward", experience.info["reward"][valid])
        self.metrics.add_mean("reward_invalid_share", (~valid).float())
        for name, values in experience.info["reward_metrics"].items():
            self.metrics.add_mean(f"reward/{name}", values, ~values.isnan())

    def _record_loss(self, outcome: LossOutcome, rows: int, last: bool, first: bool) -> None:
        updates = 1.0 if last and collectives.is_rank_0() else 0.0
        self.metrics.add("loss", outcome.loss.detach(), updates)
        for name, value in outcome.metrics.items():
            if name == "logp_diff_max":
                self.metrics.add_max(name, value)
                if first:
                    self.metrics.add_max("ratio_max_dev_first", torch.expm1(torch.tensor(value)))
            else:
                self.metrics.add({"clip_fraction": "clip_frac"}.get(name, name), value * rows, rows)

    def _keep_records(self, rows: DiffusionRows, media: T, experiences: list) -> None:
        rewards = torch.cat([each.info["reward"] for each in experiences])
        valid = torch.cat([each.valid for each in experiences])
        components = {
            name: torch.cat([each.info["reward_metrics"][name] for each in experiences])
            for name in experiences[0].info["reward_metrics"]
        }
        records = records_from_media(
            rows.prompts, list(media), rewards, components, valid=valid, group_ids=rows.group_ids
        )
        for record, sample_id in zip(records, rows.sample_ids.tolist()):
            record["sample_id"] = sample_id
        count = self.config.output.num_trajectories_to_save
        self._step_records = gather_records(records, count, self.config.train.seed, self.step)

    def _record_drawn(self, rows: DiffusionRows, drawn: list) -> None:
        media, scores, valid = (torch.cat(parts) for parts in zip(*drawn))
        self.metrics.add_moments("reward", scores[valid])
        self.metrics.add_mean("reward_invalid_share", (~valid).float())
        records = records_from_media(rows.prompts, list(media), scores, valid=valid, group_ids=rows.group_ids)
        count = self.config.output.num_trajectories_to_save
        self._step_records = gather_records(records, count, self.config.train.seed, self.step)

    def step_records(self) -> list[dict[str, Any]]:
        return self._step_records

    def eval_records(self) -> list[dict[str, Any]]:
        return self._eval_records[: self.config.output.num_trajectories_to_save]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        copies = {"ema": self.parts.ema, "old": self.parts.old}
        return {"updates": self.updates} | {
            name: copy.state_dict() if copy is not None else None for name, copy in copies.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        for name, copy in (("ema", self.parts.ema), ("old", self.parts.old)):
            if copy is not None:
                copy.resume(state[name])

    def save_engines(self, folder: Path) -> None:
        self.engine.save(str(folder), "policy")

    def load_engines(self, folder: Path) -> None:
        self.engine.load(str(folder), "policy")

    def export(self, folder: Path) -> None:
        """LoRA for the stock pipeline's load_lora_weights, or the whole pipeline when all weights train."""
        with self._evaluated_weights():
            if self.config.model.lora_rank:
                self.parts.policy.save_lora(folder)
            else:
                self.parts.policy.save_pretrained(folder)


def _mean_over_ranks(values: T, ids: T, real: T) -> float:
    """Mean of this and all ranks' real, finite values, summed in the order of the prompts."""
    mine = [(int(i), float(v)) for i, v, r in zip(ids, values, real) if bool(r) and bool(torch.isfinite(v))]
    rows = sorted(row for part in collectives.all_gather_object(mine) for row in part)
    return sum(value for _, value in rows) / len(rows) if rows else float("nan")
