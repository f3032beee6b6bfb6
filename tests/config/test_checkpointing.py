"""What gradient_checkpointing may be: words, and what a bool was before."""

import pytest

from lightrft_visual.config.diffusion import DiffusionModelConfig, DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import ModelConfig, RunConfig
from lightrft_visual.errors import ConfigError

RUNS = [(RunConfig, None), (DiffusionRunConfig, DIFFUSION_PRESET), (SFTRunConfig, None)]


def chosen(*argv: str, schema=RunConfig, preset=None, **settings) -> str:
    config = load_config(schema, list(argv), preset=preset, settings=settings)
    return config.model.gradient_checkpointing


FORMS = {
    "": "auto",
    "--gradient_checkpointing --bf16": "full",
    "--gradient_checkpointing true": "full",
    "--model.gradient_checkpointing=1": "full",
    "gradient_checkpointing=False": "none",
    "--gradient_checkpointing attention --no_gradient_checkpointing": "none",
    "--gradient-checkpointing=attention": "attention",
}


@pytest.mark.parametrize("schema,preset", RUNS)
def test_forms_of_the_command_line(schema, preset):
    assert {argv: chosen(*argv.split(), schema=schema, preset=preset) for argv in FORMS} == FORMS
    with pytest.raises(ConfigError, match="'atention'; did you mean 'attention'. it must be one of: none, att"):
        chosen("--gradient_checkpointing", "atention", schema=schema, preset=preset)


@pytest.mark.parametrize("written,word", [("true", "full"), ("attention", "attention")])
def test_forms_of_a_recipe(tmp_path, written, word):
    (tmp_path / "mine.yaml").write_text(f"model:\n  gradient_checkpointing: {written}\n")
    assert chosen("--config", str(tmp_path / "mine.yaml")) == word


def test_bools_from_python():
    assert [chosen(gradient_checkpointing=value) for value in (True, False, "auto")] == ["full", "none", "auto"]
    assert ModelConfig(gradient_checkpointing=True).gradient_checkpointing == "full"


def test_eager_attention_is_several_operations_and_cannot_be_kept():
    with pytest.raises(ConfigError, match="attention keeps one operation's result, and eager"):
        chosen("--gradient_checkpointing", "attention", "--attn_implementation", "eager")
    assert chosen("--gradient_checkpointing", "--attn_implementation", "eager") == "full"


def test_offloaded_activations_are_those_of_whole_blocks():
    assert DiffusionModelConfig(use_gradient_checkpointing_offload=True).gradient_checkpointing == "full"
    with pytest.raises(ConfigError, match="takes gradient_checkpointing full, not attention: leave one"):
        DiffusionModelConfig(use_gradient_checkpointing_offload=True, gradient_checkpointing="attention")
