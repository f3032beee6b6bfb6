"""An engine in one process whose tensor-parallel ranks are processes that vLLM starts: how weights come to them.

The engine writes a version into memory that all of them map, each checks its part of it and loads its shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..weight_post import MappedFiles, Posted, WeightPost, received

_FILES = MappedFiles()  # of a rank's process


class RanksWeights:
    """Hands weights to the ranks of an `LLM`. On the host it keeps one version of them."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.post = llm, WeightPost(turns=1)

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every rank takes over the tensors of its checkpoint's names, all of them or, where it refuses them, none."""
        self.llm.collective_rpc(_load, args=(self.post.post(named_tensors),))


def _load(worker: Any, posted: Posted) -> None:
    """In a rank's process. worker: vLLM's."""
    worker.reload_weights(weights_iterator=iter(received(posted, files=_FILES)))
