"""Ragged data of B samples: rows behind each other ("flat"), or a padded rectangle. Linear time, differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..errors import DataError

T = torch.Tensor


def zero_pad_sequences(sequences: Sequence[T], side: str = "left") -> T:
    """Stack tensors (L_i) to (B, max L), zeros at `side` ("left" or "right", else AssertionError).

    The last dimension is the padded one. Raises DataError without sequences. After LightRFT.
    """
    if side not in ("left", "right"):
        raise AssertionError(f"side must be 'left' or 'right', not {side!r}")
    if not sequences:
        raise DataError("no sequences to pad")
    width = max(sequence.size(-1) for sequence in sequences)
    missing = [width - sequence.size(-1) for sequence in sequences]
    pads = [(count, 0) if side == "left" else (0, count) for count in missing]
    return torch.stack([F.pad(sequence, pad) for sequence, pad in zip(sequences, pads)])


def span_mask(spans: Sequence[tuple[int, int]], width: int, device: torch.device | None = None) -> T:
    """(B, width) bool: true in columns start <= column < stop of each sample's span."""
    bounds = torch.tensor(spans, dtype=torch.long, device=device).reshape(-1, 2)
    column = torch.arange(width, device=device)
    return (column >= bounds[:, :1]) & (column < bounds[:, 1:])


def scatter_samples(flat: T, spans: Sequence[tuple[int, int]], width: int) -> T:
    """flat (sum of lengths, ...) to (B, width, ...): each sample's rows in its span, zeros elsewhere."""
    padded = flat.new_zeros((len(spans), width, *flat.shape[1:]))
    padded[span_mask(spans, width, flat.device)] = flat
    return padded


def gather_samples(padded: T, spans: Sequence[tuple[int, int]]) -> T:
    """padded (B, width, ...) to flat (sum of lengths, ...): the inverse of `scatter_samples`."""
    if all(span == (0, padded.shape[1]) for span in spans):
        return padded.flatten(0, 1)
    return padded[span_mask(spans, padded.shape[1], padded.device)]


def unpack_actions(flat: T, num_actions: Sequence[int]) -> T:
    """Packed per-action values (1, sum of A) or (sum of A) to (B, max A), right-padded with zeros.

    Gradients flow through. Raises DataError when the length is not the sum of `num_actions`.
    """
    flat = flat.reshape(-1)
    if flat.numel() != sum(num_actions):
        raise DataError(f"{flat.numel()} per-action values for {sum(num_actions)} actions")
    return scatter_samples(flat, [(0, count) for count in num_actions], max(num_actions, default=0))


def pack_actions(padded: T, num_actions: Sequence[int]) -> T:
    """Right-padded per-action values (B, A) to packed (1, sum of A). Gradients flow through."""
    if len(padded) != len(num_actions) or max(num_actions, default=0) > padded.shape[1]:
        raise DataError(f"per-action values of shape {tuple(padded.shape)} do not hold {list(num_actions)} actions")
    return gather_samples(padded, [(0, count) for count in num_actions]).unsqueeze(0)
