"""The transformer under an actor or a critic: right positions, packing, and images that match their placeholders."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import EllipsisType

import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from transformers import Cache, PreTrainedModel

from ...errors import ConfigError
from ...experience.model_inputs import ModelInputs
from ...experience.vision import VisionTensors
from ...runtime import collectives
from ...runtime.sequence import SequenceGroup
from ..attention import Segments, attend_by_segments
from .families import family_of
from .sequence import SlicedSequence
from .shared_prefix import SharedSequence

T = torch.Tensor


@dataclass
class HiddenStates:
    """values (n, H): of the tokens that were asked for, or of the `own` (n) among those N that are on this rank."""

    values: T
    own: T | EllipsisType = ...
    count: int = 0
    sequence: SequenceGroup | None = None

    def joined(self, results: T) -> T:
        """(N, ...) from results (n, ...) of this rank's tokens: with those of the other ranks; see
        `SequenceGroup.joined`."""
        return results if self.sequence is None else self.sequence.joined(results, self.own, self.count)


class Backbone:
    """Runs the base model (without its head) of a transformers checkpoint over `ModelInputs`.

    A helper beside the module tree, not a module: the parameters belong to the model that it is given.
    share_prefix: compute the prompt of a group once (`shared_prefix.py`); sequence: the ranks that hold a batch
    together (`sequence.py`). ConfigError where one of them is not proven. stands_in: whether a blank medium stands for
    one that a batch lacks; a loop without other ranks may leave it out.
    """

    stands_in = True

    def __init__(self, model: PreTrainedModel, share_prefix: bool = False, sequence: SequenceGroup | None = None):
        self.config = model.config
        self.base: nn.Module = model.base_model
        self.family = family_of(self.config)
        self.family.attach(self.base)
        self.by_segments = self.family.unproven is None and attend_by_segments(self.base)
        self.share_prefix, self.sequence = share_prefix, sequence
        for name, wanted in (("share_prefix", share_prefix), ("sp_size", sequence is not None)):
            if wanted and not self.by_segments:
                raise ConfigError(
                    f"{name} is not proven for {self.family.unproven or f'model type {self.config.model_type!r}'} "
                    f"with attention {self.config._attn_implementation}: leave it out"
                )
        self.slices = None if sequence is None else SlicedSequence(sequence, self.base, self.family.towers)

    def hidden_states(self, inputs: ModelInputs) -> T:
        """(rows * S, H): last hidden states. Raises DataError when images and placeholders do not match."""
        if inputs.is_packed:
            self.family.require_packing()
        positions, types = self._positions(inputs)
        return self._forward(inputs, positions, types, use_cache=False).flatten(0, 1)

    def hidden_at(self, inputs: ModelInputs, indices: T) -> HiddenStates:
        """Last hidden states of some tokens (N), numbered over the flattened (rows * S) sequences.

        Where `share_prefix` is on, the prompt of a group is computed once. With ranks that hold a batch together each
        has those of its slice alone; all of them call it with the same batch. Raises as `hidden_states`.
        """
        shared = SharedSequence.of(inputs) if self.share_prefix else None
        if shared is None and self.sequence is None:
            return HiddenStates(self.hidden_states(inputs)[indices])
        shared = shared or SharedSequence.alone(inputs)
        positions, types = self._positions(inputs)
        with self.slices or nullcontext():
            hidden = self._forward(
                shared.inputs(inputs),
                shared.select(positions),
                shared.select(types),
                shared.segments(self.sequence),
                use_cache=False,
            )
        tokens, hidden = shared.indices[indices], hidden.squeeze(0)
        if self.sequence is None:
            return HiddenStates(hidden[tokens])
        first = self.sequence.index * len(hidden)
        own = ((tokens >= first) & (tokens < first + len(hidden))).nonzero().squeeze(1)
        return HiddenStates(hidden[tokens[own] - first], own, len(indices), self.sequence)

    def prefill(self, inputs: ModelInputs, cache: Cache) -> tuple[T, T]:
        """Run left-padded prompts (B, S) into `cache`: (last hidden states (B, H), positions of the next token).

        The positions are (B, 1), or (4, B, 1) with M-RoPE; `decode` takes them, and text counts on from them.
        """
        # One text token more shows where text goes on; its id is never looked up.
        longer = replace(
            inputs,
            sequences=F.pad(inputs.sequences, (0, 1), value=-1),
            attention_mask=F.pad(inputs.attention_mask, (0, 1), value=1),
        )
        positions, types = self._positions(longer)
        hidden = self._forward(inputs, positions[..., :-1], types[..., :-1], use_cache=True, past_key_values=cache)
        return hidden[:, -1], positions[..., -1:]

    def decode(self, tokens: T, attention_mask: T, positions: T, cache: Cache) -> T:
        """Last hidden states (B, H) of one more token a row; attention_mask (B, cached + 1)."""
        output = self.base(
            input_ids=tokens.unsqueeze(1),
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def _positions(self, inputs: ModelInputs) -> tuple[T, T]:
        """(position_ids, token types (rows, S))."""
        types = self.family.token_types(inputs.sequences)
        return self.family.positions(inputs, types), types

    def _forward(self, inputs: ModelInputs, positions: T, types: T, segments: Segments | None = None, **cache) -> T:
        """(rows, S, H), or this rank's slice of the row. segments: of a packed row, None for its samples."""
        length = inputs.sequences.shape[1]
        for kind in self._missing_media(inputs):
            inputs, positions, types = self._with_blank(kind, inputs, positions, types)
        if self.slices is not None and self.slices.active:
            inputs, positions, types = self._evened(inputs, positions, types)
        blank = inputs.sequences.shape[1] - length
        arguments: dict = {
            "input_ids": inputs.sequences,
            "attention_mask": None if inputs.is_packed else inputs.attention_mask,
            "position_ids": positions,
            **cache,
            **self.family.arguments(inputs, types),
        }
        if segments is None and inputs.is_packed and self.by_segments:
            segments = Segments(inputs.packed_seq_lens, inputs.sequences.device)
        if segments is not None:
            segments = segments.followed_by(blank)
            arguments |= {"attention_mask": segments.mask, "segments": segments}
        hidden = self.base(**arguments).last_hidden_state
        if segments is not None:
            segments.check_used()
        if blank and "past_key_values" in cache:
            cache["past_key_values"].crop(-blank)
        return hidden if self.slices is not None and self.slices.active else hidden[:, :length]

    def _missing_media(self, inputs: ModelInputs) -> list[str]:
        """Kinds of media that this batch lacks and a blank one must stand for, so that all ranks run the same modules.

        The vision tower runs once for each kind. ZeRO-1/2 reduce gradients in the order of use: it must run at least
        once. ZeRO-3 gathers weights in that order: it must run equally often on every rank, and the ranks agree on it
        here.
        """
        kinds = list(self.family.media) if self.stands_in else []
        if not kinds:
            return []
        tensors = [self.family.media[kind] for kind in kinds]
        present = torch.tensor([inputs.vision.has_any(name) for name in tensors]).float()
        wanted = present
        if is_zero_param(next(self.base.parameters())):
            wanted = collectives.all_reduce_max(present)
        if not wanted.any():
            return kinds[:1]
        return [kind for kind, has, needs in zip(kinds, present, wanted) if needs and not has]

    def _evened(self, inputs: ModelInputs, positions: T, types: T) -> tuple[ModelInputs, T, T]:
        """The row with as many tokens behind it as the ranks need for slices of one length."""
        count = -inputs.sequences.shape[1] % self.sequence.size
        media = self.family.image_token_id, self.family.video_token_id
        text = next(token for token in range(3) if token not in media)
        longer = replace(inputs, sequences=F.pad(inputs.sequences, (0, count), value=text))
        return longer, F.pad(positions, (0, count)), F.pad(types, (0, count))

    def _with_blank(self, kind: str, inputs: ModelInputs, positions: T, types: T) -> tuple[ModelInputs, T, T]:
        """The inputs with the tokens of a blank image or video at the end of the first row.

        Nothing comes after them, so no other token sees them, and their own output is dropped.
        """
        device = inputs.sequences.device
        media, count = self.family.blank(kind)
        ids = inputs.sequences[:, -1:].repeat(1, count)
        mark = torch.zeros_like(ids, dtype=types.dtype)
        image = kind == "image"
        ids[0] = self.family.image_token_id if image else self.family.video_token_id
        mark[0] = 1 if image else 2
        longer = replace(
            inputs,
            sequences=torch.cat([inputs.sequences, ids], dim=1),
            attention_mask=torch.cat([inputs.attention_mask, mark.bool().to(inputs.attention_mask.dtype)], dim=1),
            vision=VisionTensors([inputs.vision.joined() | media.to(device).joined()]),
        )
        later = positions[..., -1:] + torch.arange(1, count + 1, device=device)
        return longer, torch.cat([positions, later], dim=-1), torch.cat([types, mark], dim=1)
