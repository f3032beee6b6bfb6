"""The policy: a transformers model that scores the response tokens of rollouts and experience."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from transformers import Cache, PreTrainedModel

from ...errors import ConfigError, DataError
from ...experience.rollouts import ScoringRule
from ...experience.types import ModelInputs, media_of_ranks
from ...experience.vision import VisionTensors
from ...runtime.checkpoint.manifest import is_adapted
from ...runtime.host_copies import on_host, to_device
from ...runtime.sequence import SequenceGroup
from ..attention import Segments, attend_by_segments
from ..logprobs import LogProbLinear
from ..routing import Routers, by_sample
from .families import family_of
from .shared_prefix import SharedSequence, SlicedSequence

if TYPE_CHECKING:
    from peft import PeftModel

T = torch.Tensor


@dataclass
class HiddenStates:
    """values (n, H): of the tokens that were asked for, or of the `own` (n) among those N that are on this rank.
    experts: of each sample, where the routers note their choices."""

    values: T
    own: T | EllipsisType = ...
    count: int = 0
    sequence: SequenceGroup | None = None
    experts: list[T] | None = None

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
        if sequence is not None and self.family.carries_state:
            raise ConfigError("sp_size: linear attention carries a state along the whole row; leave it at 1")
        self.routers = Routers.of(self.base)
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
        if self.routers is None or not self.routers.notes(inputs):
            return self._hidden_at(inputs, indices)[0]
        with self.routers.recorded() as passes:
            hidden, at = self._hidden_at(inputs, indices)
        width = inputs.sequences.shape[1]
        chosen = passes[0].unflatten(0, (-1, len(passes[0]) // len(inputs.sequences))) if at is None else passes[0]
        chosen = chosen[:, :width].flatten(0, 1) if at is None else chosen[at]
        return replace(hidden, experts=by_sample(inputs, chosen))

    def _hidden_at(self, inputs: ModelInputs, indices: T) -> tuple[HiddenStates, T | None]:
        """The same, and where in the row that was run each token of the inputs is; None where those are run."""
        shared = SharedSequence.of(inputs) if self.share_prefix else None
        if shared is None and self.sequence is None:
            return HiddenStates(self.hidden_states(inputs)[indices]), None
        shared = shared or SharedSequence.alone(inputs)
        positions, types = self._positions(inputs)
        with self.slices or nullcontext():
            hidden = self._forward(
                shared.inputs(inputs),
                shared.select(positions),
                shared.select(types),
                Segments(shared.lengths, shared.columns.device, shared.continues, self.sequence),
                use_cache=False,
            )
        hidden = hidden.squeeze(0)
        if self.sequence is None:
            return HiddenStates(hidden[shared.indices[indices]]), shared.indices
        # Which are of this slice is known on the host: on the device it would be waited for.
        tokens, first = on_host(shared.indices)[on_host(indices)], self.sequence.index * len(hidden)
        own = ((tokens >= first) & (tokens < first + len(hidden))).nonzero().squeeze(1)
        own, places = to_device(own, hidden.device), to_device(tokens[own] - first, hidden.device)
        return HiddenStates(hidden[places], own, len(indices), self.sequence), shared.indices

    def prefill(self, inputs: ModelInputs, cache: Cache) -> tuple[T, T, T]:
        """Run left-padded prompts (B, S) into `cache`: (last hidden states (B, H), positions of the next token, mask).

        The positions are (B, 1), or (4, B, 1) with M-RoPE, and text counts on from them. The mask is (B, S). Nothing
        stands for media that are lacking: there is no gradient, and where ZeRO-3 divides weights they are whole.
        """
        # One text token more shows where text goes on; its id is never looked up.
        longer = replace(
            inputs,
            sequences=F.pad(inputs.sequences, (0, 1), value=-1),
            attention_mask=F.pad(inputs.attention_mask, (0, 1), value=1),
        )
        positions, types = self._positions(longer)
        hidden = self._forward(inputs, positions[..., :-1], types[..., :-1], use_cache=True, past_key_values=cache)
        return hidden[:, -1], positions[..., -1:], inputs.attention_mask

    def _positions(self, inputs: ModelInputs) -> tuple[T, T]:
        """(position_ids, token types (rows, S))."""
        types = to_device(self.family.token_types(on_host(inputs.sequences)), inputs.sequences.device)
        return self.family.positions(inputs, types), types

    def _forward(self, inputs: ModelInputs, positions: T, types: T, segments: Segments | None = None, **cache) -> T:
        """(rows, S, H), or this rank's slice of the row. segments: of a packed row, None for its samples."""
        given, length = inputs, inputs.sequences.shape[1]
        sliced = self.slices is not None and self.slices.active
        for kind in self._missing_media(inputs) if "past_key_values" not in cache else ():  # decoding: each rank alone
            inputs, positions, types = self._with_blank(kind, inputs, positions, types)
        if sliced:
            inputs, positions, types = self._evened(inputs, positions, types)
        blank = inputs.sequences.shape[1] - length
        arguments: dict = {
            "input_ids": inputs.sequences,
            "attention_mask": None if inputs.is_packed else inputs.attention_mask,
            "position_ids": positions,
            **cache,
            **self.family.arguments(inputs, types),
        }
        if segments is None and inputs.is_packed and (self.by_segments or self.family.carries_state):
            segments = Segments(inputs.packed_seq_lens, inputs.sequences.device)
        if segments is not None:
            segments = arguments["segments"] = segments.followed_by(blank) if blank else segments
            if self.by_segments:
                arguments["attention_mask"] = segments.mask
        if self.routers is not None:
            width = inputs.sequences.shape[1]
            self.routers.follow(given, width, self.sequence.slice_of(width) if sliced else slice(None))
        hidden = self.base(**arguments).last_hidden_state
        if segments is not None and self.by_segments and not segments.used:  # its samples have attended to each other
            raise ConfigError("this model's attention does not take segments: train it padded, without packing_samples")
        return hidden if sliced else hidden[:, :length]

    def _missing_media(self, inputs: ModelInputs) -> list[str]:
        """Kinds of media that this batch lacks and a blank one must stand for, so that all ranks run the same modules.

        The vision tower runs once for each kind. ZeRO-1/2 reduce gradients in the order of use: it must run at least
        once. ZeRO-3 gathers weights in that order: it must run equally often on every rank.
        """
        kinds = self.family.media if self.stands_in else {}
        if not kinds:
            return []
        present = wanted = inputs.vision.media
        if is_zero_param(next(self.base.parameters())):
            wanted = media_of_ranks([inputs])[0] if inputs.media is None else inputs.media
            if present - wanted:
                raise DataError("samples were given media after an update was planned: a hook can do so in on_buffer")
        if wanted.isdisjoint(kinds.values()):
            return list(kinds)[:1]
        return [kind for kind, name in kinds.items() if name in wanted - present]

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
        later = positions[..., -1:] + torch.arange(1, count + 1, device=device)
        longer = replace(
            inputs,
            sequences=torch.cat([inputs.sequences, ids], dim=1),
            attention_mask=torch.cat([inputs.attention_mask, mark.bool().to(inputs.attention_mask.dtype)], dim=1),
            vision=VisionTensors([inputs.vision.joined() | media.to(device).joined()]),
        )
        return longer, torch.cat([positions, later], dim=-1), torch.cat([types, mark], dim=1)


