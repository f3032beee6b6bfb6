"""What the name `embedded` stands for: folders of tiny models, built at their first use."""

from __future__ import annotations

import logging
from pathlib import Path

from ..config.vl import EMBEDDED, ModelConfig
from ..errors import ConfigError

logger = logging.getLogger(__name__)


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
