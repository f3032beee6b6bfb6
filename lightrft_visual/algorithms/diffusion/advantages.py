"""Group advantages of diffusion rollouts, by group id, over all ranks."""

import torch

from ...observe.metrics import Moments
from ...runtime.collectives import all_gather_object, rank
from ..advantages import GroupStatistics, decoupled_rewards

T = torch.Tensor
EPS = 1e-4  # added to standard deviations
FILLS = ((0, float("nan")), (1, 0.0))  # a rank whose samples have no such reward: no score, no weight


def group_advantages(rewards: T, group_id: T, valid: T, *, global_std: bool = False, clip: float = 5.0) -> T:
    """(N) advantages (r - mean of its group) / (std + EPS), computed in fp64 and returned as fp32.

    Args:
        rewards: (N) float.
        group_id: (N) long.
        valid: (N) bool; invalid rewards enter no statistic.
        global_std: take the population standard deviation of all valid rewards (Flow-GRPO's published code), not that
            of the group.
        clip: largest absolute advantage; 0 for none.

    Returns:
        The advantages; 0 where invalid or without another valid sample of the group.
    """
    groups = GroupStatistics(rewards.double(), group_id, valid)
    std = Moments.of(rewards[valid]).std if global_std else groups.std(correction=0)
    advantages = torch.where(groups.comparable, groups.centered() / (std + EPS), 0.0)  # std is NaN of none
    return (advantages.clamp(-clip, clip) if clip else advantages).float()


def decoupled_group_advantages(
    components: dict[str, T], weights: dict[str, T], group_id: T, valid: T, *, clip: float = 5.0
) -> T:
    """(N) advantages of GDPO (arXiv 2601.05242): `decoupled_rewards`, then minus their mean over the batch and over
    their standard deviation + EPS.

    Args:
        components: (N) scores of each reward, by name; NaN where it does not apply.
        weights: (N) of each, by the same names.
        group_id: (N) long.
        valid: (N) bool.
        clip: largest absolute advantage; 0 for none.

    Returns:
        The advantages; 0 where invalid or without another valid sample of the group.
    """
    doubles = [{name: values.double() for name, values in each.items()} for each in (components, weights)]
    total = decoupled_rewards(*doubles, group_id, valid, correction=0, eps=EPS)
    comparable = GroupStatistics(total, group_id, valid).comparable
    moments = Moments.of(total[comparable])
    advantages = torch.where(comparable & (total != 0), (total - moments.mean) / (moments.std + EPS), 0.0)
    return (advantages.clamp(-clip, clip) if clip else advantages).float()


def gathered_group_advantages(
    rewards: T,
    group_id: T,
    valid: T,
    *,
    global_std: bool = False,
    clip: float = 5.0,
    decoupled: tuple[dict[str, T], dict[str, T]] | None = None,
) -> tuple[T, dict[str, float]]:
    """This rank's advantages, with statistics of groups that spread over ranks. A collective.

    Args:
        rewards: (N) of this rank, as the next two.
        group_id: (N) long, the same number on all ranks for one group.
        valid: (N) bool.
        global_std: as of `group_advantages`.
        clip: likewise.
        decoupled: scores and weights of each reward, {name: (N)}, for GDPO's advantages.

    Returns:
        The advantages (N), and the metrics of the whole batch.
    """
    everyone = all_gather_object((rewards.cpu(), group_id.cpu(), valid.cpu(), decoupled))
    all_rewards, all_groups, all_valid = (torch.cat(parts) for parts in list(zip(*everyone))[:3])
    if decoupled is None:
        advantages = group_advantages(all_rewards, all_groups, all_valid, global_std=global_std, clip=clip)
    else:
        components, weights = (_joined([each[3][i] for each in everyone], everyone, fill) for i, fill in FILLS)
        advantages = decoupled_group_advantages(components, weights, all_groups, all_valid, clip=clip)
    start = sum(len(each[0]) for each in everyone[: rank()])
    mine = advantages[start : start + len(rewards)].to(rewards.device)
    return mine, group_metrics(all_rewards, all_groups, all_valid)


def _joined(parts: list[dict[str, T]], everyone: list[tuple], fill: float) -> dict[str, T]:
    """{name: (N)} over ranks."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: torch.cat(
            [part[name] if name in part else torch.full((len(of[0]),), fill) for part, of in zip(parts, everyone)]
        )
        for name in names
    }


def group_metrics(rewards: T, group_id: T, valid: T) -> dict[str, float]:
    """group_size, zero_std_ratio, reward_std_mean, and mean_reward_{100,75,50,25,10}: the mean of the rewards of each
    group that reach its (100 - p)th percentile, averaged over groups.

    Args:
        rewards: (N) of all ranks.
        group_id: (N) long.
        valid: (N) bool; others are left out.
    """
    groups = [rewards[(group_id == each) & valid].double() for each in torch.unique(group_id)]
    groups = [group for group in groups if len(group)]
    if not groups:
        return {"group_size": 0.0, "zero_std_ratio": 0.0, "reward_std_mean": 0.0}
    stds = torch.stack([group.std(unbiased=False) for group in groups])
    metrics = {
        "group_size": sum(len(group) for group in groups) / len(groups),
        "zero_std_ratio": float((stds == 0).double().mean()),
        "reward_std_mean": float(stds.mean()),
    }
    for percent in (100, 75, 50, 25, 10):
        best = [group[group >= group.quantile(1 - percent / 100)].mean() for group in groups]
        metrics[f"mean_reward_{percent}"] = float(torch.stack(best).mean())
    return metrics
