"""Routing replay over a step: whose record is kept, what is trained on, and what is reported."""

from types import SimpleNamespace

import pytest
import torch
from moe import moe_checkpoint, rounded_routers
from tiny_models import PlainEngine, actor_of, mixed_prompts

from lightrft_visual.algorithms.kl import FixedKLController
from lightrft_visual.config.vl import AlgorithmConfig, RunConfig
from lightrft_visual.errors import RolloutError
from lightrft_visual.experience.batch_plan import MicroBatch
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.rollouts import Rollouts, SamplingSettings
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards.engine import RewardComputationEngine
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.trainer.features.routing import MEASURED, RoutingHook, build
from lightrft_visual.trainer.hooks import Hooks
from lightrft_visual.trainer.vl.maker import ExperienceMaker, MakerSettings
from lightrft_visual.trainer.vl.updates import PolicyUpdate, parts_of_loss, plan_batches


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return moe_checkpoint(tmp_path_factory.mktemp("moe"))


class Step:
    """A step's rollouts, whose routers round to bfloat16, its experience, and its first update."""

    def __init__(self, checkpoint, mode: str, packed: bool = False, scored: bool = True, n: int = 2):
        actor = actor_of(checkpoint)
        self.hook = RoutingHook(actor.backbone.routers, mode)
        config = AlgorithmConfig(routing_replay=mode)
        settings = MakerSettings(
            engine=TransformersEngine(actor, checkpoint.tokenizer, 4), sampling=SamplingSettings(n=n, max_new_tokens=6),
            algorithm=config, micro_batch_size=4, score_policy=scored, hooks=Hooks([self.hook]),
            data_processor=MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 1024),
            rewards=RewardComputationEngine(custom_reward_func=lambda completions: [len(c) % 3 for c in completions]),
        )  # fmt: skip
        maker = ExperienceMaker(
            actor, None, None, checkpoint.tokenizer, FixedKLController(0.0), torch.device("cpu"), settings, vision=True
        )
        with rounded_routers(actor):
            rollouts = maker.generate(mixed_prompts(videos=False))
        self.rollouts = rollouts
        self.batches = list(maker.make_experience(maker.score(rollouts)).batches)
        buffer = NaiveReplayBuffer(4, packing_samples=packed)
        for each in self.batches:
            buffer.append(each)
        self.metrics, update = MetricsAccumulator(), PolicyUpdate(PlainEngine(actor), config, settings.sampling.scoring)
        # The same micro-batches as were scored: padded to other widths, the last bits may differ.
        parts = [MicroBatch(list(range(start, start + 4))) for start in range(0, len(rollouts), 4)]
        (batch,) = plan_batches(buffer, [parts], config, parts_of_loss(config, 6))
        update.step(buffer, batch, 0.0, self.metrics, True)
        self.share = self.hook.metrics().get("routed_otherwise")

    @property
    def deviation(self) -> float:
        return self.metrics.reduce()["ratio_max_dev_first"]

    @property
    def difference(self) -> float:
        """Of the engine's log-probs to the trainer's."""
        found = [(e.action_log_probs - e.rollout_log_probs)[e.action_mask].abs().max() for e in self.batches]
        return float(torch.stack(found).max())


def test_replayed_rollouts_have_a_first_ratio_of_exactly_one_and_fit_the_engine_better(checkpoint):
    off, replayed = Step(checkpoint, "off"), Step(checkpoint, "rollout")
    packed = Step(checkpoint, "rollout", packed=True, scored=False)
    assert replayed.deviation == packed.deviation == 0.0
    assert all(0 < each.share < 0.1 for each in (off, replayed, packed))
    assert replayed.difference < 0.2 * off.difference


def test_old_records_in_the_scoring_pass(checkpoint):
    step = Step(checkpoint, "old")
    assert step.deviation == 0.0 and step.share == 0.0
    assert all(rollout.experts is None for rollout in step.rollouts)
    assert all(len(each.info["experts"]) == 4 for each in step.batches)


def test_without_replay_the_first_rollouts_alone_are_compared(checkpoint):
    step = Step(checkpoint, "off", n=5)
    kept = [rollout.experts is not None for rollout in step.rollouts]
    assert kept == [True] * MEASURED + [False] * (20 - MEASURED) and step.share > 0


def test_what_cannot_be_replayed_is_refused_by_name(checkpoint):
    def built(routers, mode: str):
        config = RunConfig(algorithm=AlgorithmConfig(routing_replay=mode))
        actor = SimpleNamespace(module=SimpleNamespace(backbone=SimpleNamespace(routers=routers)))
        return build(SimpleNamespace(config=config, actor=actor))

    routers = actor_of(checkpoint).backbone.routers
    assert built(None, "off") is None
    hook = built(routers, "rollout")
    with pytest.raises(RolloutError, match="does not say which experts"):
        hook.on_rollouts(Rollouts([SimpleNamespace(experts=None, valid=True, distorted=False)]))
