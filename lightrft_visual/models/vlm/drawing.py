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

    first: id of the first drawn token. tokens: of an image. begin_id: after which an image stands in a prompt.
    kept_ids: other tokens of a prompt that the half without it keeps; blank_id: what stands for its others. features:
    from hidden states (N, H) to what the head reads. head: to logits of the codes. pixels: from codes (N, tokens) to
    images (N, C, H, W) in -1..1.
    """

    first: int
    tokens: int
    begin_id: int
    kept_ids: tuple[int, ...]
    blank_id: int
    features: Callable[[T], T]
    head: LogProbLinear
    pixels: Callable[[T], T]

    def without_prompt(self, ids: T) -> T:
        """Prompt ids (..., S) of the half without the prompt: equally many, blanked out up to the last `begin_id`."""
        begins = (ids == self.begin_id).long().flip(-1).cumsum(dim=-1).flip(-1)  # from each token on
        kept = torch.isin(ids, torch.tensor((*self.kept_ids, self.begin_id), device=ids.device)) | (begins == 0)
        return torch.where(kept, ids, torch.full_like(ids, self.blank_id))

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
        actions = (inputs.action_indices() + 1).clamp(max=len(ids) - 1)  # rows of masked columns may be beyond the end
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
        return longer, longer.action_indices()[len(drawn) :]

    def _padded(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        prompt = inputs.sequences.shape[1] - inputs.action_mask.shape[1]
        own = inputs.sequences[index]
        half = torch.cat([self.without_prompt(own[:, :prompt]), own[:, prompt:]], dim=1)
        sequences = torch.cat([inputs.sequences, half])
        return replace(inputs, sequences=sequences, attention_mask=_extended(inputs.attention_mask, index))

    def _packed(self, inputs: ModelInputs, index: list[int]) -> ModelInputs:
        lengths, actions = inputs.packed_seq_lens, inputs.num_actions
        parts, masks, last = [inputs.sequences], [inputs.attention_mask], inputs.attention_mask[0, -1]
        samples = inputs.sequences.split(lengths, dim=1)
        for number, position in enumerate(index, start=1):
            prompt = lengths[position] - actions[position]
            parts += [self.without_prompt(samples[position][:, :prompt]), samples[position][:, prompt:]]
            masks.append(torch.full_like(samples[position], last + number, dtype=inputs.attention_mask.dtype))
        return replace(
            inputs,
            sequences=torch.cat(parts, dim=1),
            attention_mask=torch.cat(masks, dim=1),
            packed_seq_lens=[*lengths, *(lengths[position] for position in index)],
            num_actions=[*actions, *(actions[position] for position in index)],
        )


def _extended(values: T | None, index: list[int]) -> T | None:
    return None if values is None else torch.cat([values, values[index]])
