"""Run by three ranks: each sends every other one objects of its own, more than go in one round."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lightrft_visual.runtime import collectives


def parcel(sender: int, receiver: int) -> dict | None:
    """Of another size for each pair; rank 1 sends nothing to rank 2."""
    if (sender, receiver) == (1, 2):
        return None
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return {"from": sender, "numbers": torch.randn(200 * (sender + 1) + receiver, generator=generator)}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    collectives.STAGED_BYTES = 999
    sent = [parcel(rank, other) for other in range(3)]
    received = collectives.exchange_objects(sent)
    assert received[rank] is sent[rank]
    for sender, arrived in enumerate(received):
        wanted = parcel(sender, rank)
        assert (arrived is None) == (wanted is None)
        if wanted is not None:
            assert arrived["from"] == sender and torch.equal(arrived["numbers"], wanted["numbers"])
    Path(out, f"{rank}.json").write_text(json.dumps("well"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
