"""Placement split: rollouts in workers of their own, on Ray. What the core asks this plug-in for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.diffusion import DiffusionRunConfig
from .rollout.engine import RemoteEngine
from .rollout.engine import check_remote as check
from .rollout.episodes import RemoteEpisodes

if TYPE_CHECKING:
    from ...trainer.diffusion.maker import DiffusersEngine
    from .drawing import RemoteDrawing

__all__ = ["check", "check_drawing", "drawing", "engine", "episodes"]

engine = RemoteEngine.from_config


def episodes() -> type[RemoteEpisodes]:
    """What takes the place of `EpisodeStage`."""
    return RemoteEpisodes


def check_drawing(config: DiffusionRunConfig) -> None:
    """See `drawing.check_remote`."""
    from .drawing import check_remote  # with diffusers

    check_remote(config)


def drawing(config: DiffusionRunConfig, local: DiffusersEngine, path: str) -> RemoteDrawing:
    """The engine of a run with placement split. Args: as of `drawing.remote_drawing`."""
    from .drawing import remote_drawing

    return remote_drawing(config, local, path)
