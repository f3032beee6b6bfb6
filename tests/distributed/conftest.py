"""Whole runs on one and on two ranks, in one launch each; the tests of this folder read what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import ONE_RANK, TWO_RANKS, text_rows_on_one_rank
from whole_runs import run_plan

from lightrft_visual.data.embedded import build_embedded_task


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, cache_root) -> Path:
    return run_plan(ONE_RANK, tmp_path_factory.mktemp("one_rank"), cache_root, ranks=1)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, cache_root, one_rank) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    task = build_embedded_task(cache_root / "data")
    rows = text_rows_on_one_rank(task.train, folder / "mixed.jsonl")
    runs = {name: [word.replace("{rows}", str(rows)) for word in argv] for name, argv in TWO_RANKS.items()}
    return run_plan(runs, folder, cache_root, ranks=2)
