"""Models that see: GRPO, RLOO, REINFORCE and, with a critic, PPO. `VLTrainer.train_step` is one step, top to bottom."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from ...algorithms.advantages import get_advantage_calculator
from ...config.kinds import check_hooks
from ...config.vl import RunConfig
from ...experience.buffer import NaiveReplayBuffer
from ...rollout.parity import RolloutCheck
from ...rollout.weight_sync import EngineWeights
from ...runtime.seeding import derive_seed
from ...runtime.start_up import log_stage
from ...runtime.train_engine import TrainEngine
from ..hooks import StepData, check_state, copied, go_on
from ..loop import PolicyTrainer
from .build import build_parts
from .maker import PROBE_PROMPTS, Agreement
from .parts import VLParts, export_actor
from .updates import PolicyUpdate, TrainBatch, ValueUpdate, add_rollout_metrics, kl_per_token, plan_batches


class VLTrainer(PolicyTrainer):
    """Trains an actor, and a critic where there is one, on rollouts of prompts with images."""

    def __init__(self, parts: VLParts, callbacks: Sequence[Any] = ()):
        super().__init__(parts, callbacks)
        train, algorithm = parts.config.train, parts.config.algorithm
        self.maker, self.prompts, self.actor, self.critic = parts.maker, parts.prompts, parts.actor, parts.critic
        self.agreement = Agreement(parts.gate, parts.config.rollout, parts.prompts.runs_ahead)
        self.reads_log_probs = algorithm.reads_log_probs
        self.buffer = NaiveReplayBuffer(
            train.micro_train_batch_size,
            packing_samples=train.packing_samples,
            seed=train.seed,
            share_prefix=bool(train.share_prefix),
            sequence=parts.strategy.sequence,
        )
        rule = parts.maker.settings.sampling.scoring
        self.policy_update = PolicyUpdate.from_config(parts.config, parts.actor, rule)
        self.value_update = ValueUpdate(parts.critic, algorithm) if parts.critic else None

    @classmethod
    def from_config(cls, config: RunConfig, callbacks: Sequence[Any] = ()) -> Self:
        """The trainer of a run. Raises as `build.build_parts`."""
        get_advantage_calculator(config.algorithm.advantage_estimator, config.algorithm)  # what it raises, early
        check_hooks(callbacks)
        parts = build_parts(config)
        with ExitStack() as unused:  # an engine and folders, which no trainer holds where it cannot be made
            for part in (parts.recorder, parts.maker.engine):
                unused.callback(part.close)
            trainer = cls(parts, callbacks)
            unused.pop_all()
        return trainer

    # -- a step --------------------------------------------------------------------------------------------------

    def train_step(self) -> StepData:
        """Prompts, rollouts, rewards, experience, and `max_epochs` passes of updates. A collective."""
        # What was asked before (gate, evaluation) differs after a resume; a prefix found in a cache is worked out in
        # another order than a fresh one, which shows in the last bits.
        self.maker.engine.reset_caches()
        prompts = self.prompts.next(self.step, self.settings.total_steps - self.step)
        self.agreement.follow(prompts)
        rollouts = self.maker.generate(prompts)
        rollouts = self.maker.score(rollouts)
        data = self.maker.make_experience(rollouts)
        if self.step + 1 < self.settings.total_steps:
            self.prompts.prepare_next()  # while this step is trained on
        self._measure(data)
        data = self.hooks.on_experience(data)
        algorithm, metrics, frozen = self.config.algorithm, data.metrics, self.config.train.freezing_actor_steps
        with self.timer.phase("train"):
            weight = self.maker.kl_controller.value  # of the KL in the rewards
            if algorithm.kl_target is not None and self.step >= frozen:  # before, the KL is 0 whatever its weight
                self.maker.kl_controller.update(*kl_per_token(data.batches))
            metrics.add("kl_coef", self.maker.kl_controller.value if algorithm.use_kl_loss else weight)
            while data.batches:
                self.buffer.append(data.batches.pop(0))
            self.buffer = self.hooks.on_buffer(self.buffer)
            if self.buffer.sequence is not None:
                self.buffer.share()
            check = None if self.reads_log_probs else self.agreement.of_rollouts()
            for epoch in range(self.config.train.max_epochs):
                for number, batch in enumerate(self._train_batches(epoch, check)):
                    batch, first = self.hooks.on_train_batch(batch), epoch == number == 0
                    if self.value_update is not None:
                        self.count_step(self.value_update.step(self.buffer, batch, metrics), metrics, "critic_")
                    if self.step >= frozen:
                        kl_coef, own_check = self.maker.kl_controller.value, check if first else None
                        result = self.policy_update.step(
                            self.buffer, batch, kl_coef, metrics, first, own_check, self.step
                        )
                        self.count_step(result, metrics)
                        self.hooks.on_update(result)
            if check is not None:
                self.agreement.report(check, metrics)
            self.buffer.clear()
        return data

    def _train_batches(self, epoch: int, check: RolloutCheck | None) -> list[TrainBatch]:
        """Those of one pass over the buffer. A collective.

        check: in the first pass old log-probs are made, and held against the engine's, of all batches but the first,
        whose training forward makes them.
        """
        train = self.config.train
        seed, budget = derive_seed(train.seed, "replay", self.step, epoch), train.max_tokens_per_batch
        steps = self.buffer.plan(seed, step_size=train.train_batch_size, token_budget=budget or None)
        algorithm, parts = self.config.algorithm, self.parts.loss_parts
        batches = plan_batches(self.buffer, steps, algorithm, parts, seed)
        if check is not None and epoch == 0:
            with self.timer.phase("forward"):
                unscored = batches[0 if self.policy_update.separate else 1 :]
                self.policy_update.score(self.buffer, unscored, check, self.step)
        return batches

    def _measure(self, data: StepData) -> None:
        """The step's metrics, and whether the engine sampled what the trainer scores, where it has scored by now."""
        metrics = data.metrics
        if self.reads_log_probs:
            self.agreement.check(data.batches, self.step, metrics)
        add_rollout_metrics(metrics, data.batches, [part.name for part in self.parts.loss_parts])
        metrics.add_numbers(data.rollouts.counts)
        metrics.add("policy_version", self.maker.policy_version)
        metrics.add("epoch", self.prompts.epoch)
        metrics.add("bad_rows", len(self.parts.dataset.bad.rows))

    # -- engine and evaluation -----------------------------------------------------------------------------------

    def start(self) -> None:
        """The engine gets the weights that training starts or goes on from, and a first look through the gate."""
        log_stage("giving the engine its weights, and comparing it with the trainer")
        check_state(self.maker.calculator, f"estimator {self.config.algorithm.advantage_estimator}")
        if self.config.rollout.offload_trainer:
            self._make_room()
        self._load_engine_weights()
        reported = self.agreement.difference
        self.agreement.follow(self.prompts.first(PROBE_PROMPTS, self.step))
        self.agreement.probe_now()
        if self.step == 0:
            self.agreement.check_reference(self.maker.forward_stage.reference)
        else:  # a resumed run: the next row shows the gate after the sync that it continues from
            self.agreement.difference = reported
        self._weights_leave()  # which a probe has read

    def sync(self) -> None:
        """The engine gets the trained weights. Whether they are the same, the next rollout shows before anything is
        trained on it, or a probe now."""
        if self.config.rollout.offload_trainer:
            self._make_room()
        self.maker.engine.wake()
        self._load_engine_weights()
        evaluated = self.parts.evaluation is not None and self.evaluation_due()
        self.agreement.after_sync(self.step, evaluated, self.maker.settings.sampling.full_distribution)
        self._weights_leave()

    def _make_room(self) -> None:
        """For the engine, where it is asked for; training takes back by itself what it needs."""
        for engine in self.engines().values():
            engine.offload()
        if self.critic is not None:
            self.critic.offload_weights()

    def _weights_leave(self) -> None:
        """The actor's, where the engine keeps a copy and room for it is asked for; they come back when used."""
        if self.config.rollout.offload_trainer and not self.maker.engine.shares_weights:
            self.actor.offload_weights()

    def _load_engine_weights(self, lent: bool = False) -> None:
        """The engine takes over the actor's weights. Those then make room for what it wakes next, where that is asked
        for and the engine keeps a copy: not before it has returned, as engines read the last ones after all were named.

        lent: the actor has other weights for a while, and stays where it is.
        """
        engine = self.maker.engine
        if not engine.shares_weights:
            engine.update_weights(EngineWeights(engine, self.actor))
            if not lent:
                self._weights_leave()
        self.maker.policy_is_new(self.step)
        if self.prompts.runs_ahead and not lent:
            engine.note_policy(self.step)  # tokens of work that is under way are of it from here on

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The engine holds other weights inside, where a hook lends some."""
        other = self.hooks.weights_for("evaluation")
        if other is None:
            yield
            return
        shared = self.maker.engine.shares_weights
        self.actor.bring_back()
        with other:
            self._load_engine_weights(lent=True)
            if shared:
                yield
        if not shared:
            yield  # the trainer has its own weights back: what fails in here needs no collective to restore them
        self._load_engine_weights()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.prompts.state_dict() | {
            "parity": self.agreement.difference,
            "init_kl_coef": self.config.algorithm.init_kl_coef,
            "kl_controller": self.maker.kl_controller.state_dict(),
            "calculator": copied(self.maker.calculator.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s; an `init_kl_coef` that the resuming command changed counts from here on."""
        self.prompts.load_state_dict(state)
        self.agreement.difference = float(state["parity"])
        coefficient = self.config.algorithm.init_kl_coef
        if state["init_kl_coef"] == coefficient:
            self.maker.kl_controller.load_state_dict(state["kl_controller"])
        else:  # asked for with the command that resumes
            self.console.message(f"init_kl_coef was {state['init_kl_coef']:g}; from here on it is {coefficient:g}")
        estimator = f"estimator {self.config.algorithm.advantage_estimator}"
        go_on(self.maker.calculator, state["calculator"], estimator)

    def engines(self) -> dict[str, TrainEngine]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def save_engines(self, folder: Path) -> None:
        """Optimizer states come to the device to be written. Where it has no room for them beside the engine, that
        sleeps until they have left, and gets its weights again."""
        engine, offloads = self.maker.engine, self.config.rollout.offload_trainer
        if offloads:
            engine.sleep(keep_weights=False)
        try:
            super().save_engines(folder)
        finally:
            if offloads:
                self._make_room()
            if engine.lacks_weights:
                engine.wake()
                self._load_engine_weights()

    def load_engines(self, folder: Path, saved_ranks: int | None = None) -> None:
        """As `save_engines`; the engine gets its weights later, when these are known."""
        if self.config.rollout.offload_trainer:
            self.maker.engine.sleep(keep_weights=False)
        super().load_engines(folder, saved_ranks)

    def export(self, folder: Path) -> None:
        """A checkpoint folder for transformers and vLLM, LoRA merged; the adapter itself in `lora/`."""
        export_actor(self.parts, folder)


def build_trainer(config: RunConfig, callbacks: Sequence[Any] = ()) -> VLTrainer:
    """The trainer that `advantage_estimator` asks for. callbacks: hooks of a user."""
    return config.algorithm.estimator.trainer_class().from_config(config, callbacks)
