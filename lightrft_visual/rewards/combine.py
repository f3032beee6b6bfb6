"""From component scores to rewards: pure functions of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RewardError
from ..runtime.usercode.calls import AsRewardError
from .batch import Call, PendingScores, PendingSource, RewardBatch, Scores

T = torch.Tensor
NAN = float("nan")


@dataclass
class Job:
    """One component of a call: which samples it scores (ascending) and what its scores weigh: weights (B) float64."""

    name: str
    source: Any
    indices: list[int]
    weights: T
    score_key: str | None = None


@dataclass
class Column:
    """A component over the whole batch. values (B) float64, NaN without a score; failed (B) bool. extras: further
    numbers of its source by name, (B)."""

    job: Job
    values: T
    failed: T
    extras: dict[str, T]


def scatter(values: T, indices: Sequence[int], size: int, fill: float | bool = NAN) -> T:
    """(n) values back to their places among `size` samples."""
    full = torch.full((size,), fill, dtype=values.dtype)
    full[torch.as_tensor(indices, dtype=torch.long)] = values
    return full


def to_column(job: Job, scores: Scores, indices: Sequence[int], size: int) -> Column:
    """The job's part of its source's scores, which are those of the samples at `indices`."""
    values, failed = scatter(scores.values, indices, size), scatter(scores.failed, indices, size, False)
    asked = scatter(torch.ones(len(job.indices), dtype=torch.bool), job.indices, size, False)
    return Column(job, values.where(asked & ~failed, NAN), failed & asked, {})


def by_source(jobs: Sequence[Job]) -> tuple[list[list[Job]], list[list[int]]]:
    """The jobs of each source together, and the samples (ascending) that any of them needs."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.source), []).append(job)
    return list(groups.values()), [sorted({i for job in group for i in job.indices}) for group in groups.values()]


def run_jobs(
    jobs: Sequence[Job],
    batch: RewardBatch,
    call: Call,
    early: Mapping[int, PendingScores] | None = None,
    together: Sequence[Any] = (),
) -> tuple[list[Column], dict[str, Counter[str]]]:
    """A column for each job, in order, and why samples failed, by the names of the jobs.

    Jobs of one source share one run of it, over the samples that any of them needs; the further outputs of the run
    go with the first of them. early: what is at work already, by id of the source. together: sources that all ranks run
    at once; each takes its turn here too, in this order, without samples where no job needs it.
    """
    groups, needed = by_source(jobs)
    parts = [batch if len(indices) == len(batch) else batch.select(indices) for indices in needed]
    asked = [(group[0].source, part) for group, part in zip(groups, parts)]
    idle = [source for source in together if all(source is not other for other, _ in asked)]
    asked += [(source, batch.select([])) for source in idle]
    results = run_all(asked, call, early or {}, together)[: len(groups)]
    columns: dict[int, Column] = {}
    reasons: dict[str, Counter[str]] = {}
    for group, indices, scores in zip(groups, needed, results):
        reasons[", ".join(dict.fromkeys(job.name for job in group))] = scores.reasons
        for job in group:
            columns[id(job)] = to_column(job, pick_output(scores, job.name, job.score_key), indices, len(batch))
        extras = {name: scatter(values, indices, len(batch)) for name, values in scores.extras.items()}
        columns[id(group[0])].extras |= extras
    return [columns[id(job)] for job in jobs], reasons


def run_all(
    jobs: Sequence[tuple[Any, RewardBatch]],
    call: Call,
    early: Mapping[int, PendingScores],
    together: Sequence[Any] = (),
) -> list[Scores]:
    """Scores of every (source, batch): those that work elsewhere start first, if they have not yet, and run beside the
    local ones, which take their turns, those of `together` first."""
    pending = {
        i: early.get(id(source)) or source.submit(part, call)
        for i, (source, part) in enumerate(jobs)
        if isinstance(source, PendingSource)
    }
    order = {id(source): turn for turn, source in enumerate(together)}
    turns = sorted(range(len(jobs)), key=lambda i: order.get(id(jobs[i][0]), len(order)))
    local = {i: _scored(*jobs[i], call) for i in turns if i not in pending}
    return [pending[i].result() if i in pending else local[i] for i in range(len(jobs))]


def _scored(source: Any, batch: RewardBatch, call: Call) -> Scores:
    with AsRewardError(f"reward {source.name}"):
        return source.score(batch, call)


def pick_output(scores: Scores, name: str, key: str | None) -> Scores:
    """The output that counts: the main one, or the one named by `key`. Raises RewardError when it is not there."""
    if key is None or (key not in scores.extras and bool(scores.failed.all())):
        return scores
    if key not in scores.extras:
        raise RewardError(f"reward {name} has no output {key!r}; it has: {', '.join(scores.extras) or 'none'}")
    return Scores(scores.extras[key], scores.failed, scores.extras, scores.reasons)


def weighted_sum(columns: Sequence[Column], size: int, unweighted: T) -> tuple[T, T]:
    """Score (B) float64 and valid (B) bool.

    A component that does not apply to a sample is left out of its sum. A sample is invalid when a component failed on
    it, or when none applied. `unweighted` (B) bool: samples whose recipe has only zero weights; they score 0.
    """
    total = torch.zeros(size, dtype=torch.float64)
    applied, failed = unweighted.clone(), torch.zeros(size, dtype=torch.bool)
    for column in columns:
        scored = ~column.values.isnan()
        total = total + torch.where(scored, column.values.nan_to_num() * column.job.weights, 0.0)
        applied |= scored
        failed |= column.failed
    valid = applied & ~failed
    return torch.where(valid, total, NAN), valid


def named_components(columns: Sequence[Column]) -> dict[str, T]:
    """Component scores and the extra numbers of each by name; a name that is taken gets its component's as a prefix."""
    named = {column.job.name: column.values for column in columns}
    for column in columns:
        for name, values in column.extras.items():
            named[name if name not in named else f"{column.job.name}/{name}"] = values
    return named
