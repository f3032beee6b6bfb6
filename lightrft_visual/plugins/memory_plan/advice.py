"""Which division of the devices of a run would be quickest, by its plan's rough times and a simulation."""

from __future__ import annotations

from ...config.vl import RunConfig
from .cluster import Forecast, Layout, Lengths, best, layouts, long_tailed, measured
from .table import Plan

SPREAD = 0.5  # standard deviation of the logarithm of lengths, of which nothing is known before a run
WORTH = 0.95  # of the colocated time: what gains less is not advised
STEPS = 8


def advice(config: RunConfig, plan: Plan) -> str:
    """A line for a dry run; empty where rollouts cannot be split off, are already, or nothing is there to divide."""
    if plan.ranks < 2 or plan.device.on_cpu or config.rollout.engine_tp_size > 1 or config.distributed.split:
        return ""
    found = forecasts(config, plan)
    colocated = next(each for each in found if not each.layout.engines)
    says = f"division of {plan.ranks} devices, simulated: colocated {colocated.step_seconds:.0f} s a step"
    if found[0].step_seconds > WORTH * colocated.step_seconds:
        return f"{says}; no split is quicker"
    layout = found[0].layout
    ahead = f", max_staleness {layout.staleness}" if layout.staleness else ""
    return (
        f"{says}; placement split with {layout.trainers} trainers, {layout.engines} rollout workers{ahead}: "
        f"{found[0].step_seconds:.0f} s (whether the trainers fit: --placement split --plan_world_size "
        f"{layout.trainers}; with what a run has shown: scripts/bench/simulate_cluster.py --run)"
    )


def forecasts(config: RunConfig, plan: Plan) -> list[Forecast]:
    """Of all divisions that the batch sizes allow, the best first."""
    lengths = _lengths(config)
    seconds = {phase.name: phase.seconds for phase in plan.phases}
    times = {name: seconds[name] for name in ("generate", "train", "sync")}
    times |= {"forward": seconds["score"], "reward": 0.0}
    costs = measured(times, plan.ranks, lengths, config.rollout.engine_max_num_seqs or 256)
    sizes = config.rollout.rollout_batch_size, config.train.train_batch_size
    divided = [each for each in layouts(plan.ranks) if each.engines and not any(size % each.trainers for size in sizes)]
    return best(costs, [Layout(plan.ranks), *divided], lengths, STEPS)


def _lengths(config: RunConfig) -> Lengths:
    """Half of the longest on average, as the plan takes them."""
    longest, rollout = config.rollout.generate_max_len, config.rollout
    return long_tailed(longest / 2, SPREAD, longest, rollout.rollout_batch_size, rollout.n_samples_per_prompt)
