"""Prompts with media made ready for generation and training: loaded, checked, preprocessed once, repeated n times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from easydict import EasyDict
from PIL.Image import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..data.bad_rows import LONG_PROMPT, most_characters
from ..data.media import MAX_IMAGE_PIXELS, Video, describe_source, load_image
from ..data.rendering import prompt_ids, special_tokens
from ..data.rows import as_source_list
from ..data.video import load_video
from ..errors import ConfigError, DataError
from ..experience.rollouts import PromptBatch, PromptFeatures, check_column, check_texts
from ..experience.vision import VisionTensors
from ..models.vlm.families import family_of_processor
from ..runtime.host_memory import give_back_freed_memory, in_buckets

_COLUMNS = {
    "all_images_pixel_values": "pixel_values",
    "all_videos_pixel_values": "pixel_values_videos",
    "all_images_grid_thw": "image_grid_thw",
    "all_videos_grid_thw": "video_grid_thw",
    "all_videos_second_per_grid_ts": "second_per_grid_ts",
}
_PIXELS_AT_ONCE = 2**18  # of one call of the processor, which takes about 70 bytes a pixel, and gives 24
_CARRIED = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


@dataclass
class Added:
    """What an observation adds to a conversation. token_ids: media expanded; unexpanded: one placeholder a medium."""

    token_ids: list[int]
    unexpanded: list[int]
    images: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    vision: VisionTensors = field(default_factory=VisionTensors)


class MultimodalDataProcessor:
    """Turns a batch of rendered prompts with their media into model inputs, each repeated n times (LightRFT).

    tokenizer: for text. processor: the model's transformers processor, None for a text-only model. prompt_max_len:
    tokens, media expanded; a longer prompt is an error, never cut. The keyword arguments guard how media are read, as
    in `media.load_image`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        prompt_max_len: int,
        *,
        allow_remote: bool = False,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        self.tokenizer, self.processor, self.prompt_max_len = tokenizer, processor, prompt_max_len
        self.family = family_of_processor(processor)
        self._most_characters = most_characters(tokenizer, prompt_max_len)
        self._turn = Lock()  # batches are prepared ahead in a thread; processors are not made for two calls at once
        self._reading = {"allow_remote": allow_remote, "max_pixels": max_image_pixels}

    def process_multimodal_batch(
        self,
        all_prompts: Sequence[str],
        all_images: Sequence[Any] | None = None,
        all_references: Sequence[Any] | None = None,
        images_num: Sequence[int] | None = None,
        n_samples_per_prompt: int = 1,
        all_videos: Sequence[Any] | None = None,
        videos_num: Sequence[int] | None = None,
    ) -> EasyDict:
        """Prepare P prompts for N samples each.

        Args:
            all_prompts: (P) rendered strings with one placeholder per image or video.
            all_images: (P) for each prompt None, one source, or a list of sources in the order of the placeholders.
            all_references: (P) what rewards compare with.
            images_num: (P) how many there should be; checked where given.
            n_samples_per_prompt: N.
            all_videos: as `all_images`.
            videos_num: as `images_num`.

        Returns P * N entries per key, prompt-major (prompt 0 N times, then prompt 1, ...); what is large is shared by
        the N entries, not copied:
        all_prompt_token_ids list[int], placeholders expanded, equal to the processor's for the prompt alone;
        all_prompts str, not expanded; all_images list[PIL RGB] or None; all_videos list[Video] or None;
        all_images_num, all_videos_num int; all_images_pixel_values (patches, patch_dim) or None;
        all_images_grid_thw (images, 3) or None; all_videos_pixel_values and all_videos_grid_thw alike;
        all_videos_second_per_grid_ts (videos) or None, where the model places frames in time by it; all_references.

        Raises DataError naming the prompt's index for media that do not match the placeholders or images_num, for
        unreadable media, and for a prompt above prompt_max_len.
        """
        check_texts(all_prompts)
        if n_samples_per_prompt < 1:
            raise DataError(f"n_samples_per_prompt is {n_samples_per_prompt}, it must be at least 1")
        count = len(all_prompts)
        references = _per_prompt(all_references, count, "all_references")
        images = self._load(_per_prompt(all_images, count, "all_images"), images_num, "image")
        videos = self._load(_per_prompt(all_videos, count, "all_videos"), videos_num, "video")
        token_ids, vision = self._prepare(list(all_prompts), images, videos)
        columns = {
            "all_prompt_token_ids": token_ids,
            "all_prompts": list(all_prompts),
            "all_images": [batch or None for batch in images],
            "all_videos": [batch or None for batch in videos],
            "all_images_num": [len(batch) for batch in images],
            "all_videos_num": [len(batch) for batch in videos],
            "all_references": references,
        }
        columns |= {key: [each.get(name) for each in vision] for key, name in _COLUMNS.items()}
        times = range(n_samples_per_prompt)
        return _attributes({name: [each for each in column for _ in times] for name, column in columns.items()})

    def features(self, batch: PromptBatch) -> list[PromptFeatures]:
        """Expanded ids, decoded media and vision tensors of each prompt.

        Raises DataError as `process_multimodal_batch` does.
        """
        images, videos = self.media(batch)
        rendered = bool(batch.messages) and None not in batch.messages
        token_ids, vision = self._prepare(batch.prompts, images, videos, rendered)
        captions = [self._caption(batch, i) for i in range(len(batch))]
        return [
            PromptFeatures(
                text=batch.prompts[i],
                token_ids=token_ids[i],
                group_id=int(batch.ids[i]),
                reference=batch.references[i],
                label=batch.labels[i],
                metadata=batch.metadata[i],
                images=images[i],
                videos=videos[i],
                vision=vision[i],
                caption=captions[i],
                loss_part=int(captions[i] is not None),
                messages=batch.messages[i] if batch.messages else None,
            )
            for i in range(len(batch))
        ]

    def media(self, batch: PromptBatch) -> tuple[list[list[Image]], list[list[Video]]]:
        """Decoded images and videos of each prompt. Raises DataError for those that cannot be read."""
        return self._load(batch.images, None, "image"), self._load(batch.videos, None, "video")

    def with_images(self, prompts: list[PromptFeatures], images: list[list]) -> list[PromptFeatures]:
        """The same prompts with other images, decoded ones; those that have none are handed on as they are."""
        chosen = [number for number, own in enumerate(images) if own]
        token_ids, vision = self._prepare(
            [prompts[i].text for i in chosen], [images[i] for i in chosen], [prompts[i].videos for i in chosen]
        )
        changed = {
            number: replace(prompts[number], images=images[number], token_ids=ids, vision=tensors)
            for number, ids, tensors in zip(chosen, token_ids, vision)
        }
        return [changed.get(number, prompt) for number, prompt in enumerate(prompts)]

    def unexpanded(self, prompt: PromptFeatures) -> list[int]:
        """Its ids with one placeholder a medium."""
        if prompt.images or prompt.videos:
            return prompt_ids([prompt.text], self.tokenizer)[0]
        return prompt.token_ids

    def difference(
        self, text: str, images: Sequence[Any], videos: Sequence[Any], what: str, whole: bool = False
    ) -> Added:
        """What a conversation grows by.

        Args:
            text: behind what is there, with one placeholder a medium; no special token is added.
            images, videos: sources in the order of the placeholders.
            what: it is, for messages.
            whole: the text is a rendered prompt, behind nothing, with its special tokens.

        Raises:
            DataError: for media that cannot be used, or other ones than the text has placeholders for.
        """
        (loaded,), (clips,) = self._load([list(images)], None, "image"), self._load([list(videos)], None, "video")
        self.family.check_prompt(text, len(loaded), len(clips), self.processor or self.tokenizer, what)
        added = whole and self.processor is not None
        special = special_tokens(text, self.tokenizer) if added else {"add_special_tokens": False}
        plain = list(self.tokenizer(text, **special)["input_ids"])
        if not loaded and not clips:
            return Added(plain, plain)
        output = self._call([text], [loaded], [clips], [0], **special)
        (vision,) = self.family.read(output, [len(loaded)], [len(clips)])
        return Added(output["input_ids"][0], plain, loaded, clips, vision)

    def _caption(self, batch: PromptBatch, index: int) -> str | None:
        prompt = batch.prompts[index]
        if not self.family.asks_for_image(prompt, self.processor or self.tokenizer):
            return None
        return prompt if batch.captions[index] is None else batch.captions[index]

    def _prepare(
        self, prompts: list[str], images: list[list], videos: list[list], rendered: bool = False
    ) -> tuple[list[list[int]], list[VisionTensors]]:
        """Expanded token ids and vision tensors of each prompt, checked."""
        for index, prompt in enumerate(prompts):
            if len(prompt) > self._most_characters:
                told = (
                    f"prompt {index} has {len(prompt)} characters, above prompt_max_len = {self.prompt_max_len} tokens"
                )
                raise DataError(told, LONG_PROMPT)
            counts = len(images[index]), len(videos[index])
            self.family.check_prompt(prompt, *counts, self.processor or self.tokenizer, f"prompt {index}")
        token_ids, vision = self._encode(prompts, images, videos, rendered)
        for index, ids in enumerate(token_ids):
            if not len(ids):
                raise DataError(f"prompt {index} is empty")
            if len(ids) > self.prompt_max_len:
                raise DataError(
                    f"prompt {index} has {len(ids)} tokens with its images expanded, "
                    f"above prompt_max_len = {self.prompt_max_len}"
                )
        return token_ids, vision

    def _load(self, cells: list[Any], wanted: Sequence[int] | None, kind: str) -> list[list[Any]]:
        """Decoded media of each prompt; a source that several prompts name is decoded once, a function gives one."""
        if wanted is not None and len(wanted) != len(cells):
            raise DataError(f"{kind}s_num has {len(wanted)} entries for {len(cells)} prompts")
        load = load_image if kind == "image" else load_video
        decoded: dict[str, Any] = {}
        batch = []
        for index, cell in enumerate(cells):
            try:
                sources = [each() if callable(each) else each for each in as_source_list(cell, kind)]
                if wanted is not None and wanted[index] != len(sources):
                    raise DataError(f"{len(sources)} {kind}(s) given, {kind}s_num says {wanted[index]}")
                for source in sources:
                    if isinstance(source, str) and source not in decoded:
                        decoded[source] = load(source, **self._reading)
                batch.append([decoded[s] if isinstance(s, str) else load(s, **self._reading) for s in sources])
            except DataError as error:
                raise DataError(f"prompt {index}: {error}") from error
        return batch

    def _encode(
        self, prompts: list[str], images: list[list], videos: list[list], rendered: bool
    ) -> tuple[list[list[int]], list[VisionTensors]]:
        if not prompts:
            return [], []
        if self.processor is None:
            return prompt_ids(prompts, self.tokenizer, rendered), [VisionTensors() for _ in prompts]
        alike = len({bool(special_tokens(each, self.tokenizer)) for each in prompts}) == 1
        most = _PIXELS_AT_ONCE if self.family.together and alike else -1
        token_ids: list[list[int]] = []
        vision: list[VisionTensors] = []
        made = 0
        for part in in_buckets(range(len(prompts)), most, lambda i: _pixels(images[i], videos[i])):
            output = self._call(prompts, images, videos, part)
            token_ids += output["input_ids"]
            vision += self.family.read(output, [len(images[i]) for i in part], [len(videos[i]) for i in part])
            del output
            made += sum(each.nbytes() for each in vision[part[0] :])
            if give_back_freed_memory(made):  # the processor frees more than it leaves
                made = 0
        return token_ids, vision

    def _call(
        self, prompts: list[str], images: list[list], videos: list[list], part: Sequence[int], **extra: Any
    ) -> Mapping[str, Any]:
        media = [item for i in part for item in images[i]], [item for i in part for item in videos[i]]
        try:
            with self._turn:
                arguments = self.family.media_arguments(*media) | special_tokens(prompts[part[0]], self.tokenizer)
                output = self.processor(text=[prompts[i] for i in part], **(arguments | extra))
        except Exception as error:  # processors raise every kind of exception; which prompt is it?
            if len(part) == 1:
                sizes = [describe_source(image) for image in images[part[0]]]
                raise DataError(f"prompt {part[0]}: the processor refuses it (images {sizes}): {error}") from error
            for index in part:
                self._call(prompts, images, videos, [index])
            raise
        unknown = sorted(set(output) - _CARRIED - {*self.family.tensors})
        if unknown:
            told = f"{', '.join(unknown)}; a family of one's own names them in `tensors`"
            raise ConfigError(f"{type(self.processor).__name__} makes model inputs not supported: {told}")
        # With media some processors make a tensor of each prompt's, and a list of that would hold one for each token.
        return {**output, "input_ids": [torch.as_tensor(ids).tolist() for ids in output["input_ids"]]}


def _pixels(images: list[Image], videos: list[Video]) -> int:
    """Of one prompt's media."""
    return sum(image.width * image.height for image in images) + sum(
        video.frames.shape[0] * video.frames.shape[1] * video.frames.shape[2] for video in videos
    )


def _per_prompt(column: Sequence[Any] | None, count: int, name: str) -> list[Any]:
    check_column(column, name)
    if column is None:
        return [None] * count
    if len(column) != count:
        raise DataError(f"{name} has {len(column)} entries for {count} prompts")
    return list(column)


def _attributes(columns: dict[str, list[Any]]) -> EasyDict:
    """Columns by attribute or key. EasyDict's own constructor would turn references that are mappings into its kind,
    and refuses those whose keys are not names.
    """
    result = EasyDict()
    for name, column in columns.items():
        dict.__setitem__(result, name, column)
        object.__setattr__(result, name, column)
    return result
