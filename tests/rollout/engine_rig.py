"""One engine beside one trainer model, and what the tests ask of the two."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

import torch
from tiny_models import actor_of, mixed_prompts, perturb, text_prompts

from lightrft_visual.experience.rollouts import PromptBatch, Rollout, SamplingSettings, collate
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import Checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout import hf
from lightrft_visual.rollout.engine import RolloutEngine, RolloutStage
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.rollout.parity import ParityGate, log_prob_difference
from lightrft_visual.rollout.weight_sync import EngineWeights
from lightrft_visual.runtime.train_engine import TrainEngine

R = TypeVar("R")
# By which a token of engine hf must be ahead, so that no other batch shape, engine or processor rounds it to another
# one: the likeliest one in logits, a drawn one in probability.
LIKELIEST, DRAWN = 1e-4, 3e-6


def margin_of(logits: torch.Tensor, noise: torch.Tensor, settings: SamplingSettings) -> float:
    """By how much a choice of `hf.draw` is clear, as a share of what it must be."""
    if not len(logits):
        return 1.0
    if settings.greedy:
        first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
        return float((first - second).min()) / LIKELIEST
    mass = hf.truncated(logits, settings.top_k, settings.top_p).softmax(dim=-1).double().cumsum(dim=-1)
    return float((mass[:, :-1] - (noise * mass[:, -1]).unsqueeze(1)).abs().min()) / DRAWN


@contextmanager
def noted_margins() -> Iterator[list[float]]:
    """`margin_of` of everything that engine hf draws inside."""
    found, own = [], hf.draw

    def noted(logits, noise, settings):
        found.append(margin_of(logits, noise, settings))
        return own(logits, noise, settings)

    with patch.object(hf, "draw", noted):
        yield found


def decided(generate: Callable[[int], R], seeds: int = 50) -> R:
    """What generate(seed) gives at the first seed where engine hf draws no token that hangs on rounding."""
    for seed in range(seeds):
        with noted_margins() as found:
            made = generate(seed)
        if min(found) >= 1:
            return made
    raise AssertionError(f"at each seed a token hangs on rounding: {min(found):.2g} of the margin")


class Rig:
    """actor: what would be trained; engine: what samples from a copy of its weights."""

    def __init__(self, checkpoint: Checkpoint, actor: Actor, engine: RolloutEngine):
        self.checkpoint, self.actor, self.engine = checkpoint, actor, engine
        self.stage = self.stage_with(checkpoint.processor)
        self.seed = 10

    def stage_with(self, processor) -> RolloutStage:
        data = MultimodalDataProcessor(self.checkpoint.tokenizer, processor, 1024)
        return RolloutStage(self.engine, data, run_seed=3)

    def weights(self, actor: Actor | None = None):
        engine = SimpleNamespace(module=actor or self.actor)
        return EngineWeights(self.engine, TrainEngine(engine, zero_stage=0, max_norm=1.0))

    def sync(self) -> None:
        self.engine.update_weights(self.weights())

    def move(self, scale: float = 0.02) -> None:
        """Change all weights of the trainer, as an update would."""
        self.seed += 1
        perturb(self.actor.model, self.seed, scale)

    @torch.no_grad()
    def score(self, inputs: ModelInputs, rule, actor: Actor | None = None) -> torch.Tensor:
        return (actor or self.actor)(inputs, rule, with_entropy=False).log_probs

    def difference(self, batch: PromptBatch, settings: SamplingSettings, actor: Actor | None = None) -> float:
        """Largest |difference| of a token's log-prob between engine and trainer."""
        return self.apart(self.stage.generate(batch, settings), settings, actor)

    def apart(self, rollouts: list[Rollout], settings: SamplingSettings, actor: Actor | None = None) -> float:
        """The same of rollouts that are there."""
        samples = collate(rollouts, self.checkpoint.tokenizer.pad_token_id, self.checkpoint.vision)
        ours = self.score(ModelInputs.of(samples), settings.scoring, actor)
        return log_prob_difference(ours, samples.rollout_log_probs, samples.action_mask)

    def gate(self, stage: RolloutStage | None = None, tolerance: float = 1e-5) -> ParityGate:
        return ParityGate(
            stage=stage or self.stage,
            engine=self.engine,
            score=self.score,
            reload=self.sync,
            pad_id=self.checkpoint.tokenizer.pad_token_id,
            vision=self.checkpoint.vision,
            device=torch.device("cpu"),
            tolerance=tolerance,
        )

    def token_ids(self, batch: PromptBatch, settings: SamplingSettings) -> list[list[int]]:
        return [rollout.token_ids for rollout in self.stage.generate(batch, settings)]

    def decided_token_ids(self, batch: PromptBatch, settings: SamplingSettings) -> list[list[int]]:
        """`token_ids` of engine hf at a seed, then the stage's, where none hangs on rounding."""

        def generate(seed: int) -> list[list[int]]:
            self.stage.run_seed = seed
            return self.token_ids(batch, settings)

        return decided(generate, seeds=1 if settings.greedy else 50)


