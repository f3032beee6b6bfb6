"""The transformer under an actor or a critic: right positions, packing, and images that match their placeholders."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from transformers import Cache, PreTrainedModel

from ...batches.model_inputs import ModelInputs
from ...batches.vision import VisionTensors
from ...errors import ConfigError, DataError
from ...strategy import collectives
from .modality import ActorModality, get_modality, require_packing
from .positions import MRopePositions, packed_text_positions, text_positions, token_types
from .vision_cache import share_repeated_media

T = torch.Tensor


class Backbone:
    """Runs the base model (without its head) of a transformers checkpoint over `ModelInputs`.

    A helper beside the module tree, not a module: the parameters belong to the model that it is given.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.base: nn.Module = model.base_model
        self.vision = get_modality(self.config) is ActorModality.VISION_LANGUAGE
        values = self.config.to_dict()
        self.image_token_id = values.get("image_token_id", values.get("image_token_index"))
        self.video_token_id = values.get("video_token_id", values.get("video_token_index"))
        # Only models with 3-D positions have this method; others place text tokens by themselves.
        self.mrope = MRopePositions(self.base) if hasattr(self.base, "get_rope_index") else None
        if self.mrope is not None and hasattr(self.base, "visual"):
            share_repeated_media(self.base.visual)

    def hidden_states(self, inputs: ModelInputs) -> T:
        """(rows * S, H): last hidden states. Raises DataError when images and placeholders do not match."""
        if inputs.is_packed:
            require_packing(self.config)
        positions, types = self._positions(inputs)
        return self._forward(inputs, positions, types, use_cache=False).flatten(0, 1)

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

    def _forward(self, inputs: ModelInputs, positions: T, types: T, **cache) -> T:
        """(rows, S, H)"""
        length = inputs.sequences.shape[1]
        for kind in self._missing_media(inputs) if self.vision else ():
            inputs, positions, types = self._with_blank(kind, inputs, positions, types)
        blank = inputs.sequences.shape[1] - length
        arguments: dict = {
            "input_ids": inputs.sequences,
            "attention_mask": None if inputs.is_packed else inputs.attention_mask,
            "position_ids": positions,
            **cache,
        }
        if self.vision:
            arguments |= self._vision_arguments(inputs, types)
        hidden = self.base(**arguments).last_hidden_state
        if blank and "past_key_values" in cache:
            cache["past_key_values"].crop(-blank)
        return hidden[:, :length]

    def _missing_media(self, inputs: ModelInputs) -> list[str]:
        """Kinds of media that this batch lacks and a blank one must stand for, so that all ranks run the same modules.

        The vision tower runs once for images and once for videos. ZeRO-1/2 reduce gradients in the order of use: it
        must run at least once. ZeRO-3 gathers weights in that order: it must run equally often on every rank, and the
        ranks agree on it here.
        """
        names = inputs.vision.names
        present = torch.tensor(["pixel_values" in names, "pixel_values_videos" in names]).float()
        wanted = present
        if is_zero_param(next(self.base.parameters())):
            wanted = collectives.all_reduce_max(present)
        if not wanted.any():
            return ["image"]
        return [kind for kind, has, needs in zip(("image", "video"), present, wanted) if needs and not has]

    def _with_blank(self, kind: str, inputs: ModelInputs, positions: T, types: T) -> tuple[ModelInputs, T, T]:
        """The inputs with the tokens of a blank image or video at the end of the first row.

        Nothing comes after them, so no other token sees them, and their own output is dropped.
        """
        device = inputs.sequences.device
        pixels, grids, count = self._blank()
        ids = inputs.sequences[:, -1:].repeat(1, count)
        mark = torch.zeros_like(ids, dtype=types.dtype)
        image = kind == "image"
        ids[0] = self.image_token_id if image else self.video_token_id
        mark[0] = 1 if image else 2
        names = ("pixel_values", "image_grid_thw") if image else ("pixel_values_videos", "video_grid_thw")
        media = VisionTensors.of(**dict(zip(names, (pixels, grids)))).to(device)
        longer = replace(
            inputs,
            sequences=torch.cat([inputs.sequences, ids], dim=1),
            attention_mask=torch.cat([inputs.attention_mask, mark.bool().to(inputs.attention_mask.dtype)], dim=1),
            vision=VisionTensors([inputs.vision.joined() | media.joined()]),
        )
        later = positions[..., -1:] + torch.arange(1, count + 1, device=device)
        return longer, torch.cat([positions, later], dim=-1), torch.cat([types, mark], dim=1)

    def _blank(self) -> tuple[T, T | None, int]:
        """(pixel values, grids or None, tokens) of the smallest image or video that the model takes."""
        vision, values = self.config.vision_config, self.config.to_dict()
        if self.mrope is not None:
            merge, patch = vision.spatial_merge_size, vision.patch_size
            width = vision.in_channels * vision.temporal_patch_size * patch * patch
            return torch.zeros(merge * merge, width), torch.tensor([[1, merge, merge]]), 1
        if "image_seq_length" not in values:
            raise ConfigError(
                f"model type {self.config.model_type!r} cannot run on a batch without images: how many tokens an image "
                "takes is not in its configuration"
            )
        return (
            torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size),
            None,
            values["image_seq_length"],
        )

    def _vision_arguments(self, inputs: ModelInputs, types: T) -> dict:
        arguments: dict = inputs.vision.joined()
        arguments.pop("second_per_grid_ts", None)
        if self.mrope is not None:
            arguments["mm_token_type_ids"] = types
        elif "pixel_values" in arguments and arguments["pixel_values"].dim() == 4:
            _check_even(types, arguments["pixel_values"], inputs.sample_ids)
        return arguments

    def _positions(self, inputs: ModelInputs) -> tuple[T, T]:
        """(position_ids, token types): (rows, S) ids for text-only models, (4, rows, S) with M-RoPE."""
        device = inputs.sequences.device
        text = (
            packed_text_positions(inputs.packed_seq_lens, device)
            if inputs.packed_seq_lens is not None
            else text_positions(inputs.attention_mask)
        )
        types = token_types(inputs.sequences, self.image_token_id, self.video_token_id)
        if self.mrope is None:
            return text, types
        return torch.cat([text.unsqueeze(0), self._mrope_positions(inputs, types)]), types

    def _mrope_positions(self, inputs: ModelInputs, types: T) -> T:
        """(3, rows, S) long on the inputs' device; worked out on the host, where the patterns are compared."""
        positions = torch.zeros(3, *types.shape, dtype=torch.long)
        host_types, mask = types.cpu(), inputs.attention_mask.bool().cpu()
        vision = inputs.vision.joined()
        images = _GridCursor(vision.get("image_grid_thw"), self._merge_area(), "image", inputs.sample_ids)
        videos = _GridCursor(vision.get("video_grid_thw"), self._merge_area(), "video", inputs.sample_ids)
        seconds = vision["second_per_grid_ts"].cpu() if "second_per_grid_ts" in vision else None
        if inputs.packed_seq_lens is not None:
            ends = torch.tensor(inputs.packed_seq_lens).cumsum(0).tolist()
            places = [(0, slice(end - n, end)) for end, n in zip(ends, inputs.packed_seq_lens)]
        else:
            places = [(row, mask[row]) for row in range(types.shape[0])]
        for sample, (row, where) in enumerate(places):
            own = host_types[row][where]
            first_video = videos.next
            grids = images.take(own, 1, sample), videos.take(own, 2, sample)
            timing = None if seconds is None else seconds[first_video : videos.next]
            positions[:, row, where] = self.mrope(own, *grids, timing)
        images.finish()
        videos.finish()
        return positions.to(types.device)

    def _merge_area(self) -> int:
        return self.config.vision_config.spatial_merge_size**2


