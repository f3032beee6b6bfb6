"""Advantages and returns: `get_advantage_calculator(name, config)`, one class for each estimator.

The order for a step: `preprocess_rewards` over all micro-batches of a rank (shaping, then statistics of each prompt's
group), `compute_reward` (reward on the last token, KL per token), `compute` for each micro-batch, and
`finish_advantages` over all of them (whitening, clip). `assign_advantages` does all four.

Samples of one prompt share `experience.group_id`, wherever they are in the list. Samples that `experience.valid` marks
false have no usable reward: they stay out of every statistic and get advantage 0. Experiences are padded, (B, A).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from ..config import registry
from ..config.constraints import check_call
from ..config.vl import AlgorithmConfig
from ..errors import ConfigError, RewardError
from ..observe.metrics import Moments
from .kl import compute_reward, of_shape

T = torch.Tensor

STD_EPS = 1e-6
CALLS = {  # what the methods of an `AdvantageCalculator` are called with, by position
    "preprocess_rewards": "rewards, experiences, max_new_tokens",
    "compared": "experiences, statistics, notes",
    "group_rewards": "statistics",
    "compute": "experience, final_reward, gamma, generate_kwargs",
}


# -- over time ---------------------------------------------------------------------------------------------------


def get_advantages_and_returns(
    values: T, rewards: T, action_mask: T, gamma: float, lambd: float, discounts: T | None = None
) -> tuple[T, T]:
    """Generalised advantage estimation (arXiv 1506.02438): (advantages, returns), both (B, A) and detached.

    Args:
        values: (B, A) the critic's, before each action; what lies beyond the last action has value 0.
        rewards: (B, A) of the actions.
        action_mask: (B, A); a masked position inside a response is no step: it neither discounts nor breaks the
            recursion, and its results are 0.
        gamma: discount of an action.
        lambd: 0: one step ahead of the critic; 1: the whole return.
        discounts: (B, A) of what follows an action, beside gamma; see `turn_discounts`.

    Raises ValueError where values, rewards and mask are not of one shape.
    """
    shapes = [tuple(each.shape) for each in (values, rewards, action_mask)]
    if len(set(shapes)) > 1 or values.dim() != 2:
        raise ValueError("values {}, rewards {} and action mask {} must be of one shape (B, A)".format(*shapes))
    mask = action_mask.bool()
    values = torch.where(mask, values.detach().float(), 0.0)
    rewards = torch.where(mask, rewards.detach().float(), 0.0)
    discount = torch.full_like(values, gamma) if discounts is None else gamma * discounts.float()
    advantages = torch.where(mask, rewards + discount * _at_next_step(values, mask) - values, 0.0)
    factors = torch.where(mask, discount * lambd, 1.0)
    reach = 1  # positions that an advantage sums by now; doubled, as one after the other would take seconds
    while reach < mask.shape[1]:
        advantages[:, :-reach] += factors[:, : advantages.shape[1] - reach] * advantages[:, reach:]
        factors = factors[:, :-reach] * factors[:, reach:]
        reach *= 2
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def _at_next_step(values: T, mask: T) -> T:
    """(B, A): of each position the value (B, A) at the next one that the mask holds; 0 where none follows."""
    length = mask.shape[1]
    positions = torch.where(mask, torch.arange(length, device=mask.device), length)
    following = F.pad(positions, (0, 1), value=length)[:, 1:].flip(1).cummin(dim=1).values.flip(1)
    return F.pad(values, (0, 1)).gather(1, following)


def get_cumulative_returns(rewards: T, action_mask: T, gamma: float, discounts: T | None = None) -> T:
    """Discounted sum of the rewards from each action on, (B, A).

    Args:
        rewards: (B, A) of the actions.
        action_mask: (B, A); masked positions are no step and hold 0.
        gamma: discount of an action.
        discounts: as in `get_advantages_and_returns`.
    """
    mask = action_mask.bool()
    rewards = torch.where(mask, rewards.detach().float(), 0.0)
    if gamma == 1 and discounts is None:
        return torch.where(mask, rewards.flip(1).cumsum(dim=1).flip(1), 0.0)
    return get_advantages_and_returns(torch.zeros_like(rewards), rewards, mask, gamma, 1.0, discounts)[1]


# -- over turns --------------------------------------------------------------------------------------------------


def turn_ends(experience: Any) -> T | None:
    """(B, A) bool: the last token of every turn; None for experience without turns."""
    listed = (experience.info or {}).get("turn_ids")
    if listed is None:
        return None
    mask = experience.action_mask.bool()
    ids = torch.full(mask.shape, -1, device=mask.device)
    for index, own in enumerate(listed):
        ids[index, : len(own)] = own.to(mask.device)
    # Tokens of observations have the turn that follows them, so that a turn ends where the number changes.
    following = torch.where(mask, ids, ids.max() + 1).flip(1).cummin(dim=1).values.flip(1)
    later = torch.cat([following[:, 1:], following.new_full((len(mask), 1), int(ids.max()) + 1)], dim=1)
    return mask & (later > ids)


def turn_discounts(experience: Any) -> T | None:
    """(B, A): 1, and `turn_gamma` at the last token of each turn; None where nothing is discounted."""
    ends = turn_ends(experience)
    if ends is None or bool((experience.info["turn_gamma"] == 1).all()):
        return None
    gammas = experience.info["turn_gamma"].to(ends.device).unsqueeze(1)
    return torch.where(ends, gammas, 1.0)


def rewards_at_turns(experience: Any, rewards: T) -> T:
    """Token rewards (B, A) with the final reward of each sample spread over its turns: each has its own reward at its
    last token, scaled as the final one was, and the last one what is left. Their discounted sum is the final reward."""
    ends, given = turn_ends(experience), (experience.info or {}).get("turn_rewards")
    if ends is None or given is None:
        return rewards
    rewards, scales = rewards.clone(), experience.info.get("reward_scale", torch.ones(len(rewards)))
    for index, own in enumerate(given):
        where, gamma = ends[index].nonzero().flatten().to(rewards.device), float(experience.info["turn_gamma"][index])
        if len(where) < 2:
            continue
        turns = rewards.new_zeros(len(where), dtype=torch.float64)
        turns[: len(own)] = own[: len(where)].to(turns) * float(scales[index])
        discounts = gamma ** torch.arange(len(where), device=turns.device, dtype=torch.float64)
        final, discounted = rewards[index, where[-1]].double(), turns * discounts
        left = final - discounted.sum()
        # Undiscounted, the rounding of the sum could be larger than any reward.
        rounding = 4 * torch.finfo(torch.float32).eps * (final.abs() + discounted.abs().sum())
        turns[-1] += torch.where(left.abs() > rounding, left, 0.0) / discounts[-1]
        rewards[index, where] = turns.to(rewards)
    return rewards


# -- over groups: functions of rewards (N), group index (N) in [0, groups), valid (N) bool -----------------------


class GroupStatistics:
    """Count, mean and std of each group's valid rewards, each looked up per sample (N), in the rewards' dtype."""

    def __init__(self, rewards: T, group_ids: T, valid: T) -> None:
        _, index = torch.unique(group_ids, return_inverse=True)
        groups = int(index.max()) + 1 if index.numel() else 0
        self._index, self._zeros = index, rewards.new_zeros(groups)
        self.rewards, self.valid = torch.where(valid, rewards, 0.0), valid
        counts = self._zeros.index_add(0, index, valid.to(rewards.dtype))
        self.count = counts[index]
        self.mean = (self._zeros.index_add(0, index, self.rewards) / counts.clamp(min=1))[index]
        # Group members that stand alone, or beside invalid ones only, have nothing to be compared with.
        self.comparable = valid & (self.count >= 2)

    def centered(self) -> T:
        """Reward minus the group's mean; exactly 0 where all are equal, and for samples that cannot be compared."""
        high, low = (
            self._zeros.scatter_reduce(
                0, self._index, torch.where(self.valid, self.rewards, bound), kind, include_self=False
            )
            for bound, kind in ((-torch.inf, "amax"), (torch.inf, "amin"))
        )
        usable = self.comparable & ((high - low)[self._index] > 0)
        return torch.where(usable, self.rewards - self.mean, 0.0)

    def std(self, correction: int) -> T:
        """Standard deviation of the group, dividing by count - correction."""
        squares = torch.where(self.valid, self.rewards - self.mean, 0.0).square()
        sums = self._zeros.index_add(0, self._index, squares)[self._index]
        return (sums / (self.count - correction).clamp(min=1)).sqrt()


