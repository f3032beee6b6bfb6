"""How validation prompts are shared out, so that all ranks make the same number of collective calls."""

from __future__ import annotations


def validation_shard_indices(num_prompts: int, *, rank: int, world_size: int) -> list[tuple[int, bool]]:
    """(index, is_real) of this rank's prompts: rank, rank + world_size, ... (FastVideo).

    Every rank gets ceil(num_prompts / world_size) entries. Where the stride runs past the end it starts over with
    is_real false: that prompt is generated once more, so that collectives match, and its result is dropped.
    Raises ValueError for a negative count, world_size below one, or a rank outside [0, world_size).
    """
    if num_prompts < 0:
        raise ValueError(f"num_prompts is {num_prompts}; it must not be negative")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: rank must lie in [0, world_size) and world_size be positive")
    per_rank = -(-num_prompts // world_size)
    places = (rank + turn * world_size for turn in range(per_rank))
    return [(place % num_prompts, place < num_prompts) for place in places]
