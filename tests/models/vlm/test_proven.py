"""Every family of docs/models.md, built tiny: what the table claims holds, and what it does not claim is refused."""

from functools import cache
from pathlib import Path

import pytest
import torch
from engine_rig import Rig
from equality import assert_same, loss_and_gradients, with_adapters
from stock_families import PLAIN, STOCK, TABLE, claimed, grouped_samples, stock, stock_checkpoint, stock_prompts
from tiny_models import VIDEO, clip, perturb, picture

from lightrft_visual.config.registry import vlm_families
from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import PromptBatch, SamplingSettings, ScoringRule
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import Checkpoint, add_lora, load_transformer, open_checkpoint
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.models.vlm.shared_prefix import SharedSequence
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.runtime.checkpoint.export import export_hf

RULE = ScoringRule()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Checkpoints by model type, written once."""
    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: stock_checkpoint(root / name, name))


@pytest.fixture(scope="module")
def loaded(opened):
    """By model type an actor whose weights nobody changes, samples, and their log-probs by the model's own class."""

    def load(name: str) -> tuple[Actor, list[probe._Sample], list[torch.Tensor]]:
        actor, samples = actor_of(opened(name)), probe.made_up_samples(opened(name), 0)
        return actor, samples, probe._Own.of(actor, samples).log_probs

    return cache(load)


def actor_of(checkpoint: Checkpoint, **model) -> Actor:
    settings = ModelConfig(**model)
    transformer = add_lora(load_transformer(checkpoint.path, settings, torch.float32), settings)
    return Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids).eval()


def assert_own(actor: Actor, samples: list[probe._Sample], own: list[torch.Tensor], inputs: ModelInputs) -> None:
    """Log-probs are those of the model's own class, each sample by itself."""
    with torch.no_grad():
        ours = actor(inputs, RULE).log_probs
    for row, sample, theirs in zip(ours, samples, own, strict=True):
        torch.testing.assert_close(row[: sample.actions], theirs, atol=1e-5, rtol=0)


def test_the_table_names_every_family_that_is_built():
    assert TABLE.keys() == STOCK.keys()


# Whose adapters are held to the model's own class elsewhere.
ELSEWHERE = {"janus": "tests/plugins/unified", "qwen2": "test_probe.py", "qwen3": "test_probe.py"}


def test_each_model_type_of_an_adapter_of_the_package_is_proven():
    """`probe` takes them for right and compares nothing at the start of a run. A new one: families.json, a builder in
    stock_families.py, and scripts/write_models.py."""
    built = {entry.get("type", name) for name, entry in TABLE.items()} | ELSEWHERE.keys()
    shipped = [entry for entry in vlm_families if entry.shipped]
    assert {name for entry in shipped for name in entry.model_types} <= built


def test_the_page_of_models_is_written_from_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import write_models

    assert write_models.FILE.read_text() == write_models.text(), "run python scripts/write_models.py"
    assert set(write_models.GENERAL) == PLAIN.keys()
    assert {form for entry in TABLE.values() for form in entry["proven"]} <= write_models.COLUMNS.keys()


@pytest.mark.parametrize("name", claimed("padded"))
def test_padded_samples_equal_the_models_own_forward(loaded, name):
    actor, samples, own = loaded(name)
    assert_own(actor, samples, own, probe._padded(samples))


@pytest.mark.parametrize("name", claimed("text alone"))
def test_a_batch_of_text_alone_equals_the_models_own_forward_and_runs_the_tower(loaded, name):
    actor, samples, own = loaded(name)
    text = probe._padded(samples[:1])
    assert_own(actor, samples[:1], own[:1], text)
    actor.zero_grad(set_to_none=True)
    actor(text, RULE).log_probs.sum().backward()
    towers = actor.backbone.family.towers
    inside = [p.grad for n, p in actor.named_parameters() if any(f".{tower}." in n for tower in towers)]
    assert any(grad is not None for grad in inside) and not any(grad.any() for grad in inside if grad is not None)


@pytest.mark.parametrize("name", claimed("packed"))
def test_packed_samples_equal_the_models_own_forward(loaded, name):
    actor, samples, own = loaded(name)
    assert_own(actor, samples, own, probe._packed(samples))


@pytest.mark.parametrize("name", sorted(TABLE.keys() - claimed("packed")))
def test_what_is_not_claimed_to_pack_is_refused(loaded, name):
    actor, samples, _ = loaded(name)
    with pytest.raises(ConfigError, match="packing_samples is not proven for model type"):
        actor(probe._packed(samples), RULE)


def test_images_that_are_merged_one_by_one_are_refused_on_divided_weights(opened):
    model = load_transformer(opened("minicpmv4_6").path, ModelConfig(), torch.float32)
    next(model.base_model.parameters()).ds_id = 0  # as DeepSpeed marks them
    with pytest.raises(ConfigError, match="zero_stage 3: MiniCPM-V merges images one by one"):
        Actor(model, [], [])


