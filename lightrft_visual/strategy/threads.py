"""Settings of OpenMP's threads that must stand before torch is loaded; so nothing here imports it."""

from __future__ import annotations

import os


def bound_spinning() -> None:
    """Bound how long idle OpenMP threads spin; before torch is imported, and unless the user has set it.

    GNU OpenMP lets a thread that waits for another one spin for some 15 ms. When something else has the other's core,
    each of the thousands of small parallel operations of a step waits that long: a step of a tiny model took 14 times
    as long beside a busy process. This bound outlasts the usual gap between two operations, so nothing is lost on a
    quiet machine (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "50000")
