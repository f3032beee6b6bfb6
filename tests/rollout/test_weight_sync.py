"""The weights that go to the engine: checkpoint names, whole tensors, LoRA merged without touching the trainer."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from stock_families import stock_checkpoint
from tiny_models import actor_of, checkpoint_of

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.weight_sync import EngineWeights, gathered_state_dict, named_weights
from lightrft_visual.runtime.train_engine import TrainEngine


def engine_of(actor) -> TrainEngine:
    return TrainEngine(SimpleNamespace(module=actor), zero_stage=0, max_norm=1.0)


def adapters(model, size=0.1):
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=size)
    return model


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl+tied"])
def test_all_weights_come_once_whole_and_equal_to_the_model_and_its_file(root, kind):
    actor = actor_of(checkpoint_of(root, kind))
    sent = list(named_weights(engine_of(actor)))
    names = [name for name, _ in sent]
    assert names == [name for name, _ in actor.model.named_parameters()]
    assert len(names) == len(set(names))
    own = actor.model.state_dict()
    assert all(torch.equal(own[name], tensor) and not tensor.requires_grad for name, tensor in sent)
    assert ("lm_head.weight" in names) == (not kind.endswith("+tied"))
    saved = load_file(f"{checkpoint_of(root, kind).path}/model.safetensors")
    assert sorted(each.sum().item() for each in saved.values()) == sorted(each.sum().item() for _, each in sent)


def test_adapters_are_merged_as_peft_does_and_the_trainer_keeps_them_apart(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    actor = actor_of(checkpoint, wrap=adapters)
    before = {name: parameter.clone() for name, parameter in actor.model.named_parameters()}
    sent = dict(named_weights(engine_of(actor)))
    merged = actor_of(checkpoint, wrap=lambda model: adapters(model).merge_and_unload()).model.state_dict()
    assert sent.keys() == {name for name, _ in actor_of(checkpoint).model.named_parameters()}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
    plain = actor_of(checkpoint).model.state_dict()
    assert any((tensor - plain[name]).abs().max() > 1e-3 for name, tensor in sent.items())
    assert all(torch.equal(before[name], parameter) for name, parameter in actor.model.named_parameters())


@pytest.mark.parametrize("most", [1, 100_000, 10**9])
def test_weights_are_gathered_in_buckets_of_bounded_size(root, most):
    engine = engine_of(actor_of(checkpoint_of(root, "qwen2"), wrap=adapters))
    expected, gathered, open_now = dict(named_weights(engine)), [], []

    @contextmanager
    def gather(parameters):
        gathered.append(parameters)
        open_now.append(parameters)
        yield
        open_now.pop()

    engine.gathered = gather
    for name, tensor in named_weights(engine, bucket_bytes=most):
        assert len(open_now) == 1 and torch.equal(tensor, expected[name])
    own = {id(parameter): "lora_" in name for name, parameter in engine.module.model.named_parameters()}
    weights = [sum(not own[id(parameter)] for parameter in bucket) for bucket in gathered]  # adapters come beside one
    sizes = [sum(4 * parameter.numel() for parameter in bucket) for bucket in gathered]
    assert sum(len(bucket) for bucket in gathered) == len(own) and sum(weights) == len(expected)
    assert all(size <= most or count == 1 for size, count in zip(sizes, weights))
    assert len(gathered) == {1: len(expected), 10**9: 1}.get(most, len(gathered)) and (most == 1) == (max(weights) == 1)


def test_a_state_dict_is_a_copy_on_the_ranks_that_keep_it_with_what_a_checkpoint_keeps_beside_the_weights(root):
    actor = actor_of(checkpoint_of(root, "qwen2"))
    actor.model.model.norm.register_buffer("mean", torch.tensor([1.0, 2.0]))
    actor.model.model.norm.register_buffer("cache", torch.ones(2), persistent=False)
    state = gathered_state_dict(engine_of(actor), keep=True)
    with torch.no_grad():
        actor.model.get_input_embeddings().weight.zero_()
    assert state["model.embed_tokens.weight"].any()
    assert state["model.norm.mean"].tolist() == [1.0, 2.0] and "model.norm.cache" not in state
    assert gathered_state_dict(engine_of(actor), keep=False) == {}


@pytest.mark.parametrize(
    ("dtype", "size", "kept"), [("bfloat16", 1e-4, False), ("bfloat16", 0.1, True), ("float32", 1e-4, True)]
)
def test_an_export_of_adapters_says_how_much_of_a_small_change_half_precision_keeps(root, caplog, dtype, size, kept):
    actor = actor_of(checkpoint_of(root, "qwen2"), wrap=lambda model: adapters(model, size)).to(getattr(torch, dtype))
    gathered_state_dict(engine_of(actor), keep=True)
    assert (caplog.text == "") is kept
    if not kept:
        told = re.search(
            "half precision keeps ([0-9]+) % of what the adapters change in their weights: the export's folder `lora`",
            caplog.text,
        )
        assert 0 <= int(told[1]) < 90


@pytest.mark.parametrize("name", ["gemma4", "glm4v_moe", "llava_next"])
def test_an_engine_that_reads_files_gets_their_names_and_parts(tmp_path, name):
    checkpoint = stock_checkpoint(tmp_path, name)
    actor = Actor(load_transformer(checkpoint.path, ModelConfig(), torch.float32), [], [])
    sent = dict(EngineWeights(SimpleNamespace(adapters_alone=False, file_names=True), engine_of(actor)))
    held = load_file(tmp_path / "model.safetensors")
    assert sent.keys() == held.keys()
    assert all(torch.equal(sent[key], held[key]) for key in held)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(2)
    later = dict(EngineWeights(SimpleNamespace(adapters_alone=False, file_names=True), engine_of(actor)))
    # Buffers, such as the bounds of a clipped layer, have not changed.
    doubled = [key for key in held if torch.equal(later[key], 2 * held[key])]
    assert later.keys() == held.keys() and len(doubled) >= len([*actor.parameters()])
