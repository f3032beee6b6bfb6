"""How validation prompts are shared out, so that all ranks make the same number of collective calls; their labels."""

import logging
import re
from collections import Counter
from collections.abc import Sequence

from ..runtime import collectives

logger = logging.getLogger(__name__)


def validation_shard_indices(num_prompts: int, *, rank: int, world_size: int) -> list[tuple[int, bool]]:
    """(index, is_real) of this rank's prompts: rank, rank + world_size, ... (FastVideo).

    Every rank gets ceil(num_prompts / world_size) entries. Where the stride runs past the end it starts over with
    is_real false: that prompt is generated once more, so that collectives match, and its result is dropped.

    Args:
        num_prompts: held-out prompts of all ranks together.
        rank: whose prompts are wanted.
        world_size: number of ranks.

    Raises:
        ValueError: for a negative count, world_size below one, or a rank outside [0, world_size).
    """
    if num_prompts < 0:
        raise ValueError(f"num_prompts is {num_prompts}; it must not be negative")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: rank must lie in [0, world_size) and world_size be positive")
    per_rank = -(-num_prompts // world_size)
    places = (rank + turn * world_size for turn in range(per_rank))
    return [(place % num_prompts, place < num_prompts) for place in places]


MAX_LABELS = 24  # with metrics of their own
OTHER_METRICS = re.compile("greedy(_.*)?|label_mean", re.DOTALL)  # what else stands behind eval_reward_


def measured_labels(labels: Sequence[str | None]) -> set[str]:
    """The labels of the held-out prompts that get metrics of their own: all, or where they are more than MAX_LABELS the
    most frequent ones, each of two prompts or more. A label that is different for every prompt tells nothing apart, and
    one of OTHER_METRICS would change what these say."""
    counts = Counter(label for label in labels if label is not None)
    taken = list(filter(OTHER_METRICS.fullmatch, counts))
    for label in taken:
        del counts[label]
    if taken and collectives.is_rank_0():
        logger.warning("no eval_reward_<label> for %s: other metrics have these names", ", ".join(taken))
    if len(counts) <= MAX_LABELS:
        return set(counts)
    chosen = {label for label, count in counts.most_common(MAX_LABELS) if count > 1}
    if collectives.is_rank_0():
        logger.warning(
            "the evaluation data has %d labels; eval_reward_<label> is reported for the %d most frequent that several "
            "prompts have, eval_reward counts all",
            len(counts),
            len(chosen),
        )
    return chosen
