"""Whole runs on one and on two ranks, in one launch each; the tests of this folder read what they wrote."""

from __future__ import annotations

from pathlib import Path

import elsewhere
import hostile
import pytest
from plans import HOSTILE_ROWS, ONE_RANK, TWO_RANKS, small, text_rows_on_one_rank
from whole_runs import run_plan

from lightrft_visual.embedded.questions import build_embedded_task


@pytest.fixture(scope="session")
def made_elsewhere(tmp_path_factory) -> Path:
    return elsewhere.build(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, cache_root, made_elsewhere) -> Path:
    own = [make(made_elsewhere) for make in (elsewhere.bad, elsewhere.good, elsewhere.bad_rewards)]
    folder = tmp_path_factory.mktemp("one_rank")
    runs = own[0] | own[1] | own[2] | filled(ONE_RANK, hostile=hostile_rows(folder, cache_root))
    for name in ("base", "kl_loss_lora"):  # what a run has exported is loaded by vLLM and trained on
        exported = str(folder / name / "checkpoint-final")
        runs[f"reloaded_{name}"] = [*small("--max_steps 1"), "--pretrain", exported, *embedded_flags(cache_root)]
    return run_plan(runs, folder, cache_root, ranks=1)


def embedded_flags(cache_root: Path) -> list[str]:
    """What the embedded model's preset sets beside `SMALL`, for a model given by its folder."""
    task = build_embedded_task(cache_root / "data")
    return ["--prompt_data", str(task.train), "--generate_max_len", "8", "--prompt_max_len", "256"]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, cache_root, one_rank) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    task = build_embedded_task(cache_root / "data")
    rows = text_rows_on_one_rank(task.train, folder / "mixed.jsonl")
    runs = filled(TWO_RANKS, rows=rows, hostile=hostile_rows(folder, cache_root))
    return run_plan(runs, folder, cache_root, ranks=2)


def hostile_rows(folder: Path, cache_root: Path) -> Path:
    return hostile.write(folder / "hostile_data", build_embedded_task(cache_root / "data").train, HOSTILE_ROWS)


def filled(runs: dict[str, list[str]], **paths: Path) -> dict[str, list[str]]:
    """The runs with the {names} of files in their flags replaced by the files."""
    words = {f"{{{name}}}": str(path) for name, path in paths.items()}
    return {name: [words.get(word, word) for word in argv] for name, argv in runs.items()}
