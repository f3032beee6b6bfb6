"""Settings of episodes of several turns."""

from dataclasses import dataclass
from typing import Annotated, Any

from ..given import PREFIX
from . import registry
from .constraints import PositiveFloat, PositiveInt, Section, not_usual, one_of, require, within

AtLimit = Annotated[str, one_of("truncate", "end", "invalid")]


@dataclass
class EpisodeConfig(Section):
    """What answers the model, and how long an episode may go on; see docs/multi_turn.md. Lengths are in tokens."""

    environment: str | None = None  # what answers the model: a name, or path.py:Class
    tools: str | None = None  # functions that the model may call: path.py:name, several comma-separated
    max_turns: PositiveInt = 8  # responses of an episode
    # behind the prompt, sampled and observed ones; default: max_turns * generate_max_len
    max_episode_tokens: PositiveInt | None = None
    env_timeout: PositiveFloat = 60.0  # seconds of one reset or step
    max_environments: PositiveInt = 128  # that a rank or worker keeps at once, each in a process; more wait for room
    # mask: the sample teaches nothing; end: the episode ends with what it has; stop: the run ends
    on_environment_error: Annotated[str, one_of("mask", "end", "stop")] = "mask"
    # an episode that reaches max_turns: truncate: it is cut off; end: it is finished; invalid: it teaches nothing
    on_turn_limit: AtLimit = "truncate"
    on_token_limit: AtLimit = "truncate"  # likewise one with an answer of generate_max_len, or max_episode_tokens
    turn_gamma: Annotated[float, within("(0, 1]")] = 1.0  # discount of a reward by each turn before it
    observation_max_tokens: PositiveInt | None = None  # longer text is cut in the middle; default: no limit of its own

    @property
    def used(self) -> bool:
        """Whether the run has episodes."""
        return self.environment is not None or self.tools is not None

    def most_tokens(self, response: int) -> int:
        """Of everything behind a prompt. response: most tokens of one."""
        if not self.used:
            return response
        return self.max_turns * response if self.max_episode_tokens is None else self.max_episode_tokens

    def check_run(self, config: Any) -> None:
        """Raise ConfigError where a run's other settings cannot be part of episodes."""
        if not self.used:
            return
        rollout = config.rollout
        for name, used in (
            ("partial_rollouts", config.asynchronous.partial_rollouts),
            ("noisy_rollout_share", rollout.noisy_rollout_share > 0),
            ("balance_rollouts", rollout.balance_rollouts),
            ("use_fire", rollout.use_fire),
            ("min_new_tokens above 1", rollout.min_new_tokens > 1),
            ("engine sglang", rollout.engine_type == "sglang"),
            ("apply_chat_template false", not config.data.apply_chat_template),
        ):
            require(not used, f"{name} cannot be part of episodes with an environment or tools; leave one of them out")
        require(
            not (config.distributed.split and PREFIX in f"{self.environment},{self.tools}"),
            "placement split: workers cannot load an environment or tools that Python gives; name them as path.py:NAME",
        )

    def check(self) -> None:
        """Settings of episodes without any."""
        self.environment, self.tools = self.environment or None, self.tools or None
        if self.environment is not None and ":" not in self.environment:
            registry.environments[self.environment]  # raises ConfigError with the nearest name
        others = not_usual(self)
        require(self.used or not others, f"{', '.join(others)}: of episodes; name an --environment or --tools")
