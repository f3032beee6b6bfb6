"""Checkpoints that cannot be loaded say why; freezing and LoRA reach what they name."""

import json
import os
import re
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint_of, load
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText
from watched import Operations

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.loading import add_lora, check_path, freeze, load_transformer, open_checkpoint
from lightrft_visual.models.weight_files import check_size


@pytest.fixture
def copy(root, tmp_path):
    """A checkpoint folder to damage."""
    return shutil.copytree(checkpoint_of(root, "qwen2_5_vl").path, tmp_path / "model")


def test_paths_that_lead_nowhere(tmp_path):
    for path in (str(tmp_path / "none"), "./none", "~/none", "a/b/c"):
        with pytest.raises(ConfigError, match=f"model folder {path} does not exist"):
            check_path(path)
    with pytest.raises(ConfigError, match=f"model folder {tmp_path} has no config.json"):
        check_path(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{tmp_path} holds an adapter of peft: give the model that it is merged"):
            check_path(str(tmp_path))
        (tmp_path / "config.json").write_text("{}")
    check_path("organisation/name")


def test_pixel_limits_reach_the_processor(root):
    path = checkpoint_of(root, "qwen2_5_vl").path
    processor = open_checkpoint(path, ModelConfig(), DataConfig(min_pixels=3136, max_pixels=12544)).processor
    size = processor.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (3136, 12544)


def test_end_tokens_come_from_every_place(copy):
    checkpoint = open_checkpoint(str(copy), ModelConfig(), DataConfig())
    own = checkpoint.tokenizer.eos_token_id
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, 5, 9]}))
    assert checkpoint.eos_ids == sorted({own, 5, 9})
    for wrong in ({"id": 5}, -1, True, 10**9):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, wrong]}))
        with pytest.raises(ConfigError, match=f"eos_token_id {re.escape(str(wrong))} is no token id"):
            _ = checkpoint.eos_ids
    (copy / "generation_config.json").unlink()
    assert checkpoint.eos_ids == [own]


def test_a_checkpoint_without_end_token_is_refused_and_one_without_padding_pads_with_it(copy):
    generation, own = copy / "generation_config.json", copy / "tokenizer_config.json"
    settings = {name: each for name, each in json.loads(own.read_text()).items() if name != "pad_token"}
    own.write_text(json.dumps(settings | {"eos_token": None, "pad_token": None}))
    generation.write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert open_checkpoint(str(copy), ModelConfig(), DataConfig()).tokenizer.pad_token_id == 5
    generation.write_text("{}")
    with pytest.raises(ConfigError, match=f"model {copy} has no end token: set eos_token_id"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())


@pytest.mark.parametrize("kind", ["Qwen2ForRewardModel", "BertForTokenClassification"])
def test_a_model_with_another_head_is_refused_by_name(copy, kind):
    with_config(copy, architectures=[kind])
    with pytest.raises(ConfigError, match=f"model {copy} is a {kind}, which writes no text"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())


def test_a_tokenizer_without_words_is_refused(root, tmp_path):
    folder = shutil.copytree(checkpoint_of(root, "qwen2").path, tmp_path / "model")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(
        ConfigError, match=f"model {folder}: its tokenizer makes no token of a text: copy tokenizer.json"
    ):
        open_checkpoint(str(folder), ModelConfig(), DataConfig())


def test_a_processor_of_another_model_is_refused(copy):
    own = copy / "processor_config.json"
    settings = json.loads(own.read_text())
    own.write_text(json.dumps(settings | {"image_processor": settings["image_processor"] | {"patch_size": 7}}))
    with pytest.raises(ConfigError, match="its processor cuts patches of 7 pixels .*config.json has 14 and 2"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())
    own.write_text(json.dumps(settings))
    with_config(copy, image_token_id=7)
    with pytest.raises(ConfigError, match="its processor writes no token 7 for an image, which config.json names"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())


@pytest.mark.parametrize(
    ("prefixes", "frozen"),
    [("", ()), ("false", ()), ("true", ("visual.",)), ("visual.blocks", ("visual.blocks.",)),
     ("visual, lm_head", ("visual.", "lm_head."))],
)  # fmt: skip
def test_freezing_reaches_what_it_names_and_no_more(root, prefixes, frozen):
    model = load(checkpoint_of(root, "qwen2_5_vl").path, True)
    count = freeze(model, prefixes)
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    wanted = {name for name, _ in model.named_parameters() if any(f".{part}" in f".{name}" for part in frozen)}
    assert still == wanted and count == len(wanted)


def test_freezing_something_that_is_not_there_is_an_error(root):
    model = load(checkpoint_of(root, "qwen2_5_vl").path, True)
    with pytest.raises(ConfigError, match="freeze_prefix vision_towr matches no parameter"):
        freeze(model, "visual,vision_towr")
    with pytest.raises(ConfigError, match="model type qwen2 has no vision tower"):
        freeze(load(checkpoint_of(root, "qwen2").path, False), "true")