@dataclass
class ActorOutput:
    """log_probs and entropy (nats), each (B, A) float32 with 0 where the action mask is false. experts: of each sample
    (tokens, layers, k), where the routers note their choices. router_loss: (), where they are to be balanced."""

    log_probs: T
    entropy: T | None
    experts: list[T] | None = None
    router_loss: T | None = None


class Actor(nn.Module):
    """Scores responses under the distribution that they were sampled from.

    model: a transformers model with a language-model head, or a peft model around one. banned_ids: tokens that the
    engine never samples; they leave the softmax here too. eos_ids: end tokens, banned on the first tokens of a response
    where the rule says so. share_prefix, sequence: see `Backbone`; ConfigError for a sequence of a model that draws.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        banned_ids: list[int],
        eos_ids: list[int],
        share_prefix: bool = False,
        sequence: SequenceGroup | None = None,
    ):
        super().__init__()
        self.model = model
        transformer = self.transformer
        soft_cap = getattr(transformer.config.get_text_config(), "final_logit_softcapping", None)
        try:
            head = LogProbLinear.adopt(transformer.get_output_embeddings(), soft_cap)
        except TypeError as error:
            raise ConfigError(f"model type {transformer.config.model_type!r} cannot be trained: {error}") from error
        self.head = [head]  # in a list: not a second child module
        self.backbone = Backbone(transformer, share_prefix, sequence)
        self.drawing = self.backbone.family.drawing(transformer)
        if sequence is not None and self.drawing is not None:
            raise ConfigError("sp_size: a model that draws is scored on whole rows; leave it at 1")
        self.register_buffer("banned_ids", torch.tensor(banned_ids, dtype=torch.long), persistent=False)
        self.register_buffer("eos_ids", torch.tensor(sorted(set(eos_ids)), dtype=torch.long), persistent=False)
        with_eos = sorted({*banned_ids, *eos_ids})
        self.register_buffer("banned_with_eos", torch.tensor(with_eos, dtype=torch.long), persistent=False)

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model, without a peft wrapper around it."""
        return self.model.get_base_model() if is_adapted(self.model) else self.model

    def forward(self, inputs: ModelInputs, rule: ScoringRule, with_entropy: bool = True) -> ActorOutput:
        """Log-probs and entropy (B, A) of every action. Raises DataError when images and placeholders do not match.

        Args:
            inputs: of B samples, padded or packed.
            rule: the distribution that they were sampled from.
            with_entropy: False leaves the entropy None.
        """
        mask = inputs.action_mask
        # Their number is known on the host: on the device it would be waited for.
        found = on_host(mask).flatten().nonzero().squeeze(1)
        indices = to_device(inputs.action_indices().flatten()[found], mask.device)
        counted = to_device(found, mask.device)
        targets = inputs.sequences.flatten()[indices + 1]
        columns, experts = counted % mask.shape[1], None
        if self.drawing is None:
            hidden = self.backbone.hidden_at(inputs, indices)
            scores = self._score(hidden.values, targets[hidden.own], columns[hidden.own], rule, with_entropy)
            if self.backbone.sequence is not None:
                scores = (None if each is None else hidden.joined(each) for each in scores)
            (log_probs, entropy), experts = scores, hidden.experts
        else:
            log_probs, entropy = self._score_either(inputs, indices, counted, targets, rule, with_entropy)
        balance = None if self.backbone.routers is None else self.backbone.routers.balance()
        padded = [
            each.new_zeros(mask.numel()).index_copy(0, counted, each).view(mask.shape)  # by a mask backward would wait
            for each in ((log_probs, entropy) if with_entropy else (log_probs,))
        ]
        return ActorOutput(padded[0], padded[1] if with_entropy else None, experts, balance)

    def _score_either(
        self, inputs: ModelInputs, indices: T, counted: T, targets: T, rule: ScoringRule, with_entropy: bool
    ) -> tuple[T, T | None]:
        """The same where actions may be tokens of images. Both heads run, on no rows where there are none: ranks of one
        process group stay in step. Which are drawn is known on the host: on the device it would be waited for."""
        count, device, columns = len(indices), indices.device, counted % inputs.action_mask.shape[1]
        actions = self.drawing.drawn_actions(inputs)
        of_image = actions.any(dim=1, keepdim=True).expand_as(actions).flatten()[on_host(counted)]
        drawn = actions.flatten()[on_host(counted)]
        text, image = (to_device(each.nonzero().squeeze(1), device) for each in (~drawn, drawn))
        guided = rule.guidance_scale != 1 and bool(drawn.any())
        if guided:
            inputs, further = self.drawing.with_halves(inputs, actions.any(dim=1))
            indices = torch.cat([indices, further])
        hidden = self.backbone.hidden_at(inputs, indices).values
        words = self._score(hidden[text], targets[text], columns[text], rule, with_entropy)
        halves = to_device(count + drawn[of_image].nonzero().squeeze(1), device)
        unguided = hidden[halves] if guided else None
        features = self.drawing.guided(hidden[image], unguided, rule.guidance_scale)
        codes, temperature = targets[image] - self.drawing.first, _temperature(columns[image], rule)
        pixels = self.drawing.head(features, codes, temperature, with_entropy=with_entropy)
        return tuple(
            None if one is None else one.new_zeros(count).index_copy(0, text, one).index_copy(0, image, other)
            for one, other in zip(words, pixels)
        )

    def _score(self, hidden: T, targets: T, columns: T, rule: ScoringRule, with_entropy: bool):
        """(N) log-probs and entropy of N actions at response positions `columns`."""
        temperature, head = _temperature(columns, rule), self.head[0]
        if not rule.eos_banned_tokens:
            return head(hidden, targets, temperature, self.banned_ids, with_entropy)
        early = columns < rule.eos_banned_tokens
        log_probs, entropy = hidden.new_zeros(len(targets), dtype=torch.float32), None
        entropy = torch.zeros_like(log_probs) if with_entropy else None
        for where, banned in ((early, self.banned_with_eos), (~early, self.banned_ids)):
            part = temperature[where] if isinstance(temperature, T) else temperature
            scored, std = head(hidden[where], targets[where], part, banned, with_entropy)
            log_probs = log_probs.masked_scatter(where, scored)
            entropy = entropy.masked_scatter(where, std) if with_entropy else None
        return log_probs, entropy


