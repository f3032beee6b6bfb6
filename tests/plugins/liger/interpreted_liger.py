"""Liger's kernels in a model, by value: run by test_liger.py in a process of its own, with Triton's interpreter.

The interpreter takes a millisecond a token and kernel, so batches are of a few tokens.
"""

import copy
from dataclasses import replace

import interpreted  # noqa: F401  # what the interpreter lacks
import pytest
import torch
import torch.nn as nn
from equality import adapters, assert_same, loss_and_gradients
from liger_kernel.ops import LigerRMSNormFunction
from stock_families import stock_checkpoint
from tiny_models import IMAGE, checkpoint_of, features_of, inputs_of, load, picture, turn
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm, apply_rotary_pos_emb

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import PromptBatch, Rollout, SamplingSettings, ScoringRule
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.plugins.liger import kernels as liger
from lightrft_visual.plugins.liger.kernels import use_kernels
from lightrft_visual.rollout.hf import TransformersEngine

KERNELS = ModelConfig(use_liger_kernel=True)
FAMILIES = {  # and what is replaced: norms, MLPs, attentions' rotations; Qwen2.5-VL's tower has them too
    "qwen2_5_vl": "10 norms, 4 MLPs, 4 rotations",
    "qwen3_vl": "9 norms, 2 MLPs, 4 rotations",  # with those of queries and keys
}


def rollouts(checkpoint) -> list[Rollout]:
    """Two responses to a prompt with an image, one to a text."""
    prompts = PromptBatch.of([turn(IMAGE + "what?"), turn("1 + 2?")], [[picture(0, 28, 28)], []], [[], []])
    image, text = (replace(each, group_id=index) for index, each in enumerate(features_of(checkpoint, prompts)))
    given = zip((image, image, text), ([7, 9, 30], [11], [8, 5]))
    return [Rollout(prompt, ids, None, "", False, sample_id=index) for index, (prompt, ids) in enumerate(given)]


def both(checkpoint, shared: bool = True, adapted: bool = False, **settings) -> list[Actor]:
    """An actor as it is and one whose modules compute by Liger's kernels."""
    made = []
    for used in (False, True):
        model = load_transformer(checkpoint.path, ModelConfig(use_liger_kernel=used, **settings), torch.float32)
        made.append(Actor(adapters(model) if adapted else model, [], checkpoint.eos_ids, shared).train())
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_all_weights_are_those_without_kernels(family, tmp_path, capsys):
    checkpoint = checkpoint_of(tmp_path, family)
    plain, kernels = both(checkpoint)
    assert sorted(FAMILIES[family].split(", ")) == sorted(replaced(capsys.readouterr().out))
    inputs = [inputs_of(checkpoint, rollouts(checkpoint), True)]
    assert_same(loss_and_gradients(kernels, inputs), loss_and_gradients(plain, inputs), 1e-5)
    assert "stay" not in capsys.readouterr().out  # rotations are held against the kernel in the first forward


