"""Settings of episodes of several turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .constraints import PositiveFloat, PositiveInt, Section, one_of, require, within


@dataclass
class EpisodeConfig(Section):
    """What answers the model, and how long an episode may go on; see docs/multi_turn.md. Lengths are in tokens."""

    environment: str | None = None  # what answers the model: a name, or path.py:Class
    tools: str | None = None  # functions that the model may call: path.py:name, several comma-separated
    max_turns: PositiveInt = 8  # responses of an episode
    # behind the prompt, sampled and observed ones; default: max_turns * generate_max_len
    max_episode_tokens: PositiveInt | None = None
    env_timeout: PositiveFloat = 60.0  # seconds of one reset or step
    # mask: the sample teaches nothing; end: the episode ends with what it has; stop: the run ends
    on_environment_error: Annotated[str, one_of("mask", "end", "stop")] = "mask"
    turn_gamma: Annotated[float, within("[0, 1]")] = 1.0  # discount of a reward by each turn before it
    observation_max_tokens: PositiveInt | None = None  # longer text is cut in the middle; default: no limit of its own

    @property
    def used(self) -> bool:
        """Whether the run has episodes."""
        return self.environment is not None or self.tools is not None

    def check(self) -> None:
        """Settings of episodes without any."""
        others = [name for name, value in vars(self).items() if value != getattr(EpisodeConfig, name)]
        require(self.used or not others, f"{', '.join(others)}: of episodes; name an --environment or --tools")
