"""Strict reading of what a reward function returned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import RewardError
from ..batch import Failed, Scores, metric_name

SCORE_KEYS = ("rewards", "scores", "score", "reward", "overall")
MAX_SCORE = 1e6  # no sane reward is larger; beyond it a server or function is broken


def parse_result(result: Any, name: str, size: int, lenient: bool = False) -> Scores:
    """Read what a local callable returned for `size` samples.

    Forms: a list (None = not applicable), a tensor or array, (scores, metrics), or a dict with one of SCORE_KEYS.
    Raises RewardError that names the function for a wrong length or type, and for a score that is not a plain number
    within ±MAX_SCORE: that is a bug of the function and must not reach training. lenient: a sample with such a score is
    failed instead.
    """
    scores, metrics = split_result(result, name)
    values, failed, reasons = read_scores(scores, name, size, lenient)
    extras = {metric_name(key): read_metric(value, f"{name}: metric {key!r}", size) for key, value in metrics.items()}
    return Scores(values, failed, extras, reasons)


def split_result(result: Any, name: str) -> tuple[Any, Mapping[str, Any]]:
    """Scores and metrics of any accepted form."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    if not isinstance(result, Mapping):
        return result, {}
    key = next((k for k in SCORE_KEYS if k in result), None)
    if key is None:
        raise RewardError(f"reward function {name} returned a dict without scores: give it one of {SCORE_KEYS}")
    metrics = {k: v for k, v in result.items() if k not in SCORE_KEYS and k != "extra_logs" and v is not None}
    return result[key], {**metrics, **(result.get("extra_logs") or {})}


def as_list(scores: Any, name: str, what: str = "reward function") -> Sequence[Any]:
    """A flat list from a list, tuple, tensor or array of shape (n) or (n, 1). `what` and `name` are for the error."""
    if isinstance(scores, torch.Tensor):
        if scores.is_complex():
            raise RewardError(f"{what} {name} returned complex numbers; one real score a sample, please")
        scores = scores.detach().cpu().double().numpy()
    if isinstance(scores, np.ndarray):
        if scores.ndim == 2 and scores.shape[1] == 1:
            scores = scores[:, 0]
        if scores.ndim != 1:
            raise RewardError(f"{what} {name} returned shape {tuple(scores.shape)}; one score a sample, please")
        return scores.tolist()
    if isinstance(scores, (list, tuple)):
        return scores
    raise RewardError(f"{what} {name} returned {type(scores).__name__}; give a list or tensor of scores")


def read_scores(scores: Any, name: str, size: int, lenient: bool) -> tuple[torch.Tensor, torch.Tensor, Counter[str]]:
    """values (size) float64, failed (size) bool and the reasons of the failures."""
    entries = as_list(scores, name)
    if len(entries) != size:
        raise RewardError(f"reward function {name} returned {len(entries)} scores for {size} samples")
    values = torch.full((size,), float("nan"), dtype=torch.float64)
    failed = torch.zeros(size, dtype=torch.bool)
    reasons: Counter[str] = Counter()
    for index, entry in enumerate(map(unwrapped, entries)):
        problem = entry.reason if isinstance(entry, Failed) else problem_of(entry)
        if problem is None:
            values[index] = float("nan") if entry is None else float(entry)
        elif lenient or isinstance(entry, Failed):
            failed[index] = True
            reasons[problem] += 1
        else:
            raise RewardError(f"reward function {name}: score {index} of {size} {problem}")
    return values, failed, reasons


def unwrapped(entry: Any) -> Any:
    """The one number of a tensor or array; anything else as it is."""
    if isinstance(entry, (np.ndarray, np.generic)) and entry.size == 1:
        return entry.item()
    return entry.item() if isinstance(entry, torch.Tensor) and entry.numel() == 1 else entry


def problem_of(entry: Any) -> str | None:
    """Why an entry is no plain finite number within ±MAX_SCORE, without the value of a non-number; None where it is
    one, or None."""
    if entry is None:
        return None
    if not isinstance(entry, (bool, int, float)):
        return f"is a {type(entry).__name__}, not a number"
    if isinstance(entry, float) and not math.isfinite(entry):
        return f"is not finite ({entry}); return None where the reward does not apply"
    if abs(entry) > MAX_SCORE:
        shown = f"{float(entry):.3g}" if abs(entry) < 1e300 else "a number of more than 300 digits"
        return f"is {shown}, beyond ±{MAX_SCORE:.0e}"
    return None


def read_metric(value: Any, what: str, size: int) -> torch.Tensor:
    """(size) float64 from one number a sample or one for all; None and NaN mean no value."""
    one_for_all = isinstance(value, (bool, int, float)) or (
        isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0
    )
    entries = [value] * size if one_for_all else as_list(value, what)
    if len(entries) != size:
        raise RewardError(f"reward function {what} has {len(entries)} values for {size} samples")
    try:
        return torch.tensor([math.nan if entry is None else float(entry) for entry in entries], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"reward function {what} holds something that is not a number") from error
