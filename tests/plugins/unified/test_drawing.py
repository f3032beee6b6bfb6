"""A model that sees and draws: drawn tokens are scored as they were sampled, and are those that transformers draws."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_rig import Rig, decided, hf_rig
from forked import run_alone
from PIL import Image
from tiny_models import checkpoint_of, inputs_of, perturb, picture, prompts_for, rollouts_of, turn
from transformers import AutoModelForImageTextToText

from lightrft_visual.config.vl import DataConfig, ModelConfig, RunConfig
from lightrft_visual.data.prompts import PromptDataset, RowChecks
from lightrft_visual.data.rows import PromptRow, parse_row
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.rollouts import PromptBatch, SamplingSettings, ScoringRule, collate
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.loading import add_lora
from lightrft_visual.plugins.unified.family import Janus
from lightrft_visual.rollout.engine import check_engine
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.runtime.checkpoint.export import export_hf
from lightrft_visual.trainer.vl.parts import prompt_batch

BEGIN = "<begin_of_image>"
TOKENS = 16
PLAIN = SamplingSettings(n=2, max_new_tokens=6, temperature=0.8)
GUIDED = SamplingSettings(n=2, max_new_tokens=6, guidance_scale=3.0)
GREEDY = SamplingSettings(n=1, max_new_tokens=1, temperature=0.0, guidance_scale=3.0)
CLOSE = 5e-5  # guidance and low temperatures multiply what one token over a cache and a whole sample round otherwise


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def rig(root) -> Rig:
    return hf_rig(checkpoint_of(root, "janus"))


def mixed(rig: Rig) -> PromptBatch:
    """Prompts of text and of one to three images, between two that ask for an image, and a short answer at the end."""
    seen = prompts_for(rig.checkpoint)
    prompts = [turn("a red circle") + BEGIN, *seen.prompts, "a blue square" + BEGIN, turn("where?")]
    return PromptBatch.of(prompts, [None, *seen.images, None, None])


def drawn_rollouts(rig: Rig, settings: SamplingSettings) -> list:
    return [rollout for rollout in rig.stage.generate(mixed(rig), settings) if rollout.prompt.draws]


def test_answers_in_text_are_scored_as_sampled(root):
    checkpoint = checkpoint_of(root, "janus+tied")
    own = hf_rig(checkpoint)
    assert own.difference(prompts_for(checkpoint), PLAIN) <= CLOSE
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint))
    alone = [own.score(inputs_of(checkpoint, [rollout]), ScoringRule())[0] for rollout in rollouts]
    packed = own.score(inputs_of(checkpoint, rollouts, packed=True), ScoringRule())
    for row, one in zip(packed, alone):
        torch.testing.assert_close(row[: len(one)], one, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        GUIDED,
        SamplingSettings(n=2, max_new_tokens=6, guidance_scale=3.0, guidance_log_probs="conditional"),
        SamplingSettings(n=2, max_new_tokens=6, guidance_scale=2.0, first_token_temperature=3.0, min_new_tokens=3),
    ],
    ids=["plain", "guided", "conditional", "fire"],
)
def test_drawn_tokens_are_scored_as_sampled(rig, settings):
    rollouts = rig.stage.generate(mixed(rig), settings)
    sampled = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
    assert sampled.info["loss_part"].sum() == 4 and sampled.rollout_log_probs.std() > 0.1
    for packed in (False, True):
        inputs = inputs_of(rig.checkpoint, rollouts, packed)
        for shared in (False, True):
            rig.actor.backbone.share_prefix = shared
            difference = (rig.score(inputs, settings.scoring) - sampled.rollout_log_probs).abs().max()
            assert difference <= CLOSE, (packed, shared)
    rig.actor.backbone.share_prefix = False
    other = ScoringRule(settings.temperature, guidance_scale=1.5)
    assert (rig.score(inputs, other) - sampled.rollout_log_probs).abs().max() > 0.01


def test_a_gate_probes_with_the_guidance_of_the_run(rig):
    gate = rig.gate(tolerance=CLOSE)
    gate.sampling = GUIDED
    assert 0 < gate.check(mixed(rig)) <= CLOSE


def test_transformers_draws_the_same_tokens_and_images(rig):
    for rollout in decided(lambda seed: drawn_rollouts(rig, GREEDY), seeds=1):
        ids, model = torch.tensor([rollout.prompt.token_ids]), rig.actor.model
        plain = {"attention_mask": torch.ones_like(ids), "generation_mode": "image", "do_sample": False}
        theirs = model.generate(input_ids=ids, **plain, guidance_scale=3.0)
        assert (theirs[0] + rig.checkpoint.config.get_text_config().vocab_size).tolist() == rollout.token_ids
        pixels = list(model.decode_image_tokens(theirs).float())
        image = rig.checkpoint.processor.postprocess(pixels, return_tensors="pt")["pixel_values"][0]
        ours = torch.from_numpy(np.array(rollout.image)).permute(2, 0, 1).int()
        assert (ours - image.int()).abs().max() <= 1  # transformers cuts what is rounded here


def test_an_image_does_not_depend_on_its_company(rig):
    together = rig.decided_token_ids(mixed(rig), GUIDED)
    rig.engine.micro_batch_size, size = 1, rig.engine.micro_batch_size
    apart = rig.token_ids(mixed(rig), GUIDED)
    rig.engine.micro_batch_size = size
    assert apart == together
    assert [len(ids) == TOKENS for ids in together] == [True] * 2 + [False] * 8 + [True] * 2 + [False] * 2
    first = rig.checkpoint.config.get_text_config().vocab_size
    assert all((token >= first) == (len(ids) == TOKENS) for ids in together for token in ids)


def test_every_part_that_draws_gets_a_gradient_with_and_without_images(rig):
    def gradients(rollouts):
        rig.actor.zero_grad()
        batch = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
        rig.actor(ModelInputs.of(batch), GUIDED.scoring).log_probs.sum().backward()
        parts = rig.actor.model.model
        named = {
            name: [each.grad for each in getattr(parts, name).parameters()]
            for name in ("generation_head", "generation_embeddings", "generation_aligner", "vqmodel", "vision_model")
        }
        return named | {"text": [rig.actor.model.lm_head.weight.grad]}

    drawn = gradients(drawn_rollouts(rig, GUIDED))
    seen = gradients(rollouts_of(rig.checkpoint, prompts_for(rig.checkpoint)))
    for name in drawn:
        frozen = name == "vqmodel"
        assert all((each is None) == frozen for named in (drawn, seen) for each in named[name]), name
    for name in ("generation_head", "generation_embeddings", "generation_aligner"):
        assert all(each.abs().sum() > 0 for each in drawn[name]) and not any(each.any() for each in seen[name])


@pytest.mark.parametrize("log_probs", ["guided", "conditional"])
def test_modules_run_equally_often_whatever_a_rank_generates(rig, log_probs):
    """ZeRO-3 gathers a module's weights from all ranks at each of its calls."""
    settings = SamplingSettings(n=1, max_new_tokens=TOKENS, min_new_tokens=TOKENS, guidance_scale=3.0)
    settings = replace(settings, guidance_log_probs=log_probs)
    calls: Counter = Counter()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, module in rig.actor.named_modules()
        if ("generation_" in name or "lm_head" in name) and list(module.parameters(recurse=False))
    ]
    drawn, written, counts = turn("a red circle") + BEGIN, turn("where?"), []
    for prompts in ([drawn], [written], [drawn, written]):
        rollouts = rig.stage.generate(PromptBatch.of(prompts), settings)
        generated = dict(calls)
        rig.score(inputs_of(rig.checkpoint, rollouts), settings.scoring)
        counts.append((generated, calls.copy()))
        calls.clear()
    for hook in hooks:
        hook.remove()
    assert counts[0] == counts[1] == counts[2] and len(counts[0][0]) == len(hooks)


