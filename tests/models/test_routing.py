"""Experts of each token: what is recorded is what ran, and a record that is used again changes the choice alone."""

from dataclasses import replace

import pytest
import torch
from engine_rig import Rig
from moe import rounded_routers
from tiny_models import actor_of, checkpoint_of, inputs_of, load, mixed_prompts

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import SamplingSettings, ScoringRule
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.hf import TransformersEngine

RULE = ScoringRule()


@pytest.fixture(scope="module")
def rig(mixture) -> Rig:
    actor = actor_of(mixture)
    return Rig(mixture, actor, TransformersEngine(actor, mixture.tokenizer))


@pytest.fixture(scope="module")
def rounded(rig):
    """Rollouts whose routers rounded to bfloat16."""
    with rounded_routers(rig.actor):
        return rig.stage.generate(mixed_prompts(), SamplingSettings(n=3, max_new_tokens=6))


@pytest.fixture(autouse=True)
def nothing_counted(rig):
    rig.actor.backbone.routers.use("off")
    rig.actor.backbone.routers.metrics()


def sharing_actor(rig) -> Actor:
    model = load(rig.checkpoint.path, True)
    return Actor(model, rig.actor.banned_ids.tolist(), rig.checkpoint.eos_ids, share_prefix=True)


def test_the_record_of_a_rollout_is_of_all_its_tokens_but_the_last(rig, rounded):
    for rollout in rounded:
        tokens = len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1
        assert rollout.experts.shape == (tokens, 2, 3) and rollout.experts.dtype == torch.uint8
        assert (rollout.experts.sort(dim=2).values.diff(dim=2) > 0).all()  # different ones
    assert {int(each) for rollout in rounded for each in rollout.experts.unique()} == set(range(24))


def test_without_noise_the_trainer_chooses_as_the_rollout_did(rig):
    rollouts = rig.stage.generate(mixed_prompts(), SamplingSettings(n=2, max_new_tokens=6))
    rig.actor(inputs_of(rig.checkpoint, rollouts), RULE)
    assert rig.actor.backbone.routers.metrics() == {"routed_otherwise": 0.0}


@pytest.mark.parametrize("packed", [False, True])
def test_with_noise_a_share_is_routed_otherwise_whether_or_not_it_is_replayed(rig, rounded, packed):
    inputs, routers = inputs_of(rig.checkpoint, rounded, packed), rig.actor.backbone.routers
    rig.actor(inputs, RULE)
    share = routers.metrics()["routed_otherwise"]
    routers.use("rollout")
    rig.actor(inputs, RULE)
    assert 0 < share < 0.1
    assert 0 < routers.metrics()["routed_otherwise"] < 0.1
    with torch.no_grad():
        rig.actor(inputs, RULE)
    assert routers.metrics() == {}  # of training passes alone


def test_a_replayed_pass_goes_through_the_recorded_experts(rig, rounded):
    routers = rig.actor.backbone.routers
    plain = rig.actor(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    routers.use("rollout")
    again = rig.actor(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    assert (plain - again).abs().max() > 1e-4
    recorded = torch.tensor([value for rollout in rounded for value in rollout.log_probs])
    mask = inputs_of(rig.checkpoint, rounded).action_mask
    assert (again[mask] - recorded).abs().max() < (plain[mask] - recorded).abs().max()
    with rounded_routers(rig.actor), routers.recorded() as passes:
        rig.actor(inputs_of(rig.checkpoint, [rounded[4]]), RULE)
    assert torch.equal(passes[0][: len(rounded[4].experts)], rounded[4].experts)


def test_replaying_the_models_own_choice_changes_no_bit(rig):
    rollouts = rig.stage.generate(mixed_prompts(), SamplingSettings(n=2, max_new_tokens=6))
    routers, found = rig.actor.backbone.routers, []
    for mode in ("off", "rollout"):
        routers.use(mode)
        rig.actor.zero_grad()
        output = rig.actor(inputs_of(rig.checkpoint, rollouts), RULE)
        output.log_probs.sum().backward()
        found.append(
            [output.log_probs.detach(), *(p.grad.clone() for p in rig.actor.parameters() if p.grad is not None)]
        )
    assert len(found[0]) > 20
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("mode", ["rollout", "old"])
def test_padded_packed_and_shared_prompts_replay_alike(rig, rounded, mode):
    rig.actor.backbone.routers.use(mode)
    padded = rig.actor(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    packed = rig.actor(inputs_of(rig.checkpoint, rounded, packed=True), RULE).log_probs
    sharing = sharing_actor(rig)
    sharing.backbone.routers.use(mode)
    shared = sharing(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    assert (padded - packed).abs().max() < 1e-5
    assert (padded - shared).abs().max() < 1e-5


@pytest.mark.parametrize("share", [False, True])
def test_old_notes_the_choices_of_a_pass_without_gradient(rig, rounded, share):
    rollouts = [replace(each, experts=None) for each in rounded]
    actor = sharing_actor(rig) if share else rig.actor
    actor.backbone.routers.use("old")
    with torch.no_grad():
        old = actor(inputs_of(rig.checkpoint, rollouts), RULE)
    assert actor(inputs_of(rig.checkpoint, rollouts), RULE).experts is None
    for rollout, own in zip(rollouts, old.experts):
        assert len(own) == len(rollout.prompt.token_ids) + len(rollout.token_ids)
    noted = [replace(each, experts=own) for each, own in zip(rollouts, old.experts)]
    with rounded_routers(actor):
        assert actor(inputs_of(rig.checkpoint, noted), RULE).log_probs.shape == old.log_probs.shape
    assert 0 < actor.backbone.routers.metrics()["routed_otherwise"] < 0.1


def test_checkpointed_layers_run_again_through_the_recorded_experts(rig, rounded):
    actor, inputs = rig.actor, inputs_of(rig.checkpoint, rounded)
    actor.backbone.routers.use("rollout")
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            actor.model.gradient_checkpointing_enable({"use_reentrant": False})
            actor.train()
        actor.zero_grad()
        actor(inputs, RULE).log_probs.sum().backward()
        found.append([p.grad.clone() for p in actor.parameters() if p.grad is not None])
    actor.model.gradient_checkpointing_disable()
    actor.eval()
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_a_record_that_does_not_fit_is_refused(rig, rounded):
    rig.actor.backbone.routers.use("rollout")
    wrong = replace(rounded[0], experts=rounded[0].experts[:, :, :1])
    with pytest.raises(ConfigError, match=r"\(tokens, layers, k\) of this pass are \(\d+, 2, 3\)"):
        rig.actor(inputs_of(rig.checkpoint, [wrong]), RULE)


def test_a_record_that_counts_dense_layers_is_read_by_the_layers_numbers(rig, rounded):
    routers = rig.actor.backbone.routers
    routers.use("rollout")
    plain = rig.actor(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    wider = [torch.cat([each.experts, torch.zeros_like(each.experts[:, :1])], dim=1) for each in rounded]
    found = rig.actor(
        inputs_of(rig.checkpoint, [replace(r, experts=own) for r, own in zip(rounded, wider)]), RULE
    ).log_probs
    assert torch.equal(plain, found)


def test_a_dense_model_has_no_routers(tmp_path):
    assert actor_of(checkpoint_of(tmp_path, "qwen2")).backbone.routers is None
