"""A mixture of experts in training: its balance, its precision, LoRA on its experts, and the weights that it gives."""

from types import SimpleNamespace

import pytest
import torch
from equality import with_adapters
from safetensors.torch import load_file
from tiny_models import actor_of, inputs_of, load, mixed_prompts, perturb, rollouts_of

from lightrft_visual.algorithms.loss_terms import Balance, LossDenominators
from lightrft_visual.config.vl import AlgorithmConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.checkpointed import checkpoint_blocks
from lightrft_visual.models.loading import add_lora
from lightrft_visual.models.routing import sparse_blocks
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


def test_checkpointed_layers_give_the_same_balance_and_gradients(mixture, inputs):
    actor, found = actor_of(mixture), []
    actor.backbone.routers.use("off", balances=True)
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_blocks(actor.model, "attention")
        actor.train()
        actor.zero_grad()
        actor(inputs, RULE).router_loss.backward()
        found.append([p.grad.clone() for p in actor.parameters() if p.grad is not None])
    assert len(found[0]) > 10 and all(torch.equal(*pair) for pair in zip(*found))


def test_routers_that_choose_by_no_softmax_are_refused(mixture, inputs):
    actor = actor_of(mixture)
    routers = actor.backbone.routers
    routers.use("off", balances=True)
    actor.backbone.hidden_states(inputs)
    routers._scores = [2 * each for each in routers._scores]
    with pytest.raises(ConfigError, match="do not choose by a softmax"):
        routers.balance()


def test_a_model_in_bfloat16_chooses_and_weighs_experts_in_float32(mixture, inputs):
    actor = actor_of(mixture, wrap=lambda model: model.bfloat16())
    actor.backbone.routers.use("off", balances=True)
    actor.backbone.hidden_states(inputs)
    assert {each.dtype for each in actor.backbone.routers._scores} == {torch.float32}


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
    merged = actor_of(SimpleNamespace(**vars(mixture) | {"path": tmp_path}, **facts(mixture)))
    assert (merged(inputs, RULE).log_probs - adapted).abs().max() < 1e-4
    assert (actor_of(mixture)(inputs, RULE).log_probs - adapted).abs().max() > 1e-2


def facts(mixture) -> dict:
    return {"family": mixture.family, "vision": True, "eos_ids": mixture.eos_ids}


def test_exports_hold_experts_as_published_checkpoints_do_and_load_again(mixture, tmp_path):
    model = load(mixture.path, True)
    perturb(model, 3, 0.05)
    export_hf(model, mixture.processor, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    name = "model.language_model.layers.0.mlp.experts.{}".format
    saved = load_file(file)
    assert saved[name("gate_up_proj")].shape == (24, 64, 256) and saved[name("down_proj")].shape == (24, 128, 64)
    assert torch.equal(saved[name("down_proj")].transpose(1, 2), dict(model.named_parameters())[name("down_proj")])
    again = dict(load(tmp_path, True).named_parameters())
    assert all(torch.equal(each, again[key]) for key, each in model.named_parameters())


def test_weights_of_other_types_are_published_as_they_are():
    weight = torch.zeros(2, 3, 4)
    assert as_published("qwen3_moe", "mlp.experts.down_proj", weight) is weight
    assert as_published("qwen3_vl_moe", "mlp.gate.weight", weight) is weight
