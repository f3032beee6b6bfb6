"""Models that draw: Flow-GRPO, its relatives, DiffusionNFT, AWM, preferences, Reward FL.

`DiffusionTrainer.train_step` is one step, top to bottom; Reward FL has a step of its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...algorithms.diffusion.context import LossContext
from ...algorithms.diffusion.nft import old_policy_decay
from ...errors import DataError, RewardError, StoppedBySignal, TooManyInvalid
from ...experience.buffer import NaiveReplayBuffer
from ...experience.types import ExperienceDiffusion
from ...observe.metrics import MetricsAccumulator
from ...runtime.seeding import derive_seed
from ...runtime.train_engine import StepResult, TrainEngine
from ..hooks import StepData
from ..loop import PolicyTrainer
from .maker import Drawn, joined
from .parts import DiffusionParts
from .stages import Graphed, own_share, worth_using
from .updates import ReplayUpdate, RewardUpdate, plan_updates


class DiffusionTrainer(PolicyTrainer):
    """Trains a diffusion policy on its own images or videos."""

    def __init__(self, parts: DiffusionParts, callbacks: Sequence[Any] = ()):
        super().__init__(parts, callbacks)
        self.engine, self.maker, self.prompts = parts.engine, parts.maker, parts.prompts
        train, algorithm = parts.config.train, parts.config.algorithm
        self.buffer = NaiveReplayBuffer(
            train.micro_train_batch_size,
            seed=train.seed,
            keep_groups=bool(parts.algorithm.coupled),
            sequence=parts.sequence,
        )
        choice = algorithm.timestep_fraction, algorithm.timestep_choice, train.steps_per_forward, algorithm.min_sigma
        self.replay_update = ReplayUpdate(parts.engine, parts.algorithm, parts.loss, *choice, counts=self.buffer.counts)
        self.updates = 0

    # -- a step --------------------------------------------------------------------------------------------------

    def train_step(self) -> StepData:
        """Prompts, rollouts, rewards, experience, updates. A collective."""
        requests = self.prompts.next(self.step, self.settings.total_steps)
        drawn = self.maker.generate(requests, self.step)
        drawn = self.maker.score(drawn)
        data = self.maker.make_experience(drawn)
        self._measure(data)
        data = self.hooks.on_experience(data)
        with self.timer.phase("train"):
            self._learn(data)
        return data

    def _learn(self, data: StepData) -> None:
        """`max_epochs` passes over the step's samples, an optimizer step for each train batch."""
        if isinstance(data.batches[0], Graphed):
            total = worth_using(data.batches, self.config.only_advantages_count)
            if total is not None:
                result = self.replay_update.step_on_graphs(data.batches, self._context(True), data.metrics, total)
                self._finish_update(result, data.metrics)
                return
            data.batches = experiences_of(data)
        while data.batches:
            self.buffer.append(data.batches.pop(0))
        self.buffer = self.hooks.on_buffer(self.buffer)
        for epoch in range(self.config.train.max_epochs):
            seed = derive_seed(self.config.train.seed, "replay", self.step, epoch)
            steps = self.buffer.plan(seed, step_size=self.config.train.train_batch_size)
            planned = plan_updates(self.buffer, steps, self.config.only_advantages_count)
            for index, (micro_batches, samples) in enumerate(planned):
                batches = self.hooks.on_train_batch([self.buffer.gather(each) for each in micro_batches])
                first = epoch == index == 0
                result = self.replay_update.step(batches, self._context(first), seed, data.metrics, first, samples)
                self._finish_update(result, data.metrics)
        self.buffer.clear()

    def _measure(self, data: StepData) -> None:
        """Rewards of the step, and numbers of its stages; pairs of a file have none."""
        if not isinstance(data.rollouts, Drawn):
            return
        for experience in experiences_of(data):
            valid = experience.valid.bool()
            data.metrics.add_moments("reward", experience.info["reward"][valid])
            data.metrics.add_mean("reward_invalid_share", (~valid).float())
            for name, values in experience.info["reward_metrics"].items():
                data.metrics.add_mean(f"reward/{name}", values, ~values.isnan())
        data.metrics.add_numbers(data.rollouts.counts)

    def _context(self, on_policy: bool = False) -> LossContext:
        seed = derive_seed(self.config.train.seed, "loss", self.step, self.updates)
        on_policy = on_policy and not self.prompts.runs_ahead
        return LossContext(self.engine, self.parts.policy, self.parts.old, seed, on_policy, self.parts.teacher)

    def _finish_update(self, result: StepResult, metrics: MetricsAccumulator) -> None:
        self.updates += 1
        self.count_step(result, metrics)
        self.hooks.on_update(result)

    # -- engine and evaluation -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Sampling uses the trained weights themselves, or those that workers are given."""
        self.maker.engine.hand_over(self.step)

    def sync(self) -> None:
        """See `start`; the old policy of DiffusionNFT follows the weights here, after the updates of the step."""
        if self.parts.old is not None:
            algorithm = self.config.algorithm
            count = self.updates if algorithm.decay_counts == "updates" else self.step
            self.parts.old.update(old_policy_decay(count, algorithm.decay_type))
        self.maker.engine.hand_over(self.step)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Updates made so far, the old weights where there are any, and what the base drew in the first evaluation."""
        old, evaluation = self.parts.old, self.parts.evaluation
        return {
            "updates": self.updates,
            "seed": self.config.train.seed,
            "data": self.prompts.dataset.fingerprint,
            "pairs": self.prompts.pairs_before(self.step),
            "old": old.state_dict() if old is not None else None,
            "base_images": evaluation.base if evaluation is not None else None,
            "base_identity": evaluation.base_identity if evaluation is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts.dataset.check_resumed(state["data"])
        was, seed = state["seed"], self.config.train.seed
        if was != seed:
            told = "a new run takes the exported one: --pretrain"
            raise DataError(f"cannot resume the prompt order: seed was {was}, now it is {seed}; {told}")
        self.prompts.go_on(self.step, state["pairs"])
        self.updates = int(state["updates"])
        if self.parts.old is not None:
            self.parts.old.resume(state["old"])
        if self.parts.evaluation is not None:
            evaluation = self.parts.evaluation
            evaluation.base, evaluation.base_identity = state["base_images"], state["base_identity"]
            if evaluation.base is not None and evaluation.base_identity != evaluation.identity:
                told = "other prompts, images, noise or sizes, or an earlier version saved the checkpoint"
                self.console.message(f"eval_drift is left out: evaluations draw {told}")

    def state_of_ranks(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        old = [state["old"] for state in states]
        joined = self.parts.old.state_of_ranks(old) if self.parts.old is not None and old[0] is not None else old[0]
        return {**states[0], "old": joined}

    def engines(self) -> dict[str, TrainEngine]:
        return {"policy": self.engine}

    def export(self, folder: Path) -> None:
        """LoRA for the stock pipeline's load_lora_weights, or the whole pipeline when all weights train."""
        policy = self.parts.policy
        with self.hooks.weights_for("export") or nullcontext():
            if self.config.model.lora_rank:
                return policy.save_lora(folder)
            weights = policy.weights_on_host()
        policy.save_pretrained(folder, self.config.sampling, weights)  # lending ends without a wait for the disk


