"""What the name `embedded` stands for: folders of tiny models, built at their first use."""

from __future__ import annotations

import logging
from pathlib import Path

from ...config.diffusion import DiffusionRunConfig
from ...config.vl import EMBEDDED, ModelConfig, RunConfig
from ...errors import ConfigError
from ...runtime.paths import cache_root

logger = logging.getLogger(__name__)


def place_questions(config: RunConfig) -> None:
    """Put the files of the questions in the place of their name; held-out ones where no others are named."""
    from .questions import text_questions
    from .tiny_vlm import VISION_FAMILIES
    from .unified import unified_task
    from .warmup import embedded_task

    name, split = config.data.prompt_data, config.data.eval_split
    family = config.model.embedded_family if config.model.pretrain == EMBEDDED else None
    if name != EMBEDDED and family not in (None, *VISION_FAMILIES):
        raise ConfigError(f"prompt_data {name} is for models that see and answer in text, not for {family}")
    task = unified_task() if family == "janus" else embedded_task(name=name)
    train = task.train(split) if family == "janus" else task.train
    held_out = task.held_out(split)
    if family not in (None, "janus", *VISION_FAMILIES):
        train, held_out = text_questions(train), text_questions(held_out)
    config.data.prompt_data = str(train)
    if config.data.eval_data is None:
        config.data.eval_data = str(held_out)


def place_captions(config: DiffusionRunConfig) -> None:
    """Put the files of the captions, or of pairs of drawings, in the place of their name."""
    from .captions import embedded_prompts
    from .pairs import embedded_pairs

    split = "test" if config.data.eval_data else config.data.eval_split  # of a file of one's own it says its part
    train, kept = embedded_prompts(cache_root(), split)
    config.data.prompt_data = str(embedded_pairs(cache_root(), split) if config.offline else train)
    config.data.eval_data = config.data.eval_data or str(kept)


def resolve_checkpoint(model: ModelConfig, name: str, task: str = EMBEDDED) -> str:
    """`name`, or the folder of the embedded vision-language model that was warmed up for an embedded task."""
    if name != EMBEDDED:
        return name
    from .tiny_janus import UnifiedWarmUp, embedded_janus
    from .warmup import embedded_checkpoint, warm_up_of

    if model.embedded_family == "janus":
        return str(embedded_janus(UnifiedWarmUp(), report=logger.info))
    settings = warm_up_of(task, family=model.embedded_family)
    return str(embedded_checkpoint(settings, report=logger.info))


def resolve_pipeline(path: str, family: str = "auto") -> str:
    """`path`, or the folder of the embedded diffusion pipeline of a family; auto is the tiny SD3."""
    return str(embedded_folder(family)) if path == EMBEDDED else path


def embedded_folder(family: str = "auto") -> Path:
    """The embedded pipeline of a family. Raises ConfigError where there is none."""
    from .tiny_sd3 import embedded_diffusion_folder
    from .tiny_sd15 import embedded_sd15_folder

    folders = {"auto": embedded_diffusion_folder, "sd3": embedded_diffusion_folder, "sd15": embedded_sd15_folder}
    if family not in folders:
        raise ConfigError(f"no embedded model of family {family}; there is: {', '.join(folders)}")
    return folders[family]()
