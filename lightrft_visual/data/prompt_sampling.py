"""Which prompts a diffusion step trains on: every chosen prompt exactly k times, spread over all ranks (FastVideo)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KRepeatSample:
    """One rank's rows of a global batch, and how many different prompts the whole batch holds."""

    local_indices: list[int]
    unique_prompt_count: int


def distributed_k_repeat_indices(
    *, dataset_length: int, batch_size: int, repeats_per_prompt: int, world_size: int, rank: int, seed: int
) -> KRepeatSample:
    """Row indices of this rank for one global batch of world_size * batch_size rows.

    U = world_size * batch_size / repeats_per_prompt different prompts are drawn without replacement, each comes exactly
    repeats_per_prompt times over all ranks, and the repeats are shuffled over the ranks. Any rank computes the same
    global batch from the same seed, without communication: one generator draws a permutation of the rows, of which the
    first U are repeated in place, then a permutation of the repeats; rank r takes its contiguous slice.

    Args:
        dataset_length: rows of the data set.
        batch_size: rows of one rank's part of the batch, repeats included.
        repeats_per_prompt: samples of each drawn prompt.
        world_size: number of ranks.
        rank: whose rows are wanted.
        seed: of this global batch, the same on all ranks.

    Raises:
        ValueError: for sizes below one, a rank outside [0, world_size), a global batch that repeats_per_prompt does
            not divide, or fewer rows than unique prompts.
    """
    sizes = {
        "dataset_length": dataset_length,
        "batch_size": batch_size,
        "repeats_per_prompt": repeats_per_prompt,
        "world_size": world_size,
    }
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must lie in [0, {world_size})")
    total = world_size * batch_size
    if total % repeats_per_prompt:
        raise ValueError(f"a global batch of {total} rows does not divide into groups of {repeats_per_prompt}")
    unique = total // repeats_per_prompt
    if unique > dataset_length:
        raise ValueError(f"the global batch needs {unique} different prompts, the data set has {dataset_length}")
    generator = torch.Generator().manual_seed(int(seed))
    chosen = torch.randperm(dataset_length, generator=generator)[:unique]
    repeated = chosen.repeat_interleave(repeats_per_prompt)
    shuffled = repeated[torch.randperm(total, generator=generator)]
    local = shuffled[rank * batch_size : (rank + 1) * batch_size]
    return KRepeatSample(local.tolist(), unique)
