"""What a shape holds is counted once, and anew where the code is another."""

from __future__ import annotations

import pytest

from lightrft_visual.plugins.memory_plan import meta as module
from lightrft_visual.plugins.memory_plan.meta import Held, remembered


@pytest.fixture
def count(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    counted = []

    def once() -> Held:
        counted.append(None)
        return Held(1, len(counted))

    once.counted = counted
    return once


def test_a_shape_is_counted_once(count) -> None:
    assert remembered("one", count) == remembered("one", count) == Held(1, 1)
    assert remembered("another", count) == Held(1, 2) and len(count.counted) == 2


def test_other_code_counts_anew(count, monkeypatch) -> None:
    remembered("one", count)
    monkeypatch.setattr(module, "_code", lambda: "other versions")
    assert remembered("one", count) == Held(1, 2)


def test_a_damaged_file_counts_anew(count, tmp_path) -> None:
    remembered("one", count)
    (kept,) = (tmp_path / "plans").iterdir()
    for damaged in ("", "[1", "7", "[1]"):
        kept.write_text(damaged)
        assert remembered("one", count).kept == 1
    assert len(count.counted) == 5


def test_a_cache_that_cannot_be_written_is_done_without(count, tmp_path) -> None:
    (tmp_path / "plans").touch()
    assert remembered("one", count) == Held(1, 1) and remembered("one", count) == Held(1, 2)
