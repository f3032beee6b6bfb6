import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from reward_rollouts import make_samples
from safetensors.torch import load_file, save_file
from torchvision.transforms import InterpolationMode, functional

from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards import RewardComputationEngine, build_scorer, recipe_from_components
from lightrft_visual.rewards.functions.jpeg import jpeg_kilobytes
from lightrft_visual.rewards.functions.ocr import OCR, quoted_text


def rendered(text: str) -> Image.Image:
    picture = Image.new("RGB", (640, 120), "white")
    ImageDraw.Draw(picture).text((30, 30), text, fill="black", font=ImageFont.load_default(48))
    return picture


def score(name, settings, prompts, images=None, videos=None, **columns):
    recipe = recipe_from_components({name: 1.0}, {name: settings})
    engine = RewardComputationEngine(reward_recipe=recipe)
    engine.config.reward_max_invalid = 1.0
    return engine.score_media(prompts, images, videos, **columns)


@pytest.mark.parametrize("settings", [{}, {"reader": "tesseract", "mode": 7}], ids=["rapidocr", "tesseract"])
def test_ocr_on_rendered_text(settings):
    pictures = [rendered("STRAWBERRY"), rendered("STRAWBERRX"), Image.new("RGB", (640, 120), "white")]
    result = score("ocr", settings, ['a sign that says "STRAWBERRY"'] * 3, pictures)
    assert result.score.tolist() == pytest.approx([1.0, 0.9, 0.0])


def test_ocr_prefers_the_reference_and_needs_a_text():
    result = score(
        "ocr", {"mode": 7}, ['says "other"', "no quotes"], [rendered("HELLO")] * 2, references=["hello", None]
    )
    assert result.score[0] == 1 and result.valid.tolist() == [True, False]
    result = score(
        "ocr", {"mode": 7}, ["a sign"] * 2, [rendered("HELLO")] * 2, references=[["bye", "HELLO"], ["", None]]
    )
    assert result.score[0] == 1 and result.valid.tolist() == [True, False]  # the best of several


def test_ocr_rule_by_hand():
    reader = OCR("tesseract")
    assert reader.similarity("say HELLO now", "Hello") == 1.0
    assert OCR("tesseract", extra_text=False).similarity("helloxx", "hello") == pytest.approx(0.6)
    assert reader.similarity("completely different and much longer", "hi") == 0.0
    assert quoted_text('a "B c" and “D”') == "B c D" and quoted_text("it's") is None
    assert quoted_text('no "" but "this"') == "this" and quoted_text('"" and " "') is None


def test_settings_of_tesseract_choose_it_and_what_does_not_fit_or_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setattr("lightrft_visual.rewards.functions.ocr.RapidReader", lambda threads: "rapidocr")
    assert type(OCR(mode=7).reader).__name__ == "TesseractReader" and OCR().reader == "rapidocr"
    for settings, words in (
        ({"reader": "rapidocr", "mode": 7}, "mode belong to reader tesseract"),
        ({"reader": "easyocr"}, "must be rapidocr or tesseract"),
    ):
        with pytest.raises(ConfigError, match=words):
            OCR(**settings)
    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    for reader, words in (("tesseract", "tesseract"), (None, r"rapidocr.*diffusion-rewards")):
        with pytest.raises(ConfigError, match=words):
            OCR(reader)


def test_ocr_time_limit_is_a_failure(monkeypatch):
    def slow(*arguments, **options):
        raise RuntimeError("Tesseract process timeout")

    monkeypatch.setattr("pytesseract.image_to_string", slow)
    result = score("ocr", {"seconds": 0.5}, ['"A"'], [rendered("A")])
    assert not result.valid.any() and result.metrics["reward/ocr/failures"] == 1


def test_jpeg_both_signs():
    flat, noise = Image.new("RGB", (64, 64), "gray"), Image.effect_noise((64, 64), 90).convert("RGB")
    compress = score("jpeg_compressibility", {}, ["", ""], [flat, noise]).score
    swell = score("jpeg_incompressibility", {"divide_by": 2.0}, ["", ""], [flat, noise]).score
    assert compress[0] > compress[1] and torch.allclose(swell * 2, -compress)
    assert -compress[1].item() == pytest.approx(jpeg_kilobytes(noise, 95))
    video = torch.cat([torch.zeros(3, 1, 4, 4), torch.rand(3, 1, 4, 4)], dim=1)
    frames = [score("jpeg_compressibility", {}, [""], [video[:, index]]).score.item() for index in (0, 1)]
    assert score("jpeg_compressibility", {}, [""], videos=[video]).score.item() == pytest.approx(sum(frames) / 2)


