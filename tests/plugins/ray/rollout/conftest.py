"""Pools of workers, closed at the end of a test."""

from collections.abc import Callable

import pytest

from lightrft_visual.plugins.ray.rollout.pool import WorkerPool


@pytest.fixture
def pool_of() -> Callable[..., WorkerPool]:
    made: list[WorkerPool] = []

    def make(*arguments, **settings) -> WorkerPool:
        made.append(WorkerPool(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
