"""Two ranks (argument: rank and store file) try every collective of the simulated process group; prints OK."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from simulated.accelerator import BACKEND, install

from lightrft_visual.runtime import collectives


def main(rank: int, store: str) -> None:
    install()
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=rank, world_size=2)
    mine = torch.arange(4.0, device="sim") + 10 * rank
    total = mine.clone()
    dist.all_reduce(total)
    assert total.cpu().tolist() == [10, 12, 14, 16]
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.cpu().tolist() == [10, 11, 12, 13]
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    assert sent.cpu().tolist() == [10, 11, 12, 13]
    whole = torch.zeros(8, device="sim")
    dist.all_gather_into_tensor(whole, mine)
    assert whole.cpu().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    parts = [torch.zeros(4, device="sim") for _ in range(2)]
    dist.all_gather(parts, mine)
    assert parts[1].cpu().tolist() == [10, 11, 12, 13]
    half = torch.zeros(2, device="sim")
    dist.reduce_scatter_tensor(half, mine)
    assert half.cpu().tolist() == ([10, 12] if rank == 0 else [14, 16])
    swapped = torch.zeros(4, device="sim")
    dist.all_to_all_single(swapped, mine)
    assert swapped.cpu().tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    box = ["text"] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    assert box == ["text"]
    dist.barrier()
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        assert "device type cpu" in str(error)
    else:
        raise AssertionError("a host tensor was taken")
    # Ours take host tensors as well.
    assert collectives.all_reduce_sum(torch.tensor([1.0, rank])).tolist() == [2, 1]
    assert collectives.all_reduce_max(torch.tensor([1.0, rank])).tolist() == [1, 1]
    assert collectives.all_gather_numbers(torch.tensor([1.0, rank])).tolist() == [[1, 0], [1, 1]]
    assert collectives.all_reduce_sum(mine).device == mine.device
    received = collectives.exchange_objects([torch.tensor([rank, other]) for other in range(2)])
    assert received[1 - rank].tolist() == [1 - rank, rank]
    collectives.barrier()
    print("OK", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
