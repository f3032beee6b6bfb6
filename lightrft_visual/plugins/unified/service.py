"""What the embedded tasks and models ask this plug-in for: the model that also draws, and its task."""

from __future__ import annotations

import logging

from ...config.vl import ModelConfig, RunConfig
from .task import unified_task
from .tiny_janus import UnifiedWarmUp, embedded_janus

FAMILY = "janus"  # of `embedded_family`
logger = logging.getLogger(__name__)


def checkpoint(model: ModelConfig) -> str:
    """The folder of the embedded Janus, built at its first use."""
    return str(embedded_janus(UnifiedWarmUp(), report=logger.info))


def place(config: RunConfig) -> None:
    """Put the files of questions and captions in the place of their name; held-out ones where no others are named."""
    task, split = unified_task(), config.data.eval_split
    held_out = task.held_out(split)
    config.data.prompt_data = task.train(split)
    config.data.eval_data = config.data.eval_data or str(held_out)
