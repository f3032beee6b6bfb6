"""Position ids for padded and packed batches, text and M-RoPE alike.

Four rows: row 0 counts text positions from 0 in each sample (transformers finds the borders of packed samples by it),
rows 1 to 3 are the temporal, height and width positions of M-RoPE. Text-only models take row 0 alone.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn as nn

from ...errors import DataError
from ...experience.types import ModelInputs
from ...runtime.host_copies import on_host

T = torch.Tensor


class MRopePositions:
    """M-RoPE positions of token-type patterns: each block by the model's own `get_rope_index`, blocks in a row.

    A block (an image, a video, a piece of text) starts one above the largest position so far, as in the papers, in vLLM
    and in the models' training. transformers 5 starts text after a video by the video's height and width alone, which
    lets text positions overlap with those of later frames; so the blocks are put in a row here.
    All responses to one prompt share the positions up to their last vision token, and text after it counts on; so each
    distinct pattern is worked out once and kept (least recently used first out), of at most `capacity` tokens together.
    """

    def __init__(self, model: torch.nn.Module, capacity: int = 2**22):
        self.model = model
        self.capacity, self.tokens = capacity, 0
        self.known: OrderedDict[tuple, tuple[T, int]] = OrderedDict()
        self.timed = "second_per_grid_ts" in inspect.signature(model.get_rope_index).parameters

    def __call__(self, types: T, image_grids: T | None, video_grids: T | None, seconds: T | None = None) -> T:
        """(3, L) long for one sample: types (L) 0 text, 1 image, 2 video; its grids (n, 3) in order.

        seconds (n videos): between temporal patches; read by models that place frames in time, 1 without.
        """
        vision = types.nonzero()
        if not len(vision):
            return torch.arange(len(types)).expand(3, -1)
        end = int(vision[-1]) + 1
        seconds = seconds if self.timed else None
        given = (image_grids, video_grids, seconds)
        told = (None if each is None or not len(each) else each.numpy().tobytes() for each in given)
        key = (types[:end].numpy().tobytes(), *told)
        if key not in self.known:
            self.known[key] = self._compute(types[:end], image_grids, video_grids, seconds)
            self.tokens += end
            while self.tokens > self.capacity and len(self.known) > 1:
                _, (oldest, _) = self.known.popitem(last=False)
                self.tokens -= oldest.shape[1]
        self.known.move_to_end(key)
        head, following = self.known[key]
        tail = torch.arange(following, following + len(types) - end).expand(3, -1)
        return torch.cat([head, tail], dim=1)

    def _compute(self, types: T, image_grids: T | None, video_grids: T | None, seconds: T | None) -> tuple[T, int]:
        # One text token more shows where text goes on: after a video that is not simply the largest position + 1.
        types = torch.cat([types, types.new_zeros(1)])
        timing = {"second_per_grid_ts": seconds} if self.timed else {}
        positions, _ = self.model.get_rope_index(
            torch.zeros_like(types, dtype=torch.long).unsqueeze(0),
            types.int().unsqueeze(0),
            image_grid_thw=image_grids,
            video_grid_thw=video_grids,
            **timing,
        )
        positions = consecutive(positions[:, 0], types)
        return positions[:, :-1], int(positions[0, -1])


class GridCursor:
    """Hands each sample the grids of its own placeholders, in order, and counts that none is missing or left."""

    def __init__(self, grids: T | None, merge_area: int, kind: str):
        self.grids = None if grids is None else on_host(grids)
        self.tokens = [] if grids is None else (self.grids.prod(dim=1) // merge_area).tolist()
        self.kind, self.next = kind, 0

    def take(self, wanted: int, name: Callable[[], str]) -> T | None:
        """(n, 3) grids whose tokens fill the `wanted` placeholders of the next sample exactly; None without any. Raises
        DataError where they do not. name: of the sample, for the error."""
        start, found = self.next, 0
        while found < wanted and self.next < len(self.tokens):
            found += self.tokens[self.next]
            self.next += 1
        if found != wanted:
            raise DataError(f"{name()} has {wanted} {self.kind} tokens, its {self.kind}s have {found} features")
        return self.grids[start : self.next] if wanted else None

    def finish(self) -> None:
        """Raise DataError when some are left."""
        if self.next != len(self.tokens):
            raise DataError(f"{len(self.tokens) - self.next} {self.kind}(s) of the batch have no placeholder tokens")


def consecutive(positions: T, types: T) -> T:
    """Positions (3, L) with each run of one token type (L) moved to start one above the largest before it."""
    ends = [*(types.diff().nonzero().flatten() + 1).tolist(), len(types)]
    moved, start, following = [], 0, 0
    for end in ends:
        block = positions[:, start:end]
        moved.append(block - block.min() + following)
        start, following = end, int(moved[-1].max()) + 1
    return torch.cat(moved, dim=1)


def text_positions(inputs: ModelInputs) -> T:
    """(rows, S): 0, 1, 2, … over the real tokens of each sample, 0 on padding."""
    if inputs.packed_seq_lens is not None:
        device = inputs.sequences.device
        return torch.cat([torch.arange(length, device=device) for length in inputs.packed_seq_lens]).unsqueeze(0)
    mask = inputs.attention_mask.long()
    return (mask.cumsum(dim=-1) - 1).clamp(min=0) * mask


def real_tokens(inputs: ModelInputs) -> list[T]:
    """Of each sample, where its real tokens are in the flattened (rows * S) inputs; on the host."""
    mask, found, offset = on_host(inputs.attention_mask).flatten() != 0, [], 0
    for width in inputs.sample_lengths:
        found.append(offset + mask[offset : offset + width].nonzero().squeeze(1))
        offset += width
    return found


class PatchConv3d(nn.Conv3d):
    """The patch embedding of a Qwen-VL tower: a convolution over patches of exactly its kernel's size.

    Each patch then gives one output, a product with the kernel, which PyTorch's convolution computes much more slowly.
    Parameters, names and hooks are those of `nn.Conv3d`; inputs of other sizes are convolved as before.
    """

    @classmethod
    def adopt(cls, convolution: nn.Module) -> None:
        """Turn a plain nn.Conv3d into a PatchConv3d in place; anything else (an adapter around one) stays as it is."""
        if type(convolution) is nn.Conv3d and convolution.groups == 1 and convolution.padding == (0, 0, 0):
            convolution.__class__ = cls

    def forward(self, patches: T) -> T:
        """(N, channels, frames, height, width) to (N, features, 1, 1, 1) where each is as large as the kernel."""
        if patches.shape[2:] != self.weight.shape[2:]:
            return super().forward(patches)
        features = patches.flatten(1) @ self.weight.flatten(1).t()
        if self.bias is not None:
            features = features + self.bias
        return features[..., None, None, None]
