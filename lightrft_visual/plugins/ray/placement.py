"""Placement split: rollouts in workers of their own, on Ray. What the core asks this plug-in for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.diffusion import DiffusionRunConfig
from ...config.vl import RunConfig

if TYPE_CHECKING:
    from ...models.loading import Checkpoint
    from ...trainer.diffusion.maker import DiffusersEngine
    from .drawing import RemoteDrawing
    from .rollout.engine import RemoteEngine
    from .rollout.episodes import RemoteEpisodes


def check(config: RunConfig) -> None:
    """See `rollout.engine.check_remote`."""
    from .rollout.engine import check_remote

    check_remote(config)


def engine(config: RunConfig, checkpoint: Checkpoint) -> RemoteEngine:
    """See `RemoteEngine.from_config`."""
    from .rollout.engine import RemoteEngine

    return RemoteEngine.from_config(config, checkpoint)


def episodes() -> type[RemoteEpisodes]:
    """See `RemoteEpisodes`."""
    from .rollout.episodes import RemoteEpisodes

    return RemoteEpisodes


def check_drawing(config: DiffusionRunConfig) -> None:
    """See `drawing.check_remote`."""
    from .drawing import check_remote

    check_remote(config)


def drawing(config: DiffusionRunConfig, local: DiffusersEngine, path: str) -> RemoteDrawing:
    """See `drawing.remote_drawing`."""
    from .drawing import remote_drawing

    return remote_drawing(config, local, path)
