"""Families on two ranks that divide their weights."""

import os
from pathlib import Path

import transformers.models.smolvlm.processing_smolvlm as smolvlm
from forked import on_ranks
from stock_families import claimed, stock_checkpoint

from lightrft_visual.config.vl import DataConfig, DistributedConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.models.vlm.families.unregistered import Unregistered
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings


def proven(actor: Actor, checkpoint) -> list[str | None]:
    """What is said at a first start, at a second one, and of wrong positions."""
    told = [probe.prove_family(actor, checkpoint, 64, {"pretrain": "one"}) for _ in range(2)]
    right = Unregistered.positions
    Unregistered.positions = lambda *given: 2 * right(*given)
    try:
        probe.prove_family(actor, checkpoint, 64, {"pretrain": "another"})
    except ConfigError as error:
        told.append(str(error))
    Unregistered.positions = right
    return told


def tried(strategy: DeepspeedStrategy, path: str) -> tuple[float, list[str | None]]:
    """The difference after a step, and what is said of a family that nobody has proven."""
    checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    with strategy.loading():
        transformer = load_transformer(path, ModelConfig(), strategy.dtype)
    actor = Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    train = strategy.prepare(actor, OptimizerSettings(1e-3, total_steps=4))
    told = proven(train.module, checkpoint) if type(checkpoint.family) is Unregistered else []
    samples = probe.made_up_samples(checkpoint, 0)
    own = samples[:1] if collectives.is_rank_0() else samples[1:]
    form = probe._padded if train.module.backbone.family.unproven else probe._packed
    output = train(form(own), ScoringRule())
    train.accumulate(-output.log_probs.sum() / 100, last=True)
    assert train.step().applied
    if (routers := train.module.backbone.routers) is not None:
        routers._real = None  # of that pass, where the own class is called with another
    return probe._tried(train.module, checkpoint, 0)[0].difference, told


def by_family(folder: str) -> dict[str, tuple]:
    """How each family of a folder agrees with its own class after a step in which one rank has text alone."""
    smolvlm.num2words = smolvlm.num2words or str  # an optional package that spells the numbers of videos
    os.environ["LIGHTRFT_CACHE"] = str(Path(folder, "cache"))
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    return {path.name: tried(strategy, str(path)) for path in sorted(Path(folder, "models").iterdir())}


def test_families_take_a_step_on_divided_weights_agree_with_their_own_class_and_are_proven(tmp_path):
    names = claimed("ZeRO-3")
    opened = {name: stock_checkpoint(tmp_path / "models" / name, name) for name in names}
    first, second = on_ranks(by_family, str(tmp_path), limit=800)
    assert {*first} == {*second} == {*names}
    for name in names:
        (found, told), (other, same) = first[name], second[name]
        assert max(found, other) <= 1e-5, (name, found, other)
        assert told == same and bool(told) == (type(opened[name].family) is Unregistered), name
        if told:
            right, kept, wrong = told
            assert "run by Unregistered" in right and kept == f"{right} (found at an earlier start)"
            assert "its log-probs differ" in wrong
