"""DGPO, Direct Group Preference Optimization (arXiv 2510.08425): a group's better samples against its worse ones.

The loss of `preference.py` on whole prompt groups, A the group's advantages: positive ones make the preferred side, and
as they sum to 0 the partition function cancels. No policy gradient, so rollouts are plain ODE samples.
"""

from .preference import GroupPreference


def group_preference(
    beta: float, group_size: int, reference: str = "base", kl_beta: float = 0.0, guidance_scale: float = 1.0
) -> GroupPreference:
    """DGPO's loss.

    Args:
        beta: as of `GroupPreference`. The loss is divided by it, as its authors scale it: it sharpens the sigmoid only,
            and kl_beta keeps its published values.
        group_size: samples of a prompt.
        reference: as of `GroupPreference`, as what follows.
        kl_beta: weight of the KL.
        guidance_scale: of the training forward.
    """
    return GroupPreference(beta, group_size, 1 / beta, reference, kl_beta, guidance_scale)