def test_an_exported_model_writes_and_draws_in_transformers(rig, tmp_path):
    model = rig.actor.model
    perturb(model.model.generation_head, 5, 0.05)
    export_hf(model, rig.checkpoint.processor, tmp_path, {k: v.clone() for k, v in model.state_dict().items()})
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path)
    (rollout,) = decided(lambda seed: drawn_rollouts(rig, GREEDY), seeds=1)[:1]
    ids = torch.tensor([rollout.prompt.token_ids])
    drawn = stock.generate(ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False)
    assert (drawn[0] + rig.checkpoint.config.get_text_config().vocab_size).tolist() == rollout.token_ids
    assert stock.generate(ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), max_new_tokens=3).shape[1] > 0


def test_adapters_leave_the_heads_that_score_and_large_guidance_does_not_part_engine_and_trainer(rig):
    model = ModelConfig(lora_rank=4)
    lora = hf_rig(rig.checkpoint, wrap=lambda transformer: add_lora(transformer, model))
    adapted = {name.rpartition(".lora_")[0] for name, _ in lora.actor.named_parameters() if "lora_" in name}
    assert any("generation_aligner" in name for name in adapted)
    assert not any(name.endswith(("vision_head", "lm_head")) for name in adapted)
    perturb(lora.actor.model, 7, 0.05)
    sharp = SamplingSettings(n=4, max_new_tokens=6, guidance_scale=5.0)
    assert lora.difference(mixed(lora), sharp) <= CLOSE