def _temperature(columns: T, rule: ScoringRule) -> float | T:
    """Of all actions, or (N) of each where the first tokens have their own."""
    if rule.first_token_temperature is None:
        return rule.temperature
    temperature = torch.full_like(columns, rule.temperature, dtype=torch.float32)
    return temperature.masked_fill(columns == 0, rule.first_token_temperature)


class ValueHead(nn.Linear):
    """Multiplies in float32: advantages are differences of neighbouring values, which bfloat16 would round away."""

    def forward(self, hidden: T) -> T:
        """(N, 1) float32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class Critic(nn.Module):
    """Values of the states that each action was taken in: the position before the action.

    The language-model head is dropped and a value head put in its place, starting at zero, so that first values are 0.
    share_prefix, sequence: see `Backbone`.
    """

    def __init__(self, model: PreTrainedModel, share_prefix: bool = False, sequence: SequenceGroup | None = None):
        super().__init__()
        self.backbone = Backbone(model, share_prefix, sequence)
        self.model = self.backbone.base
        hidden_size = model.config.get_text_config().hidden_size
        self.value_head = ValueHead(hidden_size, 1, bias=True)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, inputs: ModelInputs) -> T:
        """(B, A) float32 values, 0 where the action mask is false."""
        indices = to_device(inputs.action_indices().flatten(), inputs.sequences.device)
        hidden = self.backbone.hidden_at(inputs, indices)
        values = self.value_head(hidden.values).squeeze(-1)
        values = hidden.joined(values).view(inputs.action_mask.shape)
        return values.masked_fill(~inputs.action_mask, 0.0)
