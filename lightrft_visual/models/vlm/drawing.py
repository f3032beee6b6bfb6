"""How a language model draws: tokens of an image behind those of text, by a head of their own, with guidance.

In sequences a drawn token is its code plus `first`, the size of the text vocabulary, so that one column of ids says of
each token which head it comes from. With classifier-free guidance (arXiv 2207.12598, for tokens 2203.13131) the logits
are u + scale * (c - u): c with the prompt, u without it. The half without the prompt is another sample behind the
batch's own ones, its prompt blanked out, so that both halves go through the model in one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from PIL import Image

from ...data.imaging import to_pil
from ...experience.model_inputs import ModelInputs
from ...experience.vision import VisionTensors
from ..logprobs import LogProbLinear

T = torch.Tensor


@dataclass
class Drawing:
    """The parts of a model that draw; a helper beside the module tree, as `Backbone`.

    first: id of the first drawn token. tokens: of an image, ends of rows included. begin_id: after which an image, or
    what is said of its size, stands in a prompt. kept_ids: other tokens of a prompt that the half without it keeps;
    blank_id: what stands for its others. features: from hidden states (N, H) to what the head reads. head: to logits of
    the codes. pixels: from codes (N, codes) to images (N, C, H, W) in -1..1. row, row_end: where each row of an image
    ends with a token of its own, which is not sampled, the codes of a row and the id of that token.
    """

    first: int
    tokens: int
    begin_id: int
    kept_ids: tuple[int, ...]
    blank_id: int
    features: Callable[[T], T]
    head: LogProbLinear | CodesOfHead
    pixels: Callable[[T], T]
    row: int | None = None
    row_end: int | None = None

    def without_prompt(self, ids: T) -> T:
        """Prompt ids (..., S) of the half without the prompt: equally many, blanked out up to the last `begin_id`."""
        begins = (ids == self.begin_id).long().flip(-1).cumsum(dim=-1).flip(-1)  # from each token on
        kept = torch.isin(ids, torch.tensor((*self.kept_ids, self.begin_id), device=ids.device)) | (begins == 0)
        return torch.where(kept, ids, torch.full_like(ids, self.blank_id))

    def ends_row(self, step: int) -> bool:
        """Whether token `step` of an image is the end of a row."""
        return self.row is not None and step % (self.row + 1) == self.row

    def codes(self, tokens: T) -> T:
        """Codes (N, codes) of drawn tokens (N, tokens)."""
        if self.row is not None:
            tokens = tokens.unflatten(1, (-1, self.row + 1))[..., : self.row].flatten(1)
        return tokens - self.first

    def is_given(self, targets: T, drawn: T) -> T:
        """(N) bool: actions that were not sampled, of `targets` (N) ids, `drawn` (N) true in images. They have
        log-prob 0."""
        return drawn & (targets == self.row_end) if self.row_end is not None else torch.zeros_like(drawn)

    def guided(self, hidden: T, unguided: T | None, scale: float) -> T:
        """What the head reads (N, F) of hidden states with and without the prompt; None: no guidance.

        The head is linear, so mixing what it reads mixes its logits. Both halves go through its modules in one call:
        under ZeRO-3 each call gathers weights from all ranks, also from those that guide nothing.
        """
        if unguided is None:
            return self.features(hidden)
        own, other = self.features(torch.cat([hidden, unguided])).chunk(2)
        return other + scale * (own - other)

    @torch.no_grad()
    def images(self, codes: T) -> list[Image.Image]:
        """Decoded codes (N, tokens)."""
        pixels = self.pixels(codes).float()
        return [to_pil(((image + 1) / 2).clamp(0, 1).cpu()) for image in pixels]

    def drawn_samples(self, inputs: ModelInputs) -> T:
        """(B) bool: the samples whose response is an image."""
        ids = inputs.sequences.flatten()
        actions = (inputs.action_rows() + 1).clamp(max=len(ids) - 1)  # rows of masked columns may be beyond the end
        return ((ids[actions] >= self.first) & inputs.action_mask).any(dim=1)

    def with_halves(self, inputs: ModelInputs, drawn: T) -> tuple[ModelInputs, T]:
        """The inputs with a half without prompt behind them for each of the samples `drawn` (B) bool, and where in the
        flattened hidden states its actions (D, A) are predicted from."""
        index = drawn.nonzero().flatten().tolist()
        halves = self._packed(inputs, index) if inputs.is_packed else self._padded(inputs, index)
        vision = inputs.vision
        if len(vision) == len(drawn):
            vision = VisionTensors([*vision.samples, *({} for _ in index)])
        ids = {name: _extended(getattr(inputs, name), index) for name in ("sample_ids", "group_ids")}
        longer = replace(halves, action_mask=_extended(inputs.action_mask, index), vision=vision, **ids)
        return longer, longer.action_rows()[len(drawn) :]

    def _padded(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        prompt = inputs.sequences.shape[1] - inputs.action_mask.shape[1]
        own = inputs.sequences[index]
        half = torch.cat([self.without_prompt(own[:, :prompt]), own[:, prompt:]], dim=1)
        sequences = torch.cat([inputs.sequences, half])
        return replace(inputs, sequences=sequences, attention_mask=_extended(inputs.attention_mask, index))

    def _packed(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        lengths, actions = inputs.packed_seq_lens, inputs.num_actions
        parts, rows, last = [inputs.sequences], [inputs.attention_mask], inputs.attention_mask[0, -1]
        samples = inputs.sequences.split(lengths, dim=1)
        for number, place in enumerate(index, start=1):
            prompt = lengths[place] - actions[place]
            parts += [self.without_prompt(samples[place][:, :prompt]), samples[place][:, prompt:]]
            rows.append(torch.full_like(samples[place], last + number, dtype=inputs.attention_mask.dtype))
        return replace(
            inputs,
            sequences=torch.cat(parts, dim=1),
            attention_mask=torch.cat(rows, dim=1),
            packed_seq_lens=[*lengths, *(lengths[place] for place in index)],
            num_actions=[*actions, *(actions[place] for place in index)],
        )


class CodesOfHead:
    """A head of text and codes together, seen as one of the `count` codes behind the id `first` alone."""

    def __init__(self, head: LogProbLinear, first: int, count: int):
        self.head, self.first, self.count = head, first, count

    def __call__(
        self,
        hidden: T,
        codes: T | None = None,
        temperature: float | T = 1.0,
        with_entropy: bool = True,
        in_float32: bool = False,
    ) -> T | tuple[T, T | None]:
        """As `LogProbLinear`: logits (N, count), with `codes` (N) their log-probs and entropies."""
        if codes is None:
            return self.head(hidden, in_float32=in_float32)[:, self.first : self.first + self.count]
        ids = torch.arange(self.head.out_features, device=hidden.device)
        others = ids[(ids < self.first) | (ids >= self.first + self.count)]
        return self.head(hidden, codes + self.first, temperature, others, with_entropy)


def _extended(values: T | None, index: list[int]) -> T | None:
    return None if values is None else torch.cat([values, values[index]])
