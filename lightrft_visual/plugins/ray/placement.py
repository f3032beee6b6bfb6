"""Placement split: rollouts in workers of their own, on Ray. What the core asks this plug-in for; of diffusion runs
`drawing` is."""

from .rollout.engine import RemoteEngine
from .rollout.engine import check_remote as check
from .rollout.episodes import RemoteEpisodes

__all__ = ["RemoteEpisodes", "check", "engine"]

engine = RemoteEngine.from_config
