"""What the learning benchmarks share: mean and standard deviation over seeds, and the mean of their curves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np

Curve = tuple[Sequence[float], Sequence[float]]  # samples until each evaluation, ascending, and the values there


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    return f"{mean(values):{sign}.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves at every number of samples at which any of them was evaluated, up to the end of the shortest.

    Runs that were evaluated elsewhere are interpolated there: the same evaluation of two runs of other lengths or other
    intervals is not after the same number of samples.
    """
    end = min(samples[-1] for samples, _ in curves)
    everywhere = sorted({each for samples, _ in curves for each in samples if each <= end})
    values = [np.interp(everywhere, samples, numbers) for samples, numbers in curves]
    return everywhere, np.mean(values, axis=0).tolist()