def test_adapters_are_added_where_they_are_asked_for(root):
    path = checkpoint_of(root, "qwen2_5_vl").path
    model = load(path, True)
    assert add_lora(model, ModelConfig()) is model
    peft = add_lora(model, ModelConfig(lora_rank=4, target_modules="q_proj,v_proj"))
    assert isinstance(peft, PeftModel)
    trained = [name for name, parameter in peft.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    with pytest.raises(ConfigError, match=r"LoRA cannot be added \(target_modules no_such\)"):
        add_lora(load(path, True), ModelConfig(lora_rank=4, target_modules="no_such"))
    with pytest.raises(ConfigError, match="target_parameters names 'experts.down_proj', and this model has no such"):
        add_lora(load(path, True), ModelConfig(lora_rank=4, target_parameters="experts.down_proj"))


@pytest.mark.parametrize(
    "prefixes, frozen", [("true", ["visual"]), ("visual.merger, language_model.layers.0", ["merger", "layers.0"])]
)
def test_no_adapter_lies_below_a_frozen_prefix(root, prefixes, frozen):
    settings = ModelConfig(lora_rank=4, freeze_prefix=prefixes)
    model = load(checkpoint_of(root, "qwen2_5_vl").path, True)
    freeze(model, settings.freeze_prefix)
    peft = add_lora(model, settings)
    trained = [name for name, parameter in peft.named_parameters() if parameter.requires_grad]
    assert trained and not any(f".{part}." in name for name in trained for part in frozen)
    assert any("language_model.layers.1" in name for name in trained)
    assert any(".visual.blocks" in name for name in trained) == (prefixes != "true")


def with_config(copy, **changes):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))


def with_text(copy, **changes):
    with_config(copy, text_config=json.loads((copy / "config.json").read_text())["text_config"] | changes)


def weights_of(copy):
    (path,) = copy.glob("*.safetensors")
    return path


def pickled_weights(copy):
    weights_of(copy).unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def without_a_weight(copy, columns=0):
    state = load_file(weights_of(copy))
    name = next(name for name in state if "down_proj" in name and "layers.1" in name)
    weight = state.pop(name)
    other = {name: weight[:, :columns].clone()} if columns else {}
    save_file(state | other, weights_of(copy), {"format": "pt"})


def a_pipe(copy):
    (copy / "tokenizer_config.json").unlink(missing_ok=True)
    os.mkfifo(copy / "tokenizer_config.json")


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "kosmos-2", "shieldgemma2"])
def test_a_tokenizer_alone_is_refused_of_a_model_that_reads_images(root, tmp_path, model_type):
    """Of some types transformers says that an image processor is not on its hub, of others it gives the tokenizer."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    checkpoint_of(root, "qwen2_5_vl").tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model {tmp_path} has no processor of images, .*'{model_type}' needs: copy"):
        open_checkpoint(str(tmp_path), ModelConfig(), DataConfig())


DAMAGE = {
    "no json": lambda copy: (copy / "config.json").write_text("{"),
    "a list": lambda copy: (copy / "config.json").write_text("[1]"),
    "tokenizer": lambda copy: (copy / "tokenizer_config.json").write_text("{"),
    "processor": lambda copy: (copy / "processor_config.json").write_text("{"),
    "architecture": lambda copy: with_config(copy, model_type="no_such_model"),
    "strict types": lambda copy: with_config(copy, text_config={"hidden_size": "many"}),
    "no heads": lambda copy: with_text(copy, num_attention_heads=0),
    "no weights": lambda copy: weights_of(copy).unlink(),
    "pickled weights": pickled_weights,
    "cut weights": lambda copy: weights_of(copy).write_bytes(weights_of(copy).read_bytes()[:1000]),
    "a weight less": without_a_weight,
    "a weight of another shape": lambda copy: without_a_weight(copy, 3),
    "a pipe": a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_kind_of_damage_to_a_model_folder_is_an_error_that_names_it(copy, damage):
    DAMAGE[damage](copy)
    with pytest.raises(ConfigError, match=rf"model (folder )?{copy} (cannot be loaded|holds|lacks)"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())
        load_transformer(str(copy), ModelConfig(), torch.float32)


# --- a config.json far beyond the weights beside it ---------------------------------------------------------------


def test_open_checkpoint_config_far_wider_than_weights_refused_before_it_is_allocated(copy):
    with_text(copy, vocab_size=10**7)
    with Operations() as seen, pytest.raises(ConfigError, match=r"describes [\d,]+ parameters, the files hold [\d,]+"):
        open_checkpoint(str(copy), ModelConfig(), DataConfig())
    assert seen.largest < 10**6


def test_check_size_more_layers_than_weights_refused_by_their_number(copy):
    config = AutoConfig.from_pretrained(copy)
    config.vision_config.depth = 10**6
    with pytest.raises(ConfigError, match="describes 1000000 layers"):
        check_size(copy, config, AutoModelForImageTextToText)


@pytest.mark.parametrize("change", ["none", "no safetensors", "quantized", "own code"])
def test_check_size_model_of_its_size_or_unknown_size_passes(copy, change):
    config = AutoConfig.from_pretrained(copy)
    if change != "none":
        config.text_config.vocab_size = 10**7
    if change == "no safetensors":
        for path in copy.glob("*.safetensors"):
            path.unlink()
    if change == "quantized":
        config.quantization_config = {"quant_method": "fp8"}
    if change == "own code":
        config.auto_map = {"AutoModel": "mine.Model"}
    check_size(copy, config, AutoModelForImageTextToText)