@pytest.mark.parametrize(("name", "window"), [("mistral3", 30), ("vipllava", 5)])
def test_windows_of_attention_hold_in_packed_samples(tmp_path, name, window):
    checkpoint = stock_checkpoint(tmp_path, name, sliding_window=window)
    actor, samples = actor_of(checkpoint), probe.made_up_samples(checkpoint, 40)
    assert_own(actor, samples, probe._Own.of(actor, samples).log_probs, probe._packed(samples))


@pytest.mark.parametrize("name", claimed("shared prefix"))
def test_a_shared_prompt_equals_its_copies_in_loss_and_gradients(opened, loaded, monkeypatch, name):
    actor, (inputs, _) = loaded(name)[0], grouped_samples(opened(name))
    alone = loss_and_gradients(actor, [inputs])
    monkeypatch.setattr(actor.backbone, "share_prefix", True)
    assert SharedSequence.of(inputs) is not None
    assert_same(alone, loss_and_gradients(actor, [inputs]), 2e-5)


@pytest.mark.parametrize("name", claimed("LoRA"))
def test_adapters_are_trained_and_equal_pefts_own_forward(opened, loaded, name):
    actor, samples = actor_of(opened(name), lora_rank=4), loaded(name)[1]
    torch.manual_seed(0)
    with_adapters(actor, 0.02)
    assert_own(actor, samples, probe._Own.of(actor, samples).log_probs, probe._padded(samples))
    actor(probe._padded(samples), RULE).log_probs.sum().backward()
    trained = {n: p.grad is not None for n, p in actor.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in each for each in trained)
    towers = actor.backbone.family.towers  # some read their features from a layer before the last
    assert all(has or any(f".{tower}." in each for tower in towers) for each, has in trained.items())


@pytest.mark.parametrize("name", claimed("export"))
def test_an_export_opens_again_with_the_same_log_probs(opened, loaded, name, tmp_path):
    actor, inputs = actor_of(opened(name)), probe._padded(loaded(name)[1])
    perturb(actor, 3, 0.01)
    export_hf(actor.transformer, opened(name).processor, tmp_path)
    again = open_checkpoint(str(tmp_path), ModelConfig(), DataConfig())
    assert type(again.processor) is type(opened(name).processor)
    with torch.no_grad():
        ours, theirs = (each(inputs, RULE).log_probs for each in (actor_of(again), actor))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def text_alone(checkpoint: Checkpoint) -> PromptBatch:
    """With a blank image, which no later token may see."""
    return PromptBatch.of(["what is 1 plus 2?", "where?"])


def videos(checkpoint: Checkpoint) -> PromptBatch:
    clips = [[clip(0)], [clip(1, 8, 1.0), clip(2)]]
    return PromptBatch.of([f"{VIDEO} how many?", f"{VIDEO} or {VIDEO}"], None, clips)


FORMS = [(each, "hf") for each in (stock_prompts, text_alone)] + [(videos, "video")]


@pytest.mark.parametrize("prompts,name", [(each, name) for each, form in FORMS for name in claimed(form)])
def test_engine_hf_samples_from_what_the_trainer_scores(opened, loaded, name, prompts):
    checkpoint, actor = opened(name), loaded(name)[0]
    rig = Rig(checkpoint, actor, TransformersEngine(actor, checkpoint.tokenizer, 8))
    assert rig.difference(prompts(checkpoint), SamplingSettings(n=2, max_new_tokens=4)) <= 1e-5


def test_videos_that_are_not_claimed_are_refused(opened):
    assert {name for name in TABLE if "video" in opened(name).family.kinds} == {*claimed("video")}


@pytest.mark.parametrize("name", STOCK)
def test_tokens_of_an_image_are_known_by_its_size_alone(name):
    config, processor, tokenizer = STOCK[name]()
    family = type(family_of(config))
    text = family.placeholders(processor)["image"]
    images = [picture(1, 56, 56), picture(2, 300, 80), picture(3, 40, 500)]
    whole = [processor(text=[text], **family.media_arguments([image], []))["input_ids"][0] for image in images]
    alone = len(tokenizer(text)["input_ids"]) - 1
    assert family.image_token_counts(processor, [each.size for each in images]) == [len(ids) - alone for ids in whole]


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_type_without_an_adapter_is_proven_sampled_and_trained(model_type, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path / "cache"))
    built, folder = stock(model_type), tmp_path / "model"
    for part in (built.model, built.tokenizer, built.processor):
        part.save_pretrained(folder)
    checkpoint = open_checkpoint(str(folder), ModelConfig(), DataConfig())
    actor = actor_of(checkpoint, lora_rank=4)
    assert "padded; without images)" in probe.prove_family(actor, checkpoint, 64, {"pretrain": model_type})
    rig = Rig(checkpoint, actor, TransformersEngine(actor, checkpoint.tokenizer, 8))
    for prompts in (stock_prompts(checkpoint), text_alone(checkpoint)):
        assert rig.difference(prompts, SamplingSettings(n=2, max_new_tokens=4)) <= 1e-5
    actor(probe._padded(probe.made_up_samples(checkpoint, 0)), RULE).log_probs.sum().backward()
    assert any(each.grad is not None and each.grad.any() for each in actor.parameters())