def test_rows_ask_for_an_image_and_bring_their_caption(rig):
    def row(**columns):
        return parse_row(columns, DataConfig(), source="rows:0", root=None)

    rows = [row(prompt="a red circle", draw=True), row(prompt="how many?", draw=False, extra=1)]
    batch = prompt_batch(rows, rig.checkpoint, DataConfig(), torch.arange(2))
    assert batch.prompts[0] == turn("a red circle") + BEGIN and batch.captions == ["a red circle", None]
    data = MultimodalDataProcessor(rig.checkpoint.tokenizer, rig.checkpoint.processor, 64)
    assert [prompt.caption for prompt in data.features(batch)] == ["a red circle", None]
    assert rows[1].metadata == {"draw": False, "extra": 1}  # for rewards that ask for it
    whole = PromptRow("a red circle" + BEGIN, draw=True)
    told = DataConfig(apply_chat_template=False)
    assert prompt_batch([whole], rig.checkpoint, told, torch.arange(1)).prompts == ["a red circle" + BEGIN]
    with pytest.raises(DataError, match="rows:0: the column that asks for an image .draw_key. holds true or false"):
        row(prompt="a red circle", draw="yes")


def test_the_column_of_drawings_is_read_and_checked_with_the_rows(rig, tmp_path):
    def read(rows, **settings):
        (tmp_path / "rows.csv").write_text(rows)
        config = DataConfig(prompt_data=str(tmp_path / "rows.csv"), **settings)
        checks = RowChecks(model_input=rig.checkpoint.processor, prompt_max_len=64, media=Janus)
        dataset = PromptDataset.for_training(config, checks)
        dataset.check_draw_column()
        return dataset

    table = "prompt,draw\na red circle,true\nhow many?,FALSE\nwhy?,\n"
    assert [row.draw for row in read(table)] == [True, False, False]
    with pytest.raises(ConfigError, match="draw_key: no row of .* is true in 'drwa'; did you mean 'draw'?"):
        read(table, draw_key="drwa")
    with pytest.raises(ConfigError, match=r"is true in 'wants' \(known: draw\)"):  # not by its own name
        read("prompt,draw,wants\nwhy?,false,false\n", draw_key="wants")


def test_what_cannot_be_drawn_is_refused(rig, root):
    data = MultimodalDataProcessor(rig.checkpoint.tokenizer, rig.checkpoint.processor, 256)
    edit = PromptBatch.of(["<image_placeholder> bluer" + BEGIN], [[picture(0)]])
    with pytest.raises(DataError, match="prompt 0: the prompt asks for an image and brings 1") as refused:
        data.features(edit)
    assert refused.value.cause == "drawing"
    writer = checkpoint_of(root, "qwen2_5_vl")
    asked = PromptRow([{"role": "user", "content": [{"type": "text", "text": "a"}]}], source="rows:1", draw=True)
    with pytest.raises(DataError, match="rows:1: the row asks for an image, but this model writes text only"):
        prompt_batch([asked], writer, DataConfig(), torch.arange(1))
    with pytest.raises(ConfigError, match="vLLM has no model of type janus: use --engine_type hf"):
        check_engine(RunConfig(), rig.checkpoint)


@pytest.mark.slow
def test_the_command_samples_images_of_a_prompt_that_asks_for_them(tmp_path):
    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    build_tiny_checkpoint(tmp_path / "janus", "janus")
    script = tmp_path / "ask.py"
    script.write_text("from lightrft_visual.cli import cli\ncli()\n")
    own = ("--engine_type", "hf", "--out", tmp_path / "out")
    run_alone(script, "sample", tmp_path / "janus", "--prompt", "a red circle", "--draw", "-n", "2", *own, limit=300)
    assert [Image.open(tmp_path / "out" / f"000_0{index}.png").mode for index in range(2)] == ["RGB", "RGB"]