# -- estimators --------------------------------------------------------------------------------------------------


class AdvantageCalculator:
    """Base: reward shaping for all, advantages as discounted sums of the token rewards.

    A subclass says how the rewards of a group are compared (`group_rewards`), or replaces `compute`. It is known by the
    name under which config/registry.py, or a plugin, registers it.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        # Whether rewards are compared within a prompt's group.
        self.grouped = type(self).group_rewards is not AdvantageCalculator.group_rewards
        # Of the rewards so far, of answers and of drawn images.
        self.running = {"running": Moments(), "running_drawn": Moments()}

    def preprocess_rewards(
        self, rewards: T | Sequence[T], experiences: list, max_new_tokens: int
    ) -> tuple[list, list[T]]:
        """Shape the rewards and compare them within groups, over all micro-batches of this rank.

        Args:
            rewards: one (B_i) tensor for each experience, or all of them concatenated; B_i may differ.
            experiences: micro-batches with action_mask (B_i, A_i), group_id (B_i), valid (B_i) or None, and info.
            max_new_tokens: the generation limit, for the overlong penalty.

        Returns:
            The experiences, and one tensor (B_i) of final rewards for each. Each info gains per-sample tensors:
            `shaped_reward` before the comparison, `overlong_penalty` and `reward_clipped` when those are on,
            `reward_scale` (what norm and clip multiply a reward by), and for grouped estimators `comparable` (0 where
            the group has fewer than two valid samples) and `group_advantage`, the final reward: what KL, whitening and
            a teacher add to the tokens is not in it.

        Raises ValueError when sizes do not agree or a grouped estimator gets no group_id, RewardError for a valid
        reward that is not finite. With reward_running_norm it is a collective: every rank must call it.
        """
        if any(experience.packed_seq_lens is not None for experience in experiences):
            raise ValueError("advantages are computed on padded experiences, before samples are packed")
        sizes = [len(experience.action_mask) for experience in experiences]
        flat = _flat_rewards(rewards, sizes)
        # Without experiences there are no numbers, and all the same calls: other ranks may wait in a norm.
        valid = torch.cat([_valid(experience) for experience in experiences]) if experiences else flat.bool()
        flat = flat.to(valid.device)
        if not bool(torch.isfinite(flat[valid]).all()):
            raise RewardError("a reward that is marked valid is not finite")
        flat = torch.where(valid, flat, 0.0)
        notes: dict[str, T] = {}
        shaped = self._shape(flat, valid, experiences, max_new_tokens, notes)
        final = torch.where(valid, shaped, 0.0)
        if self.grouped:
            statistics = GroupStatistics(shaped, _group_ids(experiences) if experiences else flat.long(), valid)
            notes["comparable"] = statistics.comparable.float()
            final = of_shape(self.compared(experiences, statistics, notes), shaped.shape, type(self).__name__)
            notes["group_advantage"] = final
        for name, values in notes.items():
            for experience, part in zip(experiences, values.split(sizes)):
                experience.info = {**(experience.info or {}), name: part}
        return experiences, list(final.split(sizes))

    def _shape(self, rewards: T, valid: T, experiences: list, max_new_tokens: int, notes: dict[str, T]) -> T:
        config = self.config
        if config.overlong_buffer:
            until_last = (each.action_mask.flip(1).cumsum(dim=1).bool().sum(dim=1) for each in experiences)
            lengths = [own.masked_fill(_drawn(each), 0) for own, each in zip(until_last, experiences)]  # no image's
            # DAPO's soft penalty (arXiv 2503.14476) of the last tokens of the longest responses.
            excess = torch.cat([rewards[:0], *lengths]).float() - (max_new_tokens - config.overlong_buffer_len)
            penalty = -excess / config.overlong_buffer_len * config.overlong_buffer_penalty_factor
            notes["overlong_penalty"] = penalty.clamp(max=0.0)
            rewards = rewards + notes["overlong_penalty"]
        if config.reward_running_norm:
            drawn, scale = torch.cat([valid[:0], *map(_drawn, experiences)]), torch.ones_like(rewards)
            for name, own in (("running", ~drawn), ("running_drawn", drawn)):
                seen = self.running[name] = self.running[name].merge(Moments.over_ranks(rewards[valid & own]))
                std = math.sqrt(seen.sample_variance) or 1.0  # while it is not defined or zero, nothing changes
                white = (rewards - (seen.mean if config.reward_running_norm_minus_mean else 0.0)) / std
                rewards, scale = torch.where(own, white, rewards), torch.where(own, scale / std, scale)
            notes["reward_scale"] = scale
        if config.reward_clip > 0:
            notes["reward_clipped"] = (valid & (rewards.abs() > config.reward_clip)).float()
            within = config.reward_clip / rewards.abs().clamp(min=config.reward_clip)
            notes["reward_scale"] = notes.get("reward_scale", 1.0) * within
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        notes["shaped_reward"] = torch.where(valid, rewards, 0.0)
        return rewards

    def compared(self, experiences: list, statistics: GroupStatistics, notes: Mapping[str, T]) -> T:
        """(N) `group_rewards`; an estimator that needs more than the sum of the rewards overrides this.

        Args:
            experiences: the micro-batches of this rank, N samples together.
            statistics: of their shaped rewards, by group.
            notes: {name: (N)} what becomes part of their info.
        """
        return self.group_rewards(statistics)

    def group_rewards(self, statistics: GroupStatistics) -> T:
        """(N) final rewards of grouped estimators; 0 where `statistics.comparable` is false."""
        raise NotImplementedError(f"{type(self).__name__} does not compare rewards within a group")

    def compute(
        self, experience: Any, final_reward: T, gamma: float | None, generate_kwargs: Mapping[str, Any]
    ) -> tuple[T, T, dict[str, T]]:
        """(advantages (B, A), returns (B, A), info) of one micro-batch.

        Args:
            experience: the micro-batch, with action_mask (B, A).
            final_reward: (B, A) from `compute_reward`, or (B) rewards, which then stand at the last action without a KL
                term.
            gamma: discount of an action; None: that of generate_kwargs, or 1.
            generate_kwargs: gamma, and lambd (default: the config's) for estimators with a critic; never changed.

        Returns:
            Both, and info: `return` (B), the sum of the token rewards.
        """
        rewards, mask = final_reward, experience.action_mask
        rewards = compute_reward(rewards, 0.0, None, mask) if rewards.dim() == 1 else rewards
        gamma = generate_kwargs.get("gamma", 1.0) if gamma is None else gamma
        advantages, returns = self._over_time(experience, rewards, gamma, generate_kwargs)
        counted = _counted(experience).unsqueeze(1)
        return torch.where(counted, advantages, 0.0), returns, {"return": rewards.sum(dim=1)}

    def _over_time(self, experience: Any, rewards: T, gamma: float, generate_kwargs: Mapping[str, Any]) -> tuple[T, T]:
        """(advantages, returns), (B, A) each, of token rewards (B, A): here both are their discounted sums."""
        discounts = None if self.grouped else turn_discounts(experience)
        returns = get_cumulative_returns(rewards, experience.action_mask, gamma, discounts)
        return returns, returns

    def state_dict(self) -> dict[str, Any]:
        """The running moments of the rewards, of answers and of drawn images."""
        return {name: asdict(seen) for name, seen in self.running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name in self.running:
            self.running[name] = Moments(**{field: float(value) for field, value in state[name].items()})


class GAECalculator(AdvantageCalculator):
    """PPO: generalised advantage estimation from a critic (arXiv 1506.02438)."""

    def _over_time(self, experience: Any, rewards: T, gamma: float, generate_kwargs: Mapping[str, Any]) -> tuple[T, T]:
        """Reads experience.values (B, A) and generate_kwargs['lambd'] (default: the config's)."""
        if experience.values is None:
            raise ValueError("advantage_estimator gae needs the critic's values")
        values, mask, discounts = experience.values, experience.action_mask, turn_discounts(experience)
        lambd = generate_kwargs.get("lambd", self.config.lambd)
        return get_advantages_and_returns(values, rewards, mask, gamma, lambd, discounts)


class ReinforceCalculator(AdvantageCalculator):
    """REINFORCE: the (discounted) return, no baseline; with advantages_norm REINFORCE++ (arXiv 2501.03262)."""


class RLOOCalculator(AdvantageCalculator):
    """RLOO (arXiv 2402.14740): reward minus the mean of the other samples of the prompt."""

    def group_rewards(self, statistics: GroupStatistics) -> T:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        return statistics.centered() * statistics.count / (statistics.count - 1).clamp(min=1)


class GroupMeanCalculator(AdvantageCalculator):
    """Reward minus the group's mean: Dr. GRPO (arXiv 2503.20783), and REINFORCE++-baseline before its whitening."""

    def group_rewards(self, statistics: GroupStatistics) -> T:
        return statistics.centered()


class GroupNormCalculator(AdvantageCalculator):
    """GRPO (arXiv 2402.03300): reward minus the group's mean, over its standard deviation (n - 1) + 1e-6."""

    correction = 1

    def group_rewards(self, statistics: GroupStatistics) -> T:
        return statistics.centered() / (statistics.std(self.correction) + STD_EPS)


class CPGDCalculator(GroupNormCalculator):
    """CPGD (arXiv 2505.12504) weighted by the std of the group: as GRPO, but over n."""

    correction = 0


class GDPOCalculator(GroupNormCalculator):
    """GDPO (arXiv 2601.05242): each reward normalised within its group, then their weighted sum, then the batch's norm.

    Rewards of different scale or rarity keep their say, which a sum before the normalisation takes from them. The
    overlong penalty is one more reward, of weight 1. The last norm is of answers and of drawn images apart.
    """

    def compared(self, experiences: list, statistics: GroupStatistics, notes: Mapping[str, T]) -> T:
        """(N), normalised over all ranks: a collective. Raises ConfigError without the rewards' weights."""
        total = torch.zeros_like(statistics.rewards)
        if experiences:
            components, weights = _weighted_components(experiences)
            if "overlong_penalty" in notes:
                components |= {"overlong_penalty": notes["overlong_penalty"]}
                weights |= {"overlong_penalty": torch.ones_like(total)}
            total = decoupled_rewards(components, weights, _group_ids(experiences), statistics.valid, self.correction)
        drawn, white = torch.cat([statistics.comparable[:0], *map(_drawn, experiences)]), torch.zeros_like(total)
        for kind in (~drawn, drawn):
            own = statistics.comparable & kind
            moments = Moments.over_ranks(total[own])
            own_white = (total - moments.mean) / (moments.sample_variance**0.5 + STD_EPS)
            white = torch.where(own & (total != 0), own_white, white)  # the mean is 0 but for rounding
        return white


class DistillationCalculator(AdvantageCalculator):
    """On-policy distillation alone: rewards are reported and teach nothing; `finish_advantages` adds the teacher's."""

    def preprocess_rewards(
        self, rewards: T | Sequence[T], experiences: list, max_new_tokens: int
    ) -> tuple[list, list[T]]:
        """As in the base, with final rewards of 0."""
        experiences, finals = super().preprocess_rewards(rewards, experiences, max_new_tokens)
        return experiences, [torch.zeros_like(final) for final in finals]


def decoupled_rewards(
    components: Mapping[str, T], weights: Mapping[str, T], group_ids: T, valid: T, correction: int, eps: float = STD_EPS
) -> T:
    """(N): the sum over rewards k of w_k (r_k - mean of the group) / (std of the group + eps), GDPO's first two steps.

    The sum over a group is 0, and each of its samples has exactly 0 where no reward differs in it.

    Args:
        components: {name: (N)} each reward's own scores, NaN where it does not apply: it then adds 0.
        weights: {name: (N)}; a reward whose weights are all 0 need not have been scored.
        group_ids: (N) of the prompts.
        valid: (N) bool; others are compared with nobody.
        correction: the standard deviation divides by count - correction.
        eps: added to it.
    """
    total = torch.zeros(valid.shape, device=valid.device)
    for name, weight in weights.items():
        if not weight.any():
            continue
        applies = valid & ~components[name].isnan()
        statistics = GroupStatistics(torch.where(applies, components[name], 0.0), group_ids, applies)
        total = total + weight * statistics.centered() / (statistics.std(correction) + eps)
    return total


def get_advantage_calculator(name: str, config: AlgorithmConfig) -> AdvantageCalculator:
    """The calculator of `advantage_estimator`; ConfigError that lists the names for an unknown one, and for one that
    cannot be called as estimators are. What a `config` of another system lacks is at its default."""
    defaults = vars(AlgorithmConfig())
    if not all(hasattr(config, setting) for setting in defaults):
        named = config if isinstance(config, Mapping) else {n: getattr(config, n) for n in dir(config) if n[0] != "_"}
        config = SimpleNamespace(**defaults | {name: value for name, value in named.items() if value is not None})
    entry, told = registry.advantage_estimators[name], f"advantage estimator {name!r}"
    check_call(entry.load(), "config", told)
    calculator = entry.load()(config)
    if not isinstance(calculator, AdvantageCalculator):
        raise ConfigError(f"{told} makes a {type(calculator).__name__}; it makes an AdvantageCalculator")
    if not hasattr(calculator, "grouped"):
        raise ConfigError(f"{told}: its __init__ begins with super().__init__(config)")
    for method, given in CALLS.items():
        check_call(getattr(calculator, method), given, f"{type(calculator).__name__}.{method}")
    if calculator.grouped != entry.grouped:
        raise ConfigError(
            f"{told} is registered with grouped={entry.grouped}, but {type(calculator).__name__} "
            f"{'has' if calculator.grouped else 'lacks'} group_rewards, which compares the samples of a prompt"
        )
    return calculator


# -- over the whole batch ----------------------------------------------------------------------------------------


def assign_advantages(
    calculator: AdvantageCalculator,
    experiences: list,
    rewards: T | Sequence[T],
    kl_coef: float,
    generate_kwargs: Mapping[str, Any],
) -> list:
    """Fill advantages and returns of all micro-batches of this rank. A collective with reward_running_norm or
    advantages_norm on.

    Args:
        calculator: of the run's estimator.
        experiences: the micro-batches, which are changed and returned.
        rewards: as in `preprocess_rewards`.
        kl_coef: the KL controller's value; it enters the rewards unless config.use_kl_loss.
        generate_kwargs: gamma and lambd (defaults: the config's) and max_new_tokens.
    """
    config = calculator.config
    gamma = generate_kwargs.get("gamma", config.gamma)
    experiences, finals = calculator.preprocess_rewards(rewards, experiences, generate_kwargs["max_new_tokens"])
    for experience, final in zip(experiences, finals):
        kl = None if config.use_kl_loss else experience.kl
        if kl is None and kl_coef != 0 and not config.use_kl_loss:
            raise ValueError(f"the KL coefficient is {kl_coef}, but this experience has no kl to the reference")
        token_rewards = compute_reward(final, 0.0, None, experience.action_mask)
        if not calculator.grouped:
            token_rewards = rewards_at_turns(experience, token_rewards)
        token_rewards = token_rewards + compute_reward(torch.zeros_like(final), kl_coef, kl, experience.action_mask)
        named, shape = f"{type(calculator).__name__}.compute", experience.action_mask.shape
        match calculator.compute(experience, token_rewards, gamma, generate_kwargs):
            case (advantages, returns, Mapping() as info):
                experience.advantages, experience.returns = of_shape(advantages, shape, named), returns
            case _:
                raise ConfigError(f"{named} must return (advantages, returns, a mapping)")
        if experience.values is not None:
            of_shape(returns, shape, f"{named}, for its returns,")
        experience.info.update(info)
    return finish_advantages(experiences, config)


def finish_advantages(experiences: list, config: AlgorithmConfig) -> list:
    """Whiten (advantages_norm), add the teacher's term and clip (advantage_clip) the advantages, all in place.

    Whitening: masked mean and masked standard deviation over all micro-batches and ranks, of answers and of drawn
    images apart; samples that are invalid, or not comparable, stay out and stay 0. Teacher: plus teacher_coef times
    `distillation_gain`. The clip adds info `advantage_clip_frac` (B), taken before the clamp.
    """
    if config.advantages_norm:
        for images in (False, True):
            _whiten(experiences, images)
    if config.teacher_coef > 0:
        for experience in experiences:
            experience.advantages = experience.advantages + config.teacher_coef * distillation_gain(experience)
    if config.advantage_clip > 0:
        for experience in experiences:
            mask = experience.action_mask.bool()
            beyond = mask & (experience.advantages.abs() > config.advantage_clip)
            experience.info["advantage_clip_frac"] = beyond.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            experience.advantages = experience.advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return experiences


def finished_gae(
    values: T, rewards: T, action_mask: T, gamma: float, lambd: float, config: AlgorithmConfig
) -> tuple[T, T, float]:
    """`get_advantages_and_returns`, with the advantages whitened (advantages_norm) and clipped (advantage_clip).

    Args:
        values, rewards, action_mask: (B, A).
        gamma, lambd: the discount, and the weight of further steps.
        config: whether and how far; a collective with advantages_norm.

    Returns:
        Advantages and returns (B, A), and the share of tokens whose advantage was clipped.
    """
    advantages, returns = get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)
    whole = SimpleNamespace(advantages=advantages, action_mask=action_mask, valid=None, info={})
    finish_advantages([whole], config.changed(teacher_coef=0.0))  # a teacher has no part in values
    lengths = action_mask.sum(dim=1)
    clipped = (whole.info["advantage_clip_frac"] * lengths).sum() if config.advantage_clip > 0 else 0.0
    return whole.advantages, returns, float(clipped / lengths.sum().clamp(min=1))


def distillation_gain(experience: Any) -> T:
    """(B, A): log teacher - log policy of each sampled token, 0 where masked and of invalid samples.

    As advantages without a look ahead, weighed by REINFORCE, they give the gradient of each token's reverse KL(policy
    || teacher) on the policy's own samples: on-policy distillation (MiniLLM, arXiv 2306.08543; GKD, 2306.13649; Lu et
    al., "On-Policy Distillation", Thinking Machines 2025).
    """
    if experience.teacher_log_probs is None or experience.action_log_probs is None:
        raise ValueError("teacher_coef needs the log-probs of policy and teacher, which this experience does not have")
    gain = experience.teacher_log_probs - experience.action_log_probs
    return torch.where(experience.action_mask.bool() & _valid(experience).unsqueeze(1), gain, 0.0)


def _whiten(experiences: list, images: bool) -> None:
    kind = [(_drawn(experience) == images).unsqueeze(1) for experience in experiences]
    masks = [each.action_mask.bool() & _counted(each).unsqueeze(1) & own for each, own in zip(experiences, kind)]
    kept = [experience.advantages[mask] for experience, mask in zip(experiences, masks)]
    moments = Moments.over_ranks(torch.cat(kept or [torch.zeros(0)]))  # other ranks may have some
    for experience, mask, own in zip(experiences, masks, kind):
        white = (experience.advantages - moments.mean) / (moments.sample_variance**0.5 + STD_EPS)
        experience.advantages = torch.where(mask, white, experience.advantages.masked_fill(own, 0.0))


# -- reading experiences -----------------------------------------------------------------------------------------


def _drawn(experience: Any) -> T:
    """(B) bool: the samples whose response is an image."""
    drawn = (experience.info or {}).get("loss_part")
    if drawn is None:
        return torch.zeros(len(experience.action_mask), dtype=torch.bool, device=experience.action_mask.device)
    return drawn.bool()


def _flat_rewards(rewards: T | Sequence[T], sizes: list[int]) -> T:
    """(N) float32; sizes checked against the micro-batches, so that no reward lands on another sample."""
    if not isinstance(rewards, T):
        rewards = [torch.as_tensor(reward, dtype=torch.float32) for reward in rewards]
        rewards = torch.stack(rewards) if rewards and all(reward.dim() == 0 for reward in rewards) else rewards
    if not isinstance(rewards, T):
        got = [len(part) for part in rewards if part.dim() == 1]
        if got != sizes:
            raise ValueError(f"rewards of {got} samples do not belong to micro-batches of {sizes}")
        rewards = torch.cat(list(rewards)) if len(rewards) else torch.zeros(0)
    if rewards.shape != (sum(sizes),):
        raise ValueError(f"{tuple(rewards.shape)} rewards do not belong to micro-batches of {sizes} samples")
    return rewards.detach().float()


def _valid(experience: Any) -> T:
    """(B) bool; all true where the experience carries no such mark."""
    valid = getattr(experience, "valid", None)  # LightRFT's have none
    if valid is None:
        return torch.ones(len(experience.action_mask), dtype=torch.bool, device=experience.action_mask.device)
    return valid.bool()


def _counted(experience: Any) -> T:
    """(B) bool: samples that may have an advantage: valid and, for grouped estimators, comparable."""
    comparable = (experience.info or {}).get("comparable")
    return _valid(experience) if comparable is None else comparable > 0


def _group_ids(experiences: list) -> T:
    if any(experience.group_id is None for experience in experiences):
        raise ValueError("this advantage estimator compares samples of one prompt: every experience needs group_id")
    return torch.cat([experience.group_id for experience in experiences])


def _weighted_components(experiences: list) -> tuple[dict[str, T], dict[str, T]]:
    """Scores and weights of each reward, {name: (N)}; NaN and 0 where a micro-batch does not know one."""
    infos = [experience.info or {} for experience in experiences]
    if any("reward_weights" not in info for info in infos):
        raise ConfigError("advantage_estimator gdpo needs rewards with weights: a recipe or reward.components")
    names = dict.fromkeys(name for info in infos for name in info["reward_weights"])

    def joined(key: str, name: str, missing: float) -> T:
        return torch.cat([i[key].get(name, torch.full_like(i["reward"], missing)) for i in infos])

    return (
        {name: joined("reward_metrics", name, float("nan")) for name in names},
        {name: joined("reward_weights", name, 0.0) for name in names},
    )
