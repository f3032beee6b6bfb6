"""P prompts of one rollout step on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DataError

if TYPE_CHECKING:
    from .rollouts import PromptFeatures

T = torch.Tensor


@dataclass
class PromptBatch:
    """Rendered prompts with their media and what the reward needs; every list has length P.

    prompts: strings after the chat template, one placeholder per image. images, videos: a list of sources a prompt.
    captions: what a prompt that asks for an image wants drawn, without the template around it; None says nothing.
    ids (P) long: a number that no other prompt of the run has, the same for any rank count; seeds and groups use it.
    prepared: what was preprocessed of them ahead of time, for one rollout; a selection has none.
    """

    prompts: list[str]
    images: list[list]
    videos: list[list]
    references: list[Any]
    labels: list[str | None]
    metadata: list[dict[str, Any]]
    captions: list[str | None]
    ids: T
    prepared: list[PromptFeatures] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: list[int]) -> PromptBatch:
        """The prompts at `indices`, in that order."""
        lists = (
            self.prompts, self.images, self.videos, self.references, self.labels, self.metadata, self.captions
        )  # fmt: skip
        return PromptBatch(*([column[i] for i in indices] for column in lists), ids=self.ids[indices])

    def release_media(self) -> None:
        """Images and videos are not needed here any more."""
        self.images, self.videos = ([[] for _ in self.prompts] for _ in range(2))

    @classmethod
    def of(
        cls,
        prompts: list[str],
        images: list | None = None,
        videos: list | None = None,
        references: list | None = None,
        labels: list | None = None,
        metadata: list | None = None,
        ids: T | None = None,
        captions: list[str | None] | None = None,
    ) -> PromptBatch:
        """A batch from plain lists; None stands for nothing of the kind. Raises DataError for unequal lengths."""
        count = len(prompts)
        columns = {"images": images, "videos": videos, "references": references, "labels": labels, "metadata": metadata}
        columns["captions"] = captions
        for name, column in columns.items():
            if column is not None and len(column) != count:
                raise DataError(f"{count} prompts but {len(column)} {name}")
        return cls(
            list(prompts),
            [_as_list(cell) for cell in images or [None] * count],
            [_as_list(cell) for cell in videos or [None] * count],
            list(references) if references is not None else [None] * count,
            list(labels) if labels is not None else [None] * count,
            list(metadata) if metadata is not None else [{} for _ in range(count)],
            list(captions) if captions is not None else [None] * count,
            torch.arange(count) if ids is None else ids,
        )


def _as_list(cell: Any) -> list:
    if cell is None:
        return []
    return list(cell) if type(cell) in (list, tuple) else [cell]  # a decoded video is a named tuple, and one item