def test_gradients_of_adapters_are_those_without_kernels_also_of_blocks_that_run_again(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    plain, kernels = both(checkpoint, adapted=True, gradient_checkpointing="attention")
    inputs = [inputs_of(checkpoint, rollouts(checkpoint), True)]
    wanted = loss_and_gradients(plain, inputs)
    assert_same(loss_and_gradients(kernels, inputs), wanted, 1e-5)
    assert all("lora" in name for name in wanted[1]) and any("up_proj" in name for name in wanted[1])


@pytest.mark.parametrize("family", ["gemma3", "glm4v", "qwen3_5"])
def test_other_families_are_replaced_by_structure_and_give_the_same(family, tmp_path, capsys):
    checkpoint = stock_checkpoint(tmp_path / family, family)
    inputs = probe._padded(probe.made_up_samples(checkpoint, 0)[:1])
    with torch.no_grad():
        plain, kernels = (actor.eval()(inputs, ScoringRule()).log_probs for actor in both(checkpoint, shared=False))
    torch.testing.assert_close(kernels, plain, rtol=0, atol=1e-5)
    stay = {"glm4v": "glm4v.apply_rotary_pos_emb"}.get(family, "")
    told = [line.partition(" is not")[0] for line in capsys.readouterr().out.splitlines() if "is not what" in line]
    assert [line.replace(f".modeling_{line.split('.')[-3]}", "").endswith(stay) for line in told] == [True] * bool(stay)


def test_a_generation_gives_the_same_tokens(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    prompts = features_of(checkpoint, PromptBatch.of([turn("1?"), turn("where is it?")]))
    sampling = SamplingSettings(n=1, temperature=1e-3, max_new_tokens=3)
    engines = [TransformersEngine(actor.eval(), checkpoint.tokenizer) for actor in both(checkpoint)]
    plain, kernels = (
        [one.token_ids for own in engine.generate(prompts, sampling) for one in own] for engine in engines
    )
    assert kernels == plain


def test_weights_keep_their_names_and_other_models_of_the_class_their_forward(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2")
    plain = load(checkpoint.path, False)
    classes = {type(module): type(module).forward for module in plain.modules()}
    model = load_transformer(checkpoint.path, KERNELS, torch.float32)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(kind.forward is forward for kind, forward in classes.items())
    assert not any("forward" in vars(module) for module in load(checkpoint.path, False).modules())
    norm, copied = model.model.norm, copy.deepcopy(model).model.norm
    with torch.no_grad():
        copied.weight.zero_()
    assert not copied(torch.ones(1, norm.weight.shape[0])).any() and norm(torch.ones(1, norm.weight.shape[0])).any()


FORMS = [(Qwen2RMSNorm, (0.0, "llama")), (Gemma3RMSNorm, (1.0, "gemma")), (Gemma4RMSNorm, (0.0, "gemma"))]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_norm_is_computed_in_the_form_of_its_class(kind, form, monkeypatch):
    """Weight or 1 + weight, multiplied in the input's precision (llama) or in float32 (gemma).

    The values in bfloat16 are for a card: the interpreter cuts digits off where others round.
    """
    torch.manual_seed(0)
    norm, hidden, forms, apply = kind(40, eps=1e-5), torch.randn(9, 40), [], LigerRMSNormFunction.apply
    nn.init.normal_(norm.weight)
    wanted = norm(hidden)
    use_kernels(norm)
    monkeypatch.setattr(LigerRMSNormFunction, "apply", lambda *given: forms.append(given[3:5]) or apply(*given))
    torch.testing.assert_close(norm(hidden), wanted, rtol=0, atol=1e-5)
    assert forms == [form]


def test_a_residual_behind_a_norm_keeps_its_gradient():
    """Gemma's norms end a branch: the gradient that comes in is also the residual's."""
    torch.manual_seed(0)
    gradients, norm = [], Gemma3RMSNorm(24)
    for _ in range(2):
        hidden = torch.ones(2, 24).cumsum(1).requires_grad_()
        (hidden + norm(hidden)).cos().sum().backward()
        gradients.append(hidden.grad)
        use_kernels(norm) if "forward" not in vars(norm) else None
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


class Halved(Qwen2MLP):
    """Looks like a gated MLP, and is another one."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) / 2)


class Swapped(Qwen2MLP):
    """The activation is of the other branch."""

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def test_what_computes_something_else_stays_and_is_named(capsys):
    given = Qwen2Config(hidden_size=8, intermediate_size=16)
    model = nn.Sequential(Halved(given), Swapped(given), nn.LayerNorm(8, bias=False), Qwen2MLP(given))
    use_kernels(model)
    assert ["forward" in vars(each) for each in model] == [False, False, False, True]
    told = capsys.readouterr().out
    assert "compute 1 MLPs; MLPs of the class Halved compute something else and stay; MLPs of the class Swapped" in told
    assert told.rstrip().endswith("norms of the class LayerNorm compute something else and stay")


def test_an_exact_gelu_stays_and_its_approximation_is_replaced():
    found = []
    for activation in ("gelu", "gelu_pytorch_tanh"):
        given = Gemma3TextConfig(hidden_size=8, intermediate_size=16, hidden_activation=activation)
        model = nn.Sequential(Gemma3MLP(given), Gemma3RMSNorm(8))
        use_kernels(model)
        found.append("forward" in vars(model[0]))
    assert found == [False, True]


def test_rotations_by_other_angles_in_the_second_half_stay(capsys):
    torch.manual_seed(0)
    q, k, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    rotation = liger._Rotation(apply_rotary_pos_emb)
    for made, wanted in zip(rotation(q, k, cos, cos), apply_rotary_pos_emb(q, k, cos, cos), strict=True):
        assert torch.equal(made, wanted)
    assert "apply_rotary_pos_emb is not what Liger's kernel computes and stays" in capsys.readouterr().out


def test_a_call_without_tokens_decides_nothing():
    torch.manual_seed(0)
    q, k, half = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 4)
    cos, rotation = torch.cat([half, half], dim=-1), liger._Rotation(apply_rotary_pos_emb)
    assert rotation(q[:, :, :0], k[:, :, :0], cos[:, :0], cos[:, :0])[0].shape == (1, 2, 0, 8) and rotation.fits is None
    wanted = apply_rotary_pos_emb(q, k, cos, cos)
    for made, each in zip(rotation(q, k, cos, cos), wanted, strict=True):
        torch.testing.assert_close(made, each, rtol=0, atol=1e-5)
    assert rotation.fits


def test_a_model_without_any_of_them_is_refused():
    with pytest.raises(ConfigError, match="Sequential has nothing that Liger's kernels compute"):
        use_kernels(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def replaced(told: str) -> list[str]:
    """What the last line about kernels counts."""
    return told.rpartition("Liger's kernels compute ")[2].splitlines()[0].split("; ")[0].split(", ")
