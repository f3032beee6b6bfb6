"""The loop's hooks for models that draw: Flow-GRPO, DanceGRPO, DiffusionNFT, DDPO, DPOK and Reward FL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...algorithms.diffusion.context import LossContext
from ...algorithms.diffusion.nft import old_policy_decay
from ...batches.experience import ExperienceDiffusion
from ...observe.metrics import MetricsAccumulator
from ...observe.rollouts import Record, gather_records, records_from_media
from ...replay.buffer import NaiveReplayBuffer
from ...strategy import collectives
from ...strategy.deepspeed import StepResult
from ...strategy.seeding import derive_seed
from ..loop import Evaluated, PolicyTrainer, StepData
from .evaluation import SHEET_IMAGES
from .maker import DrawnExperience
from .parts import DiffusionParts
from .stages import DiffusionRows, k_repeat_rows
from .updates import ReplayUpdate, RewardUpdate


class DiffusionTrainer(PolicyTrainer):
    """Trains a diffusion policy on its own pictures or videos."""

    def __init__(self, parts: DiffusionParts):
        super().__init__(parts.loop, parts.recorder, parts.console, parts.timer)
        self.parts, self.config, self.engine, self.maker = parts, parts.config, parts.engine, parts.maker
        train = parts.config.train
        self.buffer = NaiveReplayBuffer(train.micro_train_batch_size, seed=train.seed)
        fraction = parts.config.algorithm.timestep_fraction
        self.replay_update = ReplayUpdate(parts.engine, parts.algorithm, parts.loss, fraction)
        self.reward_update = None
        if parts.algorithm.trains_on == "reward":
            sampling = parts.maker.engine.sampling
            self.reward_update = RewardUpdate(parts.engine, sampling, parts.loss, parts.differentiable, train.seed)
        self.updates = 0

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

    def collect(self) -> StepData:
        """Experience of this rank's next rows; Reward FL draws while it learns, and gets the rows themselves."""
        rows = self._next_rows()
        if self.reward_update is not None:
            size = self.config.train.micro_train_batch_size
            return StepData([rows.select(slice(start, start + size)) for start in range(0, len(rows), size)])
        made = self.maker.make(rows, self.step)
        data = StepData(made.experiences, records=self._records_of(rows, made))
        for experience in made.experiences:
            self._add_rewards(data.metrics, experience)
        for name, value in made.metrics.items():
            data.metrics.add(name, value)
        return data

    def _next_rows(self) -> DiffusionRows:
        sampling = self.config.sampling
        per_rank = sampling.rollout_batch_size * sampling.n_samples_per_prompt // collectives.world_size()
        seed = derive_seed(self.config.train.seed, "k_repeat", self.step)
        return k_repeat_rows(self.parts.prompts, per_rank, sampling.n_samples_per_prompt, seed)

    def learn(self, data: StepData) -> None:
        """`max_epochs` passes over the step's samples; for Reward FL one step by the reward's gradient."""
        if self.reward_update is not None:
            self._learn_from_reward(data)
            return
        while data.batches:
            self.buffer.append(data.batches.pop(0))
        for epoch in range(self.config.train.max_epochs):
            seed = derive_seed(self.config.train.seed, "replay", self.step, epoch)
            steps = self.buffer.plan(seed, step_size=self.config.train.train_batch_size)
            for index, micro_batches in enumerate(steps):
                batches = [self.buffer.load(micro_batch) for micro_batch in micro_batches]
                first = epoch == index == 0
                result = self.replay_update.step(
                    batches, self._context(), derive_seed(seed, index), data.metrics, first
                )
                self._finish_update(result, data.metrics)
        self.buffer.clear()

    def _learn_from_reward(self, data: StepData) -> None:
        result, drawn = self.reward_update.step(data.batches, self._context(), self.step, data.metrics)
        self._finish_update(result, data.metrics)
        for rows, (media, scores, valid) in zip(data.batches, drawn, strict=True):
            data.metrics.add_moments("reward", scores[valid])
            data.metrics.add_mean("reward_invalid_share", (~valid).float())
            data.records += records_from_media(rows.prompts, list(media), scores, valid=valid, group_ids=rows.group_ids)
        for index, record in enumerate(data.records):
            record["sample_id"] = index
        data.records = self._gathered(data.records)
        data.batches.clear()

    def _context(self) -> LossContext:
        seed = derive_seed(self.config.train.seed, "loss", self.step, self.updates)
        return LossContext(self.engine, self.parts.policy, self.parts.old, seed)

    def _finish_update(self, result: StepResult, metrics: MetricsAccumulator) -> None:
        self.updates += 1
        self.count_step(result, metrics)
        if result.applied and self.parts.ema is not None:
            self.parts.ema.step()

    def evaluate(self) -> Evaluated:
        """See `DiffusionEvaluation.run`; with the EMA weights for `eval_ema`. Writes a contact sheet."""
        if self.parts.evaluation is None:
            return Evaluated({}, [])
        with self._evaluated_weights():
            metrics, records = self.parts.evaluation.run()
        self.recorder.save_contact_sheet(self.step, records[:SHEET_IMAGES])
        return Evaluated(metrics, records[: self.config.output.num_trajectories_to_save])

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        with self.parts.ema.swapped() if self.config.output.eval_ema else nullcontext():
            yield

    # -- metrics and records -------------------------------------------------------------------------------------

    def _add_rewards(self, metrics: MetricsAccumulator, experience: ExperienceDiffusion) -> None:
        valid = experience.valid.bool()
        metrics.add_moments("reward", experience.info["reward"][valid])
        metrics.add_mean("reward_invalid_share", (~valid).float())
        for name, values in experience.info["reward_metrics"].items():
            metrics.add_mean(f"reward/{name}", values, ~values.isnan())

    def _records_of(self, rows: DiffusionRows, made: DrawnExperience) -> list[Record]:
        rewards = torch.cat([each.info["reward"] for each in made.experiences])
        valid = torch.cat([each.valid for each in made.experiences])
        components = {
            name: torch.cat([each.info["reward_metrics"][name] for each in made.experiences])
            for name in made.experiences[0].info["reward_metrics"]
        }
        records = records_from_media(
            rows.prompts, list(made.media), rewards, components, valid=valid, group_ids=rows.group_ids
        )
        for record, sample_id in zip(records, rows.sample_ids.tolist()):
            record["sample_id"] = sample_id
        return self._gathered(records)

    def _gathered(self, records: list[Record]) -> list[Record]:
        """Those of all ranks that are kept and shown; none where nobody asks for them. A collective."""
        output = self.config.output
        if not output.save_trajectories:
            return []
        return gather_records(records, output.num_trajectories_to_save, self.config.train.seed, self.step)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Updates made so far, and the averaged and old weights where there are any."""
        copies = {"ema": self.parts.ema, "old": self.parts.old}
        return {"updates": self.updates} | {
            name: copy.state_dict() if copy is not None else None for name, copy in copies.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.updates = int(state["updates"])
        for name, copy in (("ema", self.parts.ema), ("old", self.parts.old)):
            if copy is not None:
                copy.resume(state[name])

    def save_engines(self, folder: Path) -> None:
        """The policy with its optimizer; every rank writes its part."""
        self.engine.save(str(folder), "policy")

    def load_engines(self, folder: Path) -> None:
        """The inverse of `save_engines`."""
        self.engine.load(str(folder), "policy")

    def export(self, folder: Path) -> None:
        """LoRA for the stock pipeline's load_lora_weights, or the whole pipeline when all weights train."""
        with self._evaluated_weights():
            if self.config.model.lora_rank:
                self.parts.policy.save_lora(folder)
            else:
                self.parts.policy.save_pretrained(folder)