PICTURES = [Image.effect_noise((40, 40), 80).convert("RGB"), Image.new("RGB", (30, 50), "blue"), rendered("x")]
PROMPTS = ["a cat", "a dog", "a bird on a tree"]


def cosines(folder, pictures=PICTURES):
    """The plain reference: one picture and text at a time."""
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    values = []
    for picture, prompt in zip(pictures, PROMPTS):
        inputs = processor(text=[prompt], images=[picture], return_tensors="pt", truncation=True, max_length=16)
        with torch.no_grad():
            out = model(**inputs)
        values.append((out.image_embeds * out.text_embeds).sum().item())
    return torch.tensor(values), float(model.logit_scale.detach().exp())


def test_scorer_of_a_model_that_lacks_weights_is_refused_with_their_names(clip_folder, tmp_path):
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for scorer in ("clip_score", "pick_score", "hpsv2"):
        with pytest.raises(ConfigError, match=f"scorer {scorer}: model .* lacks 1 weight.s.: text_projection.weight"):
            build_scorer(scorer, {"model": str(tmp_path)})


def test_clip_score(clip_folder):
    wanted, _ = cosines(clip_folder)
    result = score("clip_score", {"model": clip_folder, "batch_size": 2}, PROMPTS, PICTURES)
    assert torch.allclose(result.score, 2.5 * wanted.clamp(min=0), atol=1e-5)


def test_pick_score_and_hpsv2(clip_folder):
    wanted, scale = cosines(clip_folder)
    pick = score("pick_score", {"model": clip_folder, "processor": None}, PROMPTS, PICTURES).score
    assert torch.allclose(pick, wanted * scale / 26, atol=1e-5)
    squares = [in_square(picture, 32) for picture in PICTURES]
    wanted, _ = cosines(clip_folder, squares)
    assert torch.allclose(score("hpsv2", {"model": clip_folder}, PROMPTS, PICTURES).score, wanted, atol=1e-5)


