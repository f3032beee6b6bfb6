"""Whole runs on one and on two ranks, in one launch each; the tests of this folder read what they wrote."""

import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import elsewhere
import hostile
import pytest
from plans import DRAWN_ROW, HOSTILE_ROWS, ONE_RANK, TEXT_ROW, TWO_RANKS, UNIFIED_STEPS, rows_apart, small
from reward_servers import serving
from whole_runs import run_plan

from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.plugins.embedded.warmup import embedded_task


@pytest.fixture(scope="session")
def made_elsewhere(tmp_path_factory) -> Path:
    return elsewhere.build(tmp_path_factory.mktemp("elsewhere"))


def late_reward(prompts, responses):
    """Takes its time, and has no score for few of the responses."""
    time.sleep(0.1)
    numbers = [zlib.crc32((prompt + response).encode()) for prompt, response in zip(prompts, responses)]
    return [None if number % 31 == 2 else number % 8 / 8 for number in numbers]


@pytest.fixture(scope="session")
def late() -> Iterator[str]:
    with serving(late_reward) as url:
        yield url


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, cache_root, made_elsewhere, late) -> Path:
    own = elsewhere.bad(made_elsewhere) | elsewhere.good(made_elsewhere)
    folder = tmp_path_factory.mktemp("one_rank")
    others = {"hostile": hostile_rows(folder, cache_root), **unified(folder, cache_root)}
    runs = own | filled(ONE_RANK, **others, late=late)
    exported = str(folder / "kl_loss_lora" / "checkpoint-final")  # is loaded by vLLM and trained on
    runs["reloaded"] = [*small("--max_steps 1"), "--pretrain", exported, *embedded_flags(cache_root)]
    return run_plan(runs, folder, cache_root, ranks=1)


def embedded_flags(cache_root: Path) -> list[str]:
    """What the embedded model's preset sets beside `SMALL`, for a model given by its folder."""
    task = embedded_task(cache_root)
    return ["--prompt_data", str(task.train), "--generate_max_len", "8", "--prompt_max_len", "256"]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, cache_root, one_rank, late) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    task = embedded_task(cache_root)
    rows = rows_apart(task.train, folder / "mixed.jsonl")
    others = {"hostile": hostile_rows(folder, cache_root), **unified(folder, cache_root)}
    runs = filled(TWO_RANKS, rows=rows, late=late, **others)
    return run_plan(runs, folder, cache_root, ranks=2)


def unified(folder: Path, cache_root: Path) -> dict[str, Path]:
    """Untrained models that draw, rows for them, and the reward of these runs."""
    task = embedded_task(cache_root)
    both = folder / "both.jsonl"
    both.write_text("".join(json.dumps(row) + "\n" for row in [TEXT_ROW, DRAWN_ROW] * 4))
    return {
        "both": both,
        "janus": build_tiny_checkpoint(folder / "janus", "janus"),
        "captions": rows_apart(task.train, folder / "captions.jsonl", DRAWN_ROW, UNIFIED_STEPS),
    }


def hostile_rows(folder: Path, cache_root: Path) -> Path:
    return hostile.write(folder / "hostile_data", embedded_task(cache_root).train, HOSTILE_ROWS)


def filled(runs: dict[str, list[str]], **paths: Path | str) -> dict[str, list[str]]:
    """The runs with the {names} of files in their flags replaced by the files."""
    words = {f"{{{name}}}": str(path) for name, path in paths.items()}
    return {name: [words.get(word, word) for word in argv] for name, argv in runs.items()}
