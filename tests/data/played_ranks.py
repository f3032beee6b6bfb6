"""Ranks as threads of this process, for what they say to each other while data are read."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightrft_visual.runtime import collectives


def played(monkeypatch, ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What work(rank) gives, or the error that it raises, on each rank."""
    own, sent, meeting = threading.local(), [None] * ranks, threading.Barrier(ranks)

    def gather(value: Any) -> list[Any]:
        sent[own.rank] = value
        meeting.wait(60)
        found = list(sent)
        meeting.wait(60)
        return found

    def on(rank: int) -> Any:
        own.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    monkeypatch.setattr(collectives, "world_size", lambda: ranks)
    monkeypatch.setattr(collectives, "rank", lambda: getattr(own, "rank", 0))
    monkeypatch.setattr(collectives, "all_gather_object", gather)
    monkeypatch.setattr(collectives, "broadcast_object", lambda value: gather(value)[0])
    monkeypatch.setattr(collectives, "meet", lambda: gather(None))
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(on, range(ranks)))
