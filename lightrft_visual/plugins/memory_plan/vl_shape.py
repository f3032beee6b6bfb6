"""What a vision-language model and one forward of it hold, from meta tensors: weights, activations, media, logits."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ...config.placement import Device
from ...config.shared import ATTENTION, RECOMPUTES
from ...config.vl import RunConfig
from ...models.attention import Segments, attend_by_segments
from ...models.checkpointed import checkpoint_blocks
from ...models.loading import add_lora, freeze
from ...models.logprobs import chunk_length
from ...models.vlm.families import family_of
from ...rollout.vllm.arguments import token_bytes
from .meta import Held, Work, adapters_in, held_bytes, on_meta, remembered, through_active_experts
from .shapes import language_model
from .zero import FP32, Model

FEW_LAYERS = 3  # that are looked at of a decoder
FEW_TOKENS = 8  # by which operations are counted, which are as many for any number of tokens
HEAD_CALLS, HEAD_PASSES = 20, 10  # operations of a chunk of logits (models/logprobs.py), and how often they touch it
SAMPLER_CALLS = 60  # of choosing a token for each sample (rollout/hf.py, rollout/sampling.py)
LARGEST_IMAGE = 16384 * 28 * 28  # pixels, where max_pixels is not set: the processors' own bound


@dataclass(frozen=True)
class MicroBatch:
    """Tokens of one forward. prompts: different ones among its samples; the vision tower runs once for each.

    lengths, continues: the segments of its one row, as in `Segments`; without lengths its rows are padded.
    """

    rows: int
    length: int
    actions: int
    prompts: int
    lengths: list[int] | None = None
    continues: list[int | None] | None = None

    def twice(self) -> MicroBatch:
        """Its samples, and the same once more behind them."""
        if self.lengths is None:
            return MicroBatch(2 * self.rows, self.length, 2 * self.actions, 2 * self.prompts)
        count, again = len(self.lengths), self.continues
        if again is not None:
            again = [*again, *(None if of is None else of + count for of in again)]
        return MicroBatch(1, 2 * self.length, 2 * self.actions, 2 * self.prompts, 2 * self.lengths, again)

    def over(self, ranks: int) -> MicroBatch:
        """What one of several ranks computes that hold the micro-batch together: a slice of a packed row.

        All answers of a row may lie in one slice.
        """
        if ranks == 1:
            return self
        length = ceil(self.rows * self.length / ranks)
        return MicroBatch(1, length, min(self.actions, length), ceil(self.prompts / ranks), [length])


def shapes_of(config: RunConfig, online: bool = False) -> dict[str, VLShape | None]:
    """Those of a run's policy, critic and teacher, as far as it has them; None for one that is nowhere to be found.

    online: the hub may be asked.
    """
    model, alone = config.model, deepcopy(config)
    alone.model.lora_rank = 0  # adapters are the policy's
    critic = (model.critic_pretrain or model.pretrain) if config.algorithm.estimator.critic else None
    found: dict[str, VLShape | None] = {}
    for name, path in (("policy", model.pretrain), ("critic", critic), ("teacher", model.teacher_pretrain)):
        if path is not None:
            own = language_model(replace(model, pretrain=path), online, config.data.prompt_data)
            found[name] = None if own is None else VLShape(config if name == "policy" else alone, own)
    return found


class VLShape:
    """A run's model on meta tensors, as it will be trained: frozen parts frozen, adapters added.

    whole: as it is loaded. trained: with adapters, where there are any. model: the numbers of that; trained_tensors:
    how many of its tensors train. base: numbers of the checkpoint, which the engine loads. tower: the vision tower,
    None for text-only models. text: configuration of the language model. width: bytes of a weight. sequence: ranks that
    hold a micro-batch together.
    """

    def __init__(self, config: RunConfig, model_config: Any) -> None:
        self.config, self.model_config, self.sequence = config, model_config, config.distributed.sp_size
        self.dtype, self.width = (torch.bfloat16, 2) if config.model.bf16 else (torch.float32, FP32)
        self.family, self.text = family_of(model_config), model_config.get_text_config()
        self.whole = self._loaded()
        with torch.device("meta"):
            self.trained = adapters_in(add_lora(self.whole, config.model), self.dtype)
        self.model = Model.of(self.trained, self.width)
        self.trained_tensors = sum(parameter.requires_grad for parameter in self.trained.parameters())
        self.base = sum(p.numel() for name, p in self.trained.named_parameters() if ".lora_" not in name)
        towers = self.family.towers if self.family.vision else ()
        named = {name.rpartition(".")[2]: module for name, module in self.whole.named_modules()}
        self.tower = next((named[name] for name in towers if name in named), None)

    def _loaded(self) -> nn.Module:
        auto = AutoModelForImageTextToText if self.family.vision else AutoModelForCausalLM
        model = self.config.model
        arguments = {"dtype": self.dtype, "trust_remote_code": model.trust_remote_code}
        arguments |= {"attn_implementation": "eager"} if model.attn_implementation == "eager" else {}  # keeps scores
        transformer = on_meta(lambda: auto.from_config(self.model_config, **arguments))
        checkpoint_blocks(transformer, model.gradient_checkpointing)
        freeze(transformer, model.freeze_prefix)
        through_active_experts(transformer)
        return transformer

    @property
    def patch_side(self) -> int:
        """Pixels of a side of a patch of what is read; 0 for text-only models."""
        return 0 if self.tower is None else _side(self.model_config.vision_config)

    @property
    def drawn_tokens(self) -> int:
        """Of an image that the model may answer with; 0 where it draws none."""
        return (self.family.tokens_per_image or 0) if self.family.draws else 0

    def cache_bytes(self, width: int, length: int) -> float:
        """Keys and values of one token: layers with a window keep as many, others with a state none. Of MLA what it
        makes them of.

        Args:
            width: bytes of a number.
            length: tokens of the sequence.
        """
        text = self.text
        if (rank := getattr(text, "kv_lora_rank", None)) is not None:
            return text.num_hidden_layers * (rank + text.qk_rope_head_dim) * width
        kinds = getattr(text, "layer_types", None) or ["full_attention"]
        window = min(getattr(text, "sliding_window", None) or length, length) / length
        kept = {"sliding_attention": window, "linear_attention": 0.0, "conv": 0.0}
        return token_bytes(text, width) * sum(kept.get(kind, 1.0) for kind in kinds) / len(kinds)

    def media_bytes(self) -> tuple[float, float, float]:
        """(vision tokens, patches, bytes of patches) of one prompt at most. A bound of pixels is of an image, or of a
        frame of a video, of which a prompt may have any number."""
        config, rollout = self.config, self.config.rollout
        images, longest = rollout.limit_mm_image_per_prompt, rollout.prompt_max_len
        if self.tower is None:
            return 0.0, 0.0, 0.0
        vision = self.model_config.vision_config
        per_token = _merged(self.model_config)
        if per_token is None:  # tiles of one size, each with a number of tokens of its own
            tokens = self.family.tokens_per_image or 256
            size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
            tiles = max(1, longest // tokens)
            return tiles * tokens, tiles * (size // self.patch_side) ** 2, tiles * 3 * size * size * FP32
        patches: float = longest * per_token**2
        if not (rollout.limit_mm_video_per_prompt and "video" in self.family.kinds):
            patches = min(patches, images * (config.data.max_pixels or LARGEST_IMAGE) / self.patch_side**2)
        numbers = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * self.patch_side**2
        return patches / per_token**2, patches, patches * numbers * FP32

    # -- activations ---------------------------------------------------------------------------------------------

    def scoring(self, batch: MicroBatch, device: Device) -> float:
        """Most bytes of a forward without gradient over a micro-batch."""
        self.trained.eval()
        batch, embedded = batch.over(self.sequence), self._embedded(batch)
        held = self._decoder(batch, backward=False)
        own = batch.rows * batch.length * self.text.hidden_size * self.width
        head = own + self._head(batch.actions, device, backward=False)
        return max(held.peak, head) + self._tower(batch.prompts, backward=False) + embedded

    def training(self, batch: MicroBatch, device: Device) -> float:
        """Most bytes of a forward and backward over a micro-batch.

        Backward starts at the head, while all that the layers keep is there.
        """
        self.trained.train()
        batch, embedded = batch.over(self.sequence), 2 * self._embedded(batch)
        held = self._decoder(batch, backward=True)
        head = held.kept + self._head(batch.actions, device, backward=True)
        return max(held.peak, head) + self._tower(batch.prompts, backward=True) + embedded

    def work(self, batch: MicroBatch, device: Device, backward: bool, adapters: bool = True) -> Work:
        """Of a forward over a micro-batch.

        Args:
            batch: the micro-batch, before the ranks that hold it together divide it.
            device: that computes.
            backward: whether the backward after it counts too.
            adapters: False for the reference of LoRA, which is the model without them.
        """
        self.trained.train(backward)
        batch = batch.over(self.sequence)
        held = self._decoder(batch, backward, adapters).work
        if batch.lengths is not None and not device.on_cpu:  # one call for all segments, as for padded samples
            held = replace(held, calls=self._calls(backward, adapters))
        return held + self._head_work(batch.actions, device, backward) + self._tower_work(batch.prompts, backward)

    def reading(self, tokens: float, prompts: float) -> Work:
        """Of an engine's forward over so many tokens of prompts, media among them."""
        return Work(2 * self.base * tokens, calls=self._calls(False)) + self._tower_work(prompts, False)

    def one_token(self, rows: int) -> Work:
        """Of the trained model's forward over one more token of so many samples, and of choosing the next."""
        self.trained.eval()
        held = self._decoder(MicroBatch(rows, 1, 0, 0), False).work
        return held + Work(2 * rows * self.whole.get_output_embeddings().weight.numel(), calls=SAMPLER_CALLS)

    def _calls(self, backward: bool, adapters: bool = True) -> float:
        """Operations of the decoder over padded samples."""
        self.trained.train(backward)
        return self._decoder(MicroBatch(1, FEW_TOKENS, 0, 0), backward, adapters).calls

    def _embedded(self, batch: MicroBatch) -> int:
        """The embeddings of a row that several ranks hold together, which each of them has whole before it is cut."""
        return 0 if self.sequence == 1 else batch.rows * batch.length * self.text.hidden_size * self.width

    def _decoder(self, batch: MicroBatch, backward: bool, adapters: bool = True) -> Held:
        """`_decoded`, counted once for each shape. What code of the user's own makes is counted each time."""
        with nullcontext() if adapters or not self.config.model.lora_rank else self.trained.disable_adapter():
            if self.config.model.trust_remote_code or self.config.plugins:
                return self._decoded(batch, backward)
            sizes = self.model_config.to_json_string(use_diff=False)
            shape = f"{sizes} {self.config.model} {batch} {backward} {self.trained.training} {adapters}"
            return remembered(shape, lambda: self._decoded(batch, backward))

    def _decoded(self, batch: MicroBatch, backward: bool) -> Held:
        """The decoder over a micro-batch, with the mask of a padded one.

        Its layers are alike: a deep model holds what a shallow one does and so much more for each further layer.
        """
        base = self.trained.get_base_model() if self.config.model.lora_rank else self.trained
        decoder = base.get_decoder()
        layers, by_segments = decoder.layers, batch.lengths is not None and attend_by_segments(base.base_model)
        try:
            decoder.layers = layers[:FEW_LAYERS]
            held = self._decode(decoder, batch, by_segments, backward)
            if len(layers) > FEW_LAYERS:
                decoder.layers = layers[: FEW_LAYERS + 1]
                deeper = self._decode(decoder, batch, by_segments, backward)
                further = len(layers) - FEW_LAYERS
                held = Held(*(first + further * (second - first) for first, second in zip(held, deeper)))
        finally:
            decoder.layers = layers
        mask = batch.rows * batch.length**2 if batch.lengths is None else 0
        return held._replace(kept=held.kept + mask, peak=held.peak + mask)

    def _decode(self, decoder: nn.Module, batch: MicroBatch, by_segments: bool, backward: bool) -> Held:
        ids = torch.zeros(batch.rows, batch.length, dtype=torch.long, device="meta")
        attention = {"attention_mask": torch.zeros(batch.rows, 1, *[batch.length] * 2, dtype=torch.bool, device="meta")}
        if by_segments:
            segments = Segments(batch.lengths, ids.device, batch.continues)
            attention = {"attention_mask": segments.mask, "segments": segments}

        def run() -> torch.Tensor:
            return decoder(input_ids=ids, use_cache=False, **attention).last_hidden_state

        return held_bytes(decoder, run, backward=backward)

    def _head(self, actions: int, device: Device, backward: bool) -> float:
        """Log-probs of `actions` tokens by chunks of logits (models/logprobs.py), with their gradients."""
        weight = self.whole.get_output_embeddings().weight
        vocabulary, hidden = weight.shape
        rows = min(actions, chunk_length(vocabulary, torch.device("cpu" if device.on_cpu else "meta")))
        copies = 2 + (self.width < FP32)  # logits, their exponents or gradient, that in half precision
        held = copies * rows * vocabulary * FP32 + actions * hidden * self.width
        if backward:
            held += actions * hidden * self.width
            if weight.requires_grad:
                products = 1 if self.width == FP32 else 2  # half precision has no product that adds to a float32 sum
                held += vocabulary * hidden * (FP32 * products + (self.width if self.width < FP32 else 0))
        return held

    def _head_work(self, actions: int, device: Device, backward: bool) -> Work:
        """Of the same. Backward makes the logits again, and the gradient of what was read and, where it is trained, of
        the weight."""
        weight = self.whole.get_output_embeddings().weight
        product, passes = 2.0 * actions * weight.numel(), 3 + weight.requires_grad if backward else 1
        rows = chunk_length(weight.shape[0], torch.device("cpu" if device.on_cpu else "meta"))
        chunks = ceil(actions / rows) * (1 + backward)
        moved = HEAD_PASSES * (1 + backward) * actions * weight.shape[0] * FP32
        return Work(passes * product, backward * product, moved, chunks * HEAD_CALLS)

    def _tower_work(self, prompts: float, backward: bool) -> Work:
        """Of the vision tower over the media of some prompts. Its blocks have as many operations as layers have."""
        if self.tower is None or not prompts:
            return Work()
        trained = backward and any(parameter.requires_grad for parameter in self.tower.parameters())
        full = trained and all(parameter.requires_grad for parameter in self.tower.parameters())
        again = trained and self.config.model.gradient_checkpointing in RECOMPUTES
        passes = 1 + again + (1 + full if trained else 0)
        calls = self._blocks() * self._calls(trained) / self.text.num_hidden_layers
        _, patches, size = self.media_bytes()
        numbers = sum(parameter.numel() for parameter in self.tower.parameters())
        product = 2 * numbers * prompts * patches + prompts * self._attended(patches)
        hidden, inner = self._tower_widths()
        moved = passes * prompts * patches * self._blocks() * 2 * self.width * (14 * hidden + 4 * inner)  # in and out
        return Work(passes * product, again * product, moved + prompts * size, calls)

    def _attended(self, patches: float) -> float:
        """Products of the tower's attention over an image: in windows where it has them, but for some blocks."""
        vision, depth = self.model_config.vision_config, self._blocks()
        window, whole = getattr(vision, "window_size", None), depth
        inside = (window / self.patch_side) ** 2 if window else patches
        if window:
            whole = len(vision.fullatt_block_indexes)
        pairs = patches * (whole * patches + (depth - whole) * min(inside, patches))
        return 4 * pairs * self._tower_widths()[0]

    def _blocks(self) -> int:
        vision = self.model_config.vision_config
        return getattr(vision, "depth", None) or vision.num_hidden_layers

    def _tower_widths(self) -> tuple[int, int]:
        """(hidden, of the inner layer) of a block."""
        vision = self.model_config.vision_config
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
        return hidden, getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)

    def _tower(self, prompts: int, backward: bool) -> int:
        """Activations of the vision tower over the patches of some prompts; its blocks are all alike."""
        if self.tower is None:
            return 0
        hidden, inner = self._tower_widths()
        depth, block = self._blocks(), self.width * (14 * hidden + 4 * inner)
        if not (backward and any(parameter.requires_grad for parameter in self.tower.parameters())):
            each = self.width * (6 * hidden + 3 * inner)
        elif (checkpointing := self.config.model.gradient_checkpointing) in RECOMPUTES:
            each = depth * self.width * hidden * (2 if checkpointing == ATTENTION else 1) + block
        else:
            each = depth * block
        _, patches, size = self.media_bytes()
        return int(prompts * (patches * each + size))


def _side(vision) -> int:
    return vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]


def _merged(config) -> int | None:
    """Patches along a side that are one token; None where images are tiles of one size."""
    vision = config.vision_config
    names = ("spatial_merge_size", "pooling_kernel_size", "merge_kernel_size")
    found = next((size for name in names if (size := getattr(vision, name, None)) is not None), None)
    if found is None and (vision.model_type == "pixtral" or getattr(vision, "image_size", None) is None):
        return getattr(config, "spatial_merge_size", getattr(config, "downsample_factor", 1))
    return found if found is None or isinstance(found, int) else found[0]
