"""A mixture of experts: balance, precision, LoRA, the weights it gives; and the experts of a rollout, replayed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_rig import Rig
from equality import with_adapters
from moe import rounded_routers
from safetensors.torch import load_file
from tiny_models import actor_of, checkpoint_of, inputs_of, load, mixed_prompts, perturb, rollouts_of

from lightrft_visual.algorithms.loss_terms import Balance, LossDenominators
from lightrft_visual.config.vl import AlgorithmConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import SamplingSettings, ScoringRule
from lightrft_visual.models.checkpointed import checkpoint_blocks
from lightrft_visual.models.loading import add_lora
from lightrft_visual.models.routing import sparse_blocks
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.weight_sync import named_weights
from lightrft_visual.runtime.checkpoint.export import as_published, export_hf
from lightrft_visual.runtime.train_engine import TrainEngine

RULE = ScoringRule()
ON_EXPERTS = ModelConfig(
    lora_rank=4, target_modules="q_proj,v_proj", target_parameters="experts.gate_up_proj, experts.down_proj"
)


@pytest.fixture(scope="module")
def inputs(mixture):
    return inputs_of(mixture, rollouts_of(mixture, mixed_prompts(videos=False)))


def test_the_balance_is_transformers_own_auxiliary_loss(mixture, inputs):
    actor = actor_of(mixture)
    actor.backbone.routers.use("off", balances=True)
    found = actor(inputs, RULE).router_loss
    _, types = actor.backbone._positions(inputs)
    arguments = actor.backbone.family.arguments(inputs, types)
    wanted = load(mixture.path, True)(
        input_ids=inputs.sequences, attention_mask=inputs.attention_mask, output_router_logits=True, **arguments
    ).aux_loss
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4) and found.item() > 1
    found.backward()
    assert all(block.gate.weight.grad.abs().sum() > 0 for block in sparse_blocks(actor.backbone.base).values())
    with torch.no_grad():
        assert actor(inputs, RULE).router_loss is None


def test_a_micro_batchs_balance_counts_by_its_share_of_the_tokens(mixture, inputs):
    actor, term = actor_of(mixture), Balance(AlgorithmConfig(router_aux_loss_coef=0.5))
    with pytest.raises(ValueError, match="needs a mixture of experts"):
        term.forward(lambda each: actor(each, RULE), inputs, 0)
    actor.backbone.routers.use("off", balances=True)
    output, extra = term.forward(lambda each: actor(each, RULE), inputs, 0)
    mask, tokens = inputs.action_mask, int(inputs.action_mask.sum())
    read = SimpleNamespace(action_mask=mask, extra={"router_loss": extra["router_loss"].expand(mask.shape)})
    share, metrics = term.share(read, "token-mean", LossDenominators(4 * tokens, 4, 6))
    torch.testing.assert_close(share, 0.5 * output.router_loss / 4)
    assert metrics["router_loss"] == pytest.approx(output.router_loss.item() / 4)


def test_routers_of_a_model_in_bfloat16_have_their_softmax_in_float32_and_those_without_one_are_refused(
    mixture, inputs
):
    actor = actor_of(mixture, wrap=lambda model: model.bfloat16())
    routers = actor.backbone.routers
    routers.use("off", balances=True)
    actor.backbone.hidden_states(inputs)
    assert {each.dtype for each in routers._scores} == {torch.float32}
    routers._scores = [2 * each for each in routers._scores]
    with pytest.raises(ConfigError, match="do not choose by a softmax"):
        routers.balance()


def test_sparse_blocks_are_leaves_of_zero_3(mixture):
    actor = actor_of(mixture)
    leaves = [module for module in actor.modules() if getattr(module, "_z3_leaf", False)]
    assert len(leaves) == 2 and leaves == list(sparse_blocks(actor.backbone.base).values())


def test_adapters_of_experts_are_merged_into_the_weights_that_are_sent(mixture, inputs, tmp_path):
    actor = actor_of(mixture, wrap=lambda model: add_lora(model, ON_EXPERTS))
    names = {name for name, each in actor.model.named_parameters() if each.requires_grad}
    assert len([name for name in names if ".experts." in name]) == 2 * 2 * 2  # layers, weights, matrices
    with_adapters(actor.model, 0.05)
    adapted = actor(inputs, RULE).log_probs.detach()
    sent = dict(named_weights(TrainEngine(SimpleNamespace(module=actor), zero_stage=0, max_norm=1.0)))
    plain = load(mixture.path, True)
    assert sent.keys() == dict(plain.named_parameters()).keys()
    export_hf(actor.transformer, None, tmp_path, sent)
    facts = {name: getattr(mixture, name) for name in ("family", "vision", "eos_ids")}
    merged = actor_of(SimpleNamespace(**vars(mixture) | {"path": tmp_path}, **facts))
    assert (merged(inputs, RULE).log_probs - adapted).abs().max() < 1e-4
    assert (actor_of(mixture)(inputs, RULE).log_probs - adapted).abs().max() > 1e-2


def test_exports_hold_experts_as_published_checkpoints_do_and_load_again(mixture, tmp_path):
    model = load(mixture.path, True)
    perturb(model, 3, 0.05)
    export_hf(model, mixture.processor, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    name = "model.language_model.layers.0.mlp.experts.{}".format
    saved, own = load_file(file), dict(model.named_parameters())
    assert saved[name("gate_up_proj")].shape == (24, 64, 256) and saved[name("down_proj")].shape == (24, 128, 64)
    assert torch.equal(saved[name("down_proj")].transpose(1, 2), own[name("down_proj")])
    assert all(torch.equal(each, own[key]) for key, each in load(tmp_path, True).named_parameters())
    weight = torch.zeros(2, 3, 4)
    for kind, other in (("qwen3_moe", "mlp.experts.down_proj"), ("qwen3_vl_moe", "mlp.gate.weight")):
        assert as_published(kind, other, weight) is weight


# --- the experts of a rollout, replayed ---


@pytest.fixture(scope="module")
def rig(mixture) -> Rig:
    actor = actor_of(mixture)
    return Rig(mixture, actor, TransformersEngine(actor, mixture.tokenizer))


@pytest.fixture(scope="module")
def rounded(rig):
    """Rollouts whose routers rounded to bfloat16."""
    with rounded_routers(rig.actor):
        return rig.stage.generate(mixed_prompts(), SamplingSettings(n=3, max_new_tokens=6))


@pytest.fixture
def routers(rig):
    """Of the rig's actor, which have counted nothing."""
    found = rig.actor.backbone.routers
    found.use("off")
    found.metrics()
    yield found
    found.use("off")