class RewardFLTrainer(DiffusionTrainer):
    """Reward FL: no replay; images are drawn while it learns, and carry the gradient of their reward."""

    def __init__(self, parts: DiffusionParts, callbacks: Sequence[Any] = ()):
        super().__init__(parts, callbacks)
        self.most_invalid = parts.config.reward.reward_max_invalid  # elsewhere the reward engine holds it
        train, sampling = parts.config.train, parts.maker.engine.sampling
        self.reward_update = RewardUpdate(
            parts.engine, sampling, parts.loss, parts.trained_on, train.micro_train_batch_size, parts.trained_on.name
        )

    def train_step(self) -> StepData:
        """An optimizer step for each train batch of rows, `max_epochs` times; then hooks see what the first drew."""
        config, data = self.config, StepData([])
        size, indices = config.train.train_batch_size, self.prompts.indices(self.step)
        starts = range(0, len(indices), size)
        shares = [own_share(self.prompts.dataset, indices[at : at + size], at) for at in starts]
        batches = [self.hooks.on_prompts(requests) for requests in shares]
        shown: list[Drawn] = []
        with self.timer.phase("train"):
            for epoch in range(config.train.max_epochs):
                for requests in batches:
                    result, drawn = self.reward_update.step(requests, self._context(), self.step, epoch, data.metrics)
                    self._finish_update(result, data.metrics)
                    data.metrics.add_moments("reward", drawn.scored.score[drawn.valid])
                    data.metrics.add_mean("reward_invalid_share", (~drawn.valid).float())
                    if epoch == 0:
                        shown.append(drawn)
        try:
            data.rollouts = self.hooks.on_scores(joined(shown), waits=True)
            return self.hooks.on_experience(data, waits=True)
        except StoppedBySignal as error:  # which ends the run once this step, that has trained, is finished
            self.console.message(str(error))
            return data
        except TooManyInvalid as error:  # gold's: the step has trained, and is not finished
            raise RewardError(str(error)) from error


def experiences_of(data: StepData) -> list[ExperienceDiffusion]:
    """The micro-batches of a step, without the graphs of their rollouts."""
    return [each.experience if isinstance(each, Graphed) else each for each in data.batches]