def as_open_clip(folder):
    """The weights of a folder under open_clip's names."""
    names = {"vision_model.": "visual.", "text_model.": "", "encoder.layers.": "transformer.resblocks.",
             "embeddings.class_embedding": "class_embedding", "embeddings.patch_embedding": "conv1",
             "embeddings.position_embedding.weight": "positional_embedding", "embeddings.token": "token",
             "pre_layrnorm": "ln_pre", "post_layernorm": "ln_post", "final_layer_norm": "ln_final",
             "layer_norm": "ln_", "self_attn": "attn", "fc1": "c_fc", "fc2": "c_proj",
             "visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}  # fmt: skip
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for own, theirs in names.items():
            name = name.replace(own, theirs)
        found[name] = tensor.T if name in ("visual.proj", "text_projection") else tensor
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        found[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    return found


def test_hpsv2_of_the_published_file_scores_as_of_its_folder(clip_folder, tmp_path):
    state, file = as_open_clip(Path(clip_folder)), tmp_path / "HPS.pt"
    torch.save({"state_dict": state}, file)
    wanted = score("hpsv2", {"model": clip_folder}, PROMPTS, PICTURES).score
    settings = {"model": str(file), "processor": clip_folder}
    assert torch.equal(score("hpsv2", settings, PROMPTS, PICTURES).score, wanted)
    del state["visual.transformer.resblocks.1.attn.in_proj_bias"]
    torch.save({"state_dict": state}, file)
    with pytest.raises(ConfigError, match=r"scorer hpsv2: the published weights lack 3, .*vision.*\.1\."):
        build_scorer("hpsv2", settings)


def in_square(picture, size):
    """hpsv2's own preparation: the longer side is `size`, and the rest is black."""
    shape = [round(side * size / max(picture.size)) for side in reversed(picture.size)]
    down, right = (size - side for side in shape)
    shown = functional.resize(picture, shape, InterpolationMode.BICUBIC)
    return functional.pad(shown, [right // 2, down // 2, right - right // 2, down - down // 2])


def test_aesthetic(clip_folder, tmp_path):
    head = {"layers.0.weight": torch.ones(2, 24), "layers.0.bias": torch.zeros(2)}
    head |= {"layers.2.weight": torch.tensor([[1.0, 2.0]]), "layers.2.bias": torch.tensor([0.5])}
    save_file(head, tmp_path / "head.safetensors")
    torch.save(head, tmp_path / "head.pth")
    scores = [
        score("aesthetic", {"model": clip_folder, "head": str(tmp_path / name)}, PROMPTS, PICTURES).score
        for name in ("head.safetensors", "head.pth")
    ]
    from lightrft_visual.rewards.functions.clip import CLIPPairs

    image, _ = CLIPPairs(clip_folder, None, "x", 4, True).embed(PICTURES, PROMPTS, "cpu")
    assert torch.allclose(scores[0], 3 * image.sum(dim=-1) + 0.5, atol=1e-4) and torch.equal(*scores)


def test_image_reward(tmp_path):
    from transformers import BertTokenizerFast, BlipConfig, BlipForImageTextRetrieval, BlipImageProcessor, BlipProcessor

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "bird", "on", "tree"]
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "encoder_hidden_size": 32, "pad_token_id": 0, "bos_token_id": 2, **size}
    torch.manual_seed(0)
    config = BlipConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 16, **size})
    BlipForImageTextRetrieval(config).save_pretrained(tmp_path)
    BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(tmp_path)
    head = {"mlp.layers.0.weight": torch.randn(1, 32), "mlp.layers.0.bias": torch.zeros(1)}
    save_file(head, tmp_path / "head.safetensors")
    settings = {"model": str(tmp_path), "head": str(tmp_path / "head.safetensors"), "max_words": 8}
    together = score("image_reward", settings, PROMPTS, PICTURES).score
    single = [score("image_reward", settings, [p], [i]).score for p, i in zip(PROMPTS, PICTURES)]
    assert torch.allclose(together, torch.cat(single), atol=1e-5) and together.unique().numel() == 3
    plain = score("image_reward", {**settings, "mean": 0.0, "std": 1.0}, PROMPTS, PICTURES).score
    assert torch.allclose(together, (plain - 0.16717362830052426) / 1.0333394966054072, atol=1e-7)
    middles = [functional.center_crop(functional.resize(p, 32, InterpolationMode.BICUBIC), 32) for p in PICTURES]
    assert torch.allclose(score("image_reward", settings, PROMPTS, middles).score, together, atol=1e-6)
    published = tmp_path / "ImageReward.pt"
    torch.save(head | as_published(tmp_path), published)
    config.vision_config.image_size = 64  # BLIP's own
    (tmp_path / "model.safetensors").unlink()
    config.save_pretrained(tmp_path)
    found = score("image_reward", {**settings, "head": str(published)}, PROMPTS, PICTURES).score
    assert torch.allclose(found, together, atol=1e-4)  # its eps is another


def as_published(folder):
    """The weights of a BLIP under the names of ImageReward's file, which has no heads for retrieval."""
    names = {"text_encoder.": "blip.text_encoder.", "vision_model.": "blip.visual_encoder.",
             "encoder.layers.": "blocks.", "post_layernorm": "norm", "embeddings.class_embedding": "cls_token",
             "embeddings.position_embedding": "pos_embed", "embeddings.patch_embedding": "patch_embed.proj",
             "layer_norm": "norm", "self_attn.projection": "attn.proj", "self_attn": "attn"}  # fmt: skip
    found = {"blip.text_encoder.embeddings.position_ids": torch.arange(9)[None]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(("text_encoder.", "vision_model.")):
            for own, theirs in names.items():
                if not (name.startswith("blip.text_encoder.") and own != "text_encoder."):
                    name = name.replace(own, theirs)
            found[name] = tensor
    return found


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("clip_score", {"model": "/nowhere/clip"}, "scorer clip_score: /nowhere/clip cannot be loaded"),
        ("aesthetic", {"head": "/nowhere/head.pth"}, "scorer aesthetic: the file /nowhere/head.pth does not exist"),
    ],
)
def test_missing_checkpoints_are_errors(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        build_scorer(name, settings)


def test_multi_scorer_has_names_and_average():
    settings = {"components": {"short": 2.0, "exact": 1.0, "off": 0.0}}
    settings["kwargs"] = {"short": {"scorer": "choice"}, "off": {"scorer": "numeric"}}
    engine = RewardComputationEngine({"multi": build_scorer("multi", settings)})
    result = engine.compute_rewards([make_samples(["B", "C"], references=["B", "B"])])
    assert result.components["short"].tolist() == [1, 0] and result.components["avg"].tolist() == [3, 0]
    assert set(result.components) == {"multi", "short", "exact", "avg"}