def log_probs_of(rig, rollouts, packed: bool = False) -> torch.Tensor:
    return rig.actor(inputs_of(rig.checkpoint, rollouts, packed), RULE).log_probs


def gradients_of(actor) -> list[torch.Tensor]:
    return [each.grad.clone() for each in actor.parameters() if each.grad is not None]


def sharing_actor(rig) -> Actor:
    model = load(rig.checkpoint.path, True)
    return Actor(model, rig.actor.banned_ids.tolist(), rig.checkpoint.eos_ids, share_prefix=True)


def test_the_record_of_a_rollout_is_of_all_its_tokens_but_the_last(rig, rounded):
    for rollout in rounded:
        tokens = len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1
        assert rollout.experts.shape == (tokens, 2, 3) and rollout.experts.dtype == torch.uint8
        assert (rollout.experts.sort(dim=2).values.diff(dim=2) > 0).all()  # different ones
    assert {int(each) for rollout in rounded for each in rollout.experts.unique()} == set(range(24))


@pytest.mark.parametrize("packed", [False, True])
def test_with_noise_a_share_is_routed_otherwise_whether_or_not_it_is_replayed(rig, rounded, routers, packed):
    for mode in ("off", "rollout"):
        routers.use(mode)
        log_probs_of(rig, rounded, packed)
        assert 0 < routers.metrics()["routed_otherwise"] < 0.1
    with torch.no_grad():
        log_probs_of(rig, rounded, packed)
    assert routers.metrics() == {}  # of training passes alone


