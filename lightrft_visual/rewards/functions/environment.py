"""What an environment gave in the turns of an episode."""


class EnvironmentReward:
    """The sum over the turns, each discounted by `turn_gamma`; 0 for a sample without an environment."""

    def __call__(self, environment_rewards: list[float]) -> list[float]:
        return list(environment_rewards)
