"""A config.json far beyond the weights beside it is refused before anything is allocated."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny_models import checkpoint_of
from transformers import AutoConfig, AutoModelForImageTextToText
from watched import Operations

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.models.weight_files import check_size, weight_files


@pytest.fixture
def folder(root, tmp_path):
    return shutil.copytree(checkpoint_of(root, "qwen2_5_vl").path, tmp_path / "model")


def rewritten(folder, **text_settings):
    read = json.loads((folder / "config.json").read_text())
    read["text_config"] |= text_settings
    (folder / "config.json").write_text(json.dumps(read))


def test_open_checkpoint_config_far_wider_than_weights_refused_before_it_is_allocated(folder):
    rewritten(folder, vocab_size=10**7)
    with Operations() as seen, pytest.raises(ConfigError, match=r"describes [\d,]+ parameters, the files hold [\d,]+"):
        open_checkpoint(str(folder), ModelConfig(), DataConfig())
    assert seen.largest < 10**6


def test_check_size_more_layers_than_weights_refused_by_their_number(folder):
    config = AutoConfig.from_pretrained(folder)
    config.vision_config.depth = 10**6
    with pytest.raises(ConfigError, match="describes 1000000 layers"):
        check_size(folder, config, AutoModelForImageTextToText)


@pytest.mark.parametrize("change", ["none", "no safetensors", "quantized", "own code"])
def test_check_size_model_of_its_size_or_unknown_size_passes(folder, change):
    config = AutoConfig.from_pretrained(folder)
    if change != "none":
        config.text_config.vocab_size = 10**7
    if change == "no safetensors":
        for path in folder.glob("*.safetensors"):
            path.unlink()
    if change == "quantized":
        config.quantization_config = {"quant_method": "fp8"}
    if change == "own code":
        config.auto_map = {"AutoModel": "mine.Model"}
    check_size(folder, config, AutoModelForImageTextToText)


def test_weight_files_of_an_index_name_the_file_of_each_weight(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    assert weight_files(tmp_path) == {"a": tmp_path / "one", "b": tmp_path / "two"}