def test_a_replayed_pass_goes_through_the_recorded_experts(rig, rounded, routers):
    plain = log_probs_of(rig, rounded)
    routers.use("rollout")
    again = log_probs_of(rig, rounded)
    assert (plain - again).abs().max() > 1e-4
    recorded = torch.tensor([value for rollout in rounded for value in rollout.log_probs])
    mask = inputs_of(rig.checkpoint, rounded).action_mask
    assert (again[mask] - recorded).abs().max() < (plain[mask] - recorded).abs().max()
    with rounded_routers(rig.actor), routers.recorded() as passes:
        log_probs_of(rig, [rounded[4]])
    assert torch.equal(passes[0][: len(rounded[4].experts)], rounded[4].experts)


def test_without_noise_the_trainer_chooses_as_the_rollout_did_and_replaying_it_changes_no_bit(rig, routers):
    rollouts, found = rig.stage.generate(mixed_prompts(), SamplingSettings(n=2, max_new_tokens=6)), []
    for mode in ("off", "rollout"):
        routers.use(mode)
        rig.actor.zero_grad()
        log_probs = log_probs_of(rig, rollouts)
        log_probs.sum().backward()
        found.append([log_probs.detach(), *gradients_of(rig.actor)])
        assert routers.metrics() == {"routed_otherwise": 0.0}
    assert len(found[0]) > 20 and all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("mode", ["rollout", "old"])
def test_padded_packed_and_shared_prompts_replay_alike(rig, rounded, routers, mode):
    sharing = sharing_actor(rig)
    for each in (routers, sharing.backbone.routers):
        each.use(mode)
    padded, packed = (log_probs_of(rig, rounded, packed) for packed in (False, True))
    shared = sharing(inputs_of(rig.checkpoint, rounded), RULE).log_probs
    assert (padded - packed).abs().max() < 1e-5 and (padded - shared).abs().max() < 1e-5


@pytest.mark.parametrize("share", [False, True])
def test_old_notes_the_choices_of_a_pass_without_gradient(rig, rounded, routers, share):
    actor = sharing_actor(rig) if share else rig.actor
    actor.backbone.routers.use("old")

    def passed(experts):
        return actor(inputs_of(rig.checkpoint, [replace(r, experts=own) for r, own in zip(rounded, experts)]), RULE)

    with torch.no_grad():
        old = passed([None] * len(rounded))
    assert passed([None] * len(rounded)).experts is None
    for rollout, own in zip(rounded, old.experts, strict=True):
        assert len(own) == len(rollout.prompt.token_ids) + len(rollout.token_ids)
    with rounded_routers(actor):
        assert passed(old.experts).log_probs.shape == old.log_probs.shape
    assert 0 < actor.backbone.routers.metrics()["routed_otherwise"] < 0.1


def test_checkpointed_layers_run_again_through_the_recorded_experts_and_count_their_balance_once(rig, rounded, routers):
    actor, inputs, found = rig.actor, inputs_of(rig.checkpoint, rounded), []
    routers.use("rollout", balances=True)
    actor.train()
    for how in ("none", "full", "attention"):
        checkpoint_blocks(actor.model, how)
        actor.zero_grad()
        output = actor(inputs, RULE)
        (output.log_probs.sum() + output.router_loss).backward()
        found.append([output.router_loss.detach(), *gradients_of(actor)])
    actor.model.gradient_checkpointing_disable()
    actor.eval()
    assert len(found[0]) > 10 and all(torch.equal(one, each) for one, *rest in zip(*found) for each in rest)


def test_a_record_that_counts_dense_layers_is_read_by_the_layers_numbers_and_one_that_does_not_fit_is_refused(
    rig, rounded, routers
):
    routers.use("rollout")
    plain = log_probs_of(rig, rounded)
    wider = [torch.cat([each.experts, torch.zeros_like(each.experts[:, :1])], dim=1) for each in rounded]
    assert torch.equal(plain, log_probs_of(rig, [replace(each, experts=own) for each, own in zip(rounded, wider)]))
    with pytest.raises(ConfigError, match=r"\(tokens, layers, k\) of this pass are \(\d+, 2, 3\)"):
        log_probs_of(rig, [replace(rounded[0], experts=rounded[0].experts[:, :, :1])])


def test_a_dense_model_has_no_routers(tmp_path):
    assert actor_of(checkpoint_of(tmp_path, "qwen2")).backbone.routers is None
