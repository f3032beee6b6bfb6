"""DGPO, Direct Group Preference Optimization (arXiv 2510.08425): a group's better samples against its worse ones.

The loss of `preference.py` on whole prompt groups, A the group's advantages: positive ones make the preferred side, and
as they sum to 0 the partition function cancels. No policy gradient, so rollouts are plain ODE samples.
"""

from .preference import GroupPreference


def group_preference(
    beta: float, group_size: int, reference: str = "base", kl_beta: float = 0.0, guidance_scale: float = 1.0
) -> GroupPreference:
    """DGPO's loss. It is divided by beta, as its authors scale it: beta sharpens the sigmoid only, and kl_beta keeps
    its published values. Arguments as of `GroupPreference`."""
    return GroupPreference(beta, group_size, 1 / beta, reference, kl_beta, guidance_scale)