def hf_rig(checkpoint: Checkpoint, micro_batch_size: int = 8, **actor) -> Rig:
    """With engine hf. actor: of `actor_of`."""
    made = actor_of(checkpoint, **actor)
    return Rig(checkpoint, made, hf.TransformersEngine(made, checkpoint.tokenizer, micro_batch_size))


@contextmanager
def vllm_rig(
    checkpoint: Checkpoint, banned: list[int] | None = None, actor: Actor | None = None, **settings
) -> Iterator[Rig]:
    """With vLLM, which is closed at the end. settings: of `VLLMSettings`."""
    from lightrft_visual.rollout.vllm.arguments import host_cache
    from lightrft_visual.rollout.vllm.engine import VLLMEngine, VLLMSettings

    banned = checkpoint.family.banned_ids(checkpoint.tokenizer) if banned is None else banned
    usual = {"max_model_len": 1024, "max_videos": 2, "max_num_seqs": 64, "vision": checkpoint.vision}
    usual["host_cache"] = host_cache(checkpoint.config.get_text_config(), 4, 64, 1024)
    with environment_restored():
        engine = VLLMEngine(VLLMSettings(checkpoint.path, banned_ids=banned, **(usual | settings)))
        try:
            yield Rig(checkpoint, actor or actor_of(checkpoint, banned), engine)
        finally:
            engine.close()


def check_parity(rig: Rig, batch: PromptBatch, settings: SamplingSettings, scale=0.02, most=1e-5, syncs=2):
    """As loaded, and after each of the updates that are handed over."""
    found = [rig.difference(batch, settings)]
    for _ in range(syncs):
        rig.move(scale)
        rig.sync()
        found.append(rig.difference(batch, settings))
    assert max(found) <= most, found


FEW = (50, 60)  # the only tokens that `enders` leaves, beside the end token


def enders(checkpoint: Checkpoint) -> list[int]:
    """Banned tokens that leave three, the end token one of them, so that turns end."""
    allowed = {*FEW, checkpoint.tokenizer.eos_token_id}
    return [index for index in range(checkpoint.config.get_text_config().vocab_size) if index not in allowed]


def check_ends(few: Rig, settings: SamplingSettings) -> None:
    """Responses end at the end token, or are cut and say so. few: draws what `enders` leaves alone."""
    tokenizer = few.checkpoint.tokenizer
    eos, rollouts = tokenizer.eos_token_id, few.stage.generate(text_prompts(), settings)
    assert {token for rollout in rollouts for token in rollout.token_ids} == {*FEW, eos}
    for rollout in rollouts:
        assert eos not in rollout.token_ids[:-1] and len(rollout.token_ids) == len(rollout.log_probs)
        assert rollout.truncated == (rollout.token_ids[-1] != eos)
        assert len(rollout.token_ids) == settings.max_new_tokens or not rollout.truncated
        shown = rollout.token_ids if rollout.truncated else rollout.token_ids[:-1]
        assert rollout.text == tokenizer.decode(shown)
    assert {rollout.truncated for rollout in rollouts} == {True, False}
    assert few.apart(rollouts, settings) <= 1e-5
    whole = few.stage.generate(text_prompts(), replace(settings, skip_special_tokens=False))
    assert [each.text for each in whole] == [tokenizer.decode(each.token_ids) for each in rollouts]


def check_least_length(few: Rig, temperature: float) -> None:
    """The end token is banned up to the least length, for engine and trainer."""
    settings = SamplingSettings(n=20, temperature=temperature, max_new_tokens=5, min_new_tokens=3)
    rollouts = few.stage.generate(text_prompts(), settings)
    assert min(len(rollout.token_ids) for rollout in rollouts) >= 4 and few.apart(rollouts, settings) <= 1e-5


def check_truncated_sampling(rig: Rig) -> None:
    """It has no log-probs, and the gate works all the same."""
    settings = SamplingSettings(n=2, top_p=0.5, top_k=20, max_new_tokens=4)
    assert all(rollout.log_probs is None for rollout in rig.stage.generate(mixed_prompts(), settings))
    assert rig.gate().check(mixed_prompts()) <= 1e-5


@contextmanager
def environment_restored():
    """vLLM and torch's launcher read and set environment variables; what follows must not see them."""
    import os

    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
