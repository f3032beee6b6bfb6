"""The loop's hooks for models that draw: Flow-GRPO, its relatives, DiffusionNFT, AWM, preferences and Reward FL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...algorithms.diffusion.context import LossContext
from ...algorithms.diffusion.nft import old_policy_decay
from ...batches.experience import ExperienceDiffusion
from ...guard.gains import Look, joined
from ...observe.contact_sheet import SHEET_IMAGES
from ...observe.metrics import MetricsAccumulator
from ...observe.rollouts import Record, gather_records, records_from_media
from ...replay.buffer import NaiveReplayBuffer
from ...strategy import collectives
from ...strategy.deepspeed import StepResult
from ...strategy.seeding import derive_seed
from ...strategy.start_up import say
from ..loop import Evaluated, PolicyTrainer, StepData
from ..stage_metrics import add_stage_metrics
from ..staleness import add_ages
from .graphs import Graphed, worth_using
from .maker import DrawnExperience
from .parts import DiffusionParts
from .remote import RemoteDrawing
from .stages import DrawingBatch, k_repeat_prompts, update_rows
from .updates import ReplayUpdate, RewardUpdate, Scored, without_zero_advantages
from .watching import add_gold, add_image_metrics, look_at


class DiffusionTrainer(PolicyTrainer):
    """Trains a diffusion policy on its own images or videos."""

    def __init__(self, parts: DiffusionParts):
        super().__init__(parts.loop, parts.recorder, parts.console, parts.timer)
        self.parts, self.config, self.engine, self.maker = parts, parts.config, parts.engine, parts.maker
        self.guard.penalties = self.maker.rewards.penalties
        train = parts.config.train
        coupled = bool(parts.algorithm.coupled)
        self.buffer = NaiveReplayBuffer(train.micro_train_batch_size, seed=train.seed, keep_groups=coupled)
        algorithm = parts.config.algorithm
        choice = algorithm.timestep_fraction, algorithm.timestep_choice, train.steps_per_forward, algorithm.min_sigma
        self.replay_update = ReplayUpdate(parts.engine, parts.algorithm, parts.loss, *choice)
        self.reward_update = None
        if parts.algorithm.trains_on == "reward":
            sampling = parts.maker.engine.sampling
            self.reward_update = RewardUpdate(
                parts.engine, sampling, parts.loss, parts.trained_on, train.seed, train.micro_train_batch_size
            )
            self.most_invalid = parts.config.reward.reward_max_invalid  # elsewhere the reward engine holds it
        self.updates = 0
        self.ahead = parts.config.asynchronous.ahead

    # -- stages --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sampling uses the trained weights themselves, or those that workers are given."""
        self._hand_over()

    def sync(self) -> None:
        """See `start`; the old policy of DiffusionNFT follows the weights here, after the updates of the step."""
        if self.parts.old is not None:
            algorithm = self.config.algorithm
            count = self.updates if algorithm.decay_counts == "updates" else self.step
            self.parts.old.update(old_policy_decay(count, algorithm.decay_type))
        self._hand_over()

    def _hand_over(self) -> None:
        if isinstance(self.maker.engine, RemoteDrawing):
            self.maker.engine.hand_over(self.step)

    def close(self) -> None:
        """Release the rollout and reward workers."""
        if isinstance(self.maker.engine, RemoteDrawing):
            self.maker.engine.workers.close()
        self.maker.rewards.close()
        if self.parts.evaluation is not None and self.parts.evaluation.gold is not None:
            self.parts.evaluation.gold.rewards.close()

    def collect(self) -> StepData:
        """Experience of this rank's next rows; Reward FL draws while it learns, and gets the rows of its updates; pairs
        of a file take the place of rollouts."""
        sampling, total = self.config.sampling, self._samples_a_step()
        seed = derive_seed(self.config.train.seed, "k_repeat", self.step)
        if self.reward_update is not None:
            size = self.config.train.train_batch_size
            return StepData(update_rows(self.parts.prompts, total, sampling.n_samples_per_prompt, size, seed))
        if self.parts.pairs is not None:
            with self.timer.phase("encode"):
                return StepData(self.parts.pairs.make(self.step, seed))
        rows = self._rows(self.step)
        for later in range(self.step, min(self.step + self.ahead + 1, self.settings.total_steps)) if self.ahead else ():
            self.maker.engine.announce(later, partial(self._rows, later))
        weights = self.maker.rewards.refresh_weights()
        made = self.maker.make(rows, self.step, self.parts.graphs)
        data = StepData(made.batches, records=self._records_of(rows, made))
        for experience in made.experiences:
            self._add_rewards(data.metrics, experience)
        for name, weight in weights.items():
            data.metrics.add(f"reward_weight/{name}", weight)
        add_stage_metrics(data.metrics, made.metrics)
        if self.ahead:
            self._add_staleness(data)
        rewards = torch.cat([each.info["reward"] for each in made.experiences])
        valid = torch.cat([each.valid for each in made.experiences])
        data.look = self._watch(data.metrics, rows, made.media, (rewards, valid))
        return data

    def _rows(self, step: int) -> DrawingBatch:
        """This rank's rows of a step."""
        seed = derive_seed(self.config.train.seed, "k_repeat", step)
        per_rank = self._samples_a_step() // collectives.world_size()
        return k_repeat_prompts(self.parts.prompts, per_rank, self.config.sampling.n_samples_per_prompt, seed)

    def _add_staleness(self, data: StepData) -> None:
        ages = self.step - torch.cat([each.policy_version for each in data.batches])
        add_ages(data.metrics, ages, torch.ones_like(ages, dtype=torch.bool), self.config.asynchronous.max_staleness)
        for name, value in self.maker.engine.measured().items():
            data.metrics.add(name, value)

    def _watch(
        self, metrics: MetricsAccumulator, rows: DrawingBatch, media: torch.Tensor,
        reward: tuple[torch.Tensor, torch.Tensor],
    ) -> Look | None:  # fmt: skip
        """What the guard reads of the images of a step and of their rewards, see `look_at`; None where no gold does."""
        evaluation = self.parts.evaluation
        if not self.config.guard.watch:
            return None
        add_image_metrics(metrics, rows, media)
        if evaluation is None or evaluation.gold is None or not self._gold_due():
            return None
        golden = add_gold(metrics, evaluation.gold, rows, media)
        return look_at(self.step + 1, rows.group_ids, reward, golden)

    def _samples_a_step(self) -> int:
        return self.config.sampling.rollout_batch_size * self.config.sampling.n_samples_per_prompt

    def learn(self, data: StepData) -> None:
        """`max_epochs` passes over the step's samples, an optimizer step for each train batch."""
        if self.reward_update is not None:
            self._learn_from_reward(data)
            return
        if isinstance(data.batches[0], Graphed):
            if worth_using(data.batches, self.config.only_advantages_count):
                result = self.replay_update.step_on_graphs(data.batches, self._context(True), data.metrics)
                self._finish_update(result, data.metrics)
                return
            data.batches = [each.experience for each in data.batches]
        while data.batches:
            self.buffer.append(data.batches.pop(0))
        for epoch in range(self.config.train.max_epochs):
            seed = derive_seed(self.config.train.seed, "replay", self.step, epoch)
            steps = self.buffer.plan(seed, step_size=self.config.train.train_batch_size)
            for index, micro_batches in enumerate(steps):
                left_out = 0
                if self.config.only_advantages_count:
                    micro_batches, left_out = without_zero_advantages(self.buffer, micro_batches)
                batches = [self.buffer.load(micro_batch) for micro_batch in micro_batches]
                first = epoch == index == 0
                result = self.replay_update.step(batches, self._context(first), seed, data.metrics, first, left_out)
                self._finish_update(result, data.metrics)
        self.buffer.clear()

    def _learn_from_reward(self, data: StepData) -> None:
        looks: list[Look | None] = []
        for epoch in range(self.config.train.max_epochs):
            for rows in data.batches:
                result, drawn = self.reward_update.step(rows, self._context(), self.step, epoch, data.metrics)
                self._finish_update(result, data.metrics)
                data.metrics.add_moments("reward", drawn.scores[drawn.valid])
                data.metrics.add_mean("reward_invalid_share", (~drawn.valid).float())
                if epoch == 0:
                    data.records += _records_of_drawn(rows, drawn)
                    looks.append(self._watch(data.metrics, rows, drawn.media, (drawn.scores, drawn.valid)))
        data.look = joined([each for each in looks if each is not None])
        data.records = self._gathered(data.records)
        data.batches.clear()

    def _context(self, on_policy: bool = False) -> LossContext:
        seed = derive_seed(self.config.train.seed, "loss", self.step, self.updates)
        return LossContext(self.engine, self.parts.policy, self.parts.old, seed, on_policy and not self.ahead)

    def _finish_update(self, result: StepResult, metrics: MetricsAccumulator) -> None:
        self.updates += 1
        self.count_step(result, metrics)
        if result.applied and self.parts.ema is not None:
            self.parts.ema.step()

    def evaluate(self) -> Evaluated:
        """See `DiffusionEvaluation.run`; with the EMA weights for `eval_ema`. Writes a contact sheet."""
        if self.parts.evaluation is None:
            return Evaluated({}, [])
        if self.step == 0:
            say("evaluating the model as it is")
        with self._evaluated_weights():
            metrics, records, look, _ = self.parts.evaluation.run(self.step, as_base=self.step == 0)
        self.recorder.save_contact_sheet(self.step, records[:SHEET_IMAGES])
        return Evaluated(metrics, records[: self.config.output.num_trajectories_to_save], look)

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

    def _records_of(self, rows: DrawingBatch, made: DrawnExperience) -> list[Record]:
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
        return (
            {"updates": self.updates}
            | {name: copy.state_dict() if copy is not None else None for name, copy in copies.items()}
            | {"base_images": self.parts.evaluation.base if self.parts.evaluation is not None else None}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.updates = int(state["updates"])
        for name, copy in (("ema", self.parts.ema), ("old", self.parts.old)):
            if copy is not None:
                copy.resume(state[name])
        if self.parts.evaluation is not None:
            self.parts.evaluation.base = state.get("base_images")  # earlier versions kept none

    def save_engines(self, folder: Path) -> None:
        """What trains, with its optimizer; every rank writes its part."""
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


def _records_of_drawn(rows: DrawingBatch, drawn: Scored) -> list[Record]:
    records = records_from_media(
        rows.prompts, list(drawn.media), drawn.scores, valid=drawn.valid, group_ids=rows.group_ids
    )
    for record, sample_id in zip(records, rows.sample_ids.tolist()):
        record["sample_id"] = sample_id
    return records
