"""What the name `embedded` stands for: folders of tiny models, built at their first use."""

from pathlib import Path
from typing import Any

from ...config import registry
from ...config.diffusion import DiffusionRunConfig
from ...config.vl import EMBEDDED, ModelConfig, RunConfig
from ...errors import ConfigError
from ...runtime.files import cache_folder

# By name, as transformers loads in seconds: of `models.tiny.vlm.TINY_FAMILIES`, those that see and those that draw.
VISION_FAMILIES, DRAWING_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"), ("janus",)


def place_questions(config: RunConfig) -> None:
    """Put the files of the questions in the place of their name; held-out ones where no others are named."""
    name, split = config.data.prompt_data, config.data.eval_split
    family = config.model.embedded_family if config.model.pretrain == EMBEDDED else None
    if name != EMBEDDED and family not in (None, *VISION_FAMILIES):
        raise ConfigError(f"prompt_data {name} is for models that see and answer in text, not for {family}")
    if family in DRAWING_FAMILIES:
        registry.services.load("unified").place(config)
        return
    from .questions import text_questions
    from .warmup import embedded_task

    task = embedded_task(name=name)
    train, held_out = task.train, task.held_out(split)
    if family not in (None, *VISION_FAMILIES):
        train, held_out = text_questions(train), text_questions(held_out)
    config.data.prompt_data = str(train)
    if config.data.eval_data is None:
        config.data.eval_data = str(held_out)


def place_captions(config: DiffusionRunConfig) -> None:
    """Put the files of the captions, or of pairs of drawings, in the place of their name."""
    from .captions import embedded_pairs, embedded_prompts

    split = "test" if config.data.eval_data else config.data.eval_split  # of a file of one's own it says its part
    train, kept = embedded_prompts(cache_folder(), split)
    config.data.prompt_data = str(embedded_pairs(cache_folder(), split) if config.offline else train)
    config.data.eval_data = config.data.eval_data or str(kept)


def resolve_checkpoint(model: ModelConfig, name: str, task: str) -> str:
    """The folder of the embedded vision-language model that was warmed up for a task.

    Args:
        model: a run's model section, for the family.
        name: by which the model was asked for; not read.
        task: prompt_data of the run; for data of one's own that of the questions.
    """
    if model.embedded_family in DRAWING_FAMILIES:
        return registry.services.load("unified").checkpoint(model)
    from .warmup import embedded_checkpoint, warm_up_of

    settings = warm_up_of(task, family=model.embedded_family)
    return str(embedded_checkpoint(settings))


def checkpoint_shape(model: ModelConfig, task: str) -> Any:
    """The transformers configuration of `resolve_checkpoint`, without building it."""
    from ...models.tiny.vlm import build_tokenizer, tiny_config
    from .warmup import source_of

    source = source_of(task)
    tokenizer = build_tokenizer(
        source.vocabulary_texts(), family=model.embedded_family, tools=source.environment is not None
    )
    return tiny_config(model.embedded_family, tokenizer, tie_embeddings=False)


def resolve_pipeline(name: str, family: str = "auto") -> Path:
    """The folder of the embedded diffusion pipeline of a family; auto is the tiny SD3. Raises ConfigError where there
    is none."""
    from .warmup_drawing import EmbeddedSD3Settings, EmbeddedSD15Settings, embedded_pipeline

    known = {"auto": EmbeddedSD3Settings, "sd3": EmbeddedSD3Settings, "sd15": EmbeddedSD15Settings}
    if family not in known:
        raise ConfigError(f"no embedded model of family {family}; there is: {', '.join(known)}")
    return embedded_pipeline(known[family]())


def pipeline_shape(name: str, family: str) -> tuple[Any, int]:
    """The pipeline of `resolve_pipeline` with freshly drawn weights, and the tokens of its prompts."""
    from ...models.tiny.diffusion import (
        TEXT_LENGTH,
        TinyDiffusionSettings,
        TinySD15Settings,
        build_pipeline,
        build_sd15_pipeline,
    )

    small = family == "sd15"
    return build_sd15_pipeline(TinySD15Settings()) if small else build_pipeline(TinyDiffusionSettings()), TEXT_LENGTH