def _check_even(types: T, pixels: T, sample_ids: T | None) -> None:
    """For models that give every image the same number of tokens. Raises DataError where some are missing or left."""
    counts, images = (types == 1).sum(dim=1).tolist(), len(pixels)
    if not sum(counts) or sum(counts) % images:
        names = range(len(counts)) if sample_ids is None else sample_ids.tolist()
        listed = ", ".join(f"sample {name}: {count}" for name, count in zip(names, counts))
        raise DataError(f"{sum(counts)} image tokens do not divide over {images} image(s) ({listed})")


class _GridCursor:
    """Hands each sample the grids of its own placeholders, in order, and counts that none is missing or left."""

    def __init__(self, grids: T | None, merge_area: int, kind: str, sample_ids: T | None):
        self.grids = None if grids is None else grids.cpu()
        self.tokens = [] if grids is None else (self.grids.prod(dim=1) // merge_area).tolist()
        self.kind, self.next, self.sample_ids = kind, 0, sample_ids

    def take(self, types: T, value: int, sample: int) -> T | None:
        """(n, 3) grids whose tokens fill this sample's placeholders exactly. Raises DataError where they do not."""
        wanted = int((types == value).sum())
        start, found = self.next, 0
        while found < wanted and self.next < len(self.tokens):
            found += self.tokens[self.next]
            self.next += 1
        if found != wanted:
            name = f"sample {sample} of the batch" if self.sample_ids is None else f"sample {self.sample_ids[sample]}"
            raise DataError(f"{name} has {wanted} {self.kind} tokens, its {self.kind}s have {found} features")
        return self.grids[start : self.next] if wanted else None

    def finish(self) -> None:
        if self.next != len(self.tokens):
            raise DataError(f"{len(self.tokens) - self.next} {self.kind}(s) of the batch have no placeholder tokens")
