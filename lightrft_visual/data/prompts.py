"""The prompt data set: rows of one or several files, checked before any engine starts, and rendered for the model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import ProcessorMixin

from ..config.vl import DataConfig, RolloutConfig
from ..errors import ConfigError, DataError
from .media import image_size, is_remote
from .placeholders import ModelInput, check_placeholders, image_token_counts, video_arguments
from .rows import PromptRow, parse_row
from .sampler import PromptSampler
from .sources import RowSource, open_source
from .video import check_video, load_video

__all__ = ["PromptDataset", "PromptRow", "PromptSampler", "render_prompt"]

logger = logging.getLogger(__name__)
Size = tuple[int, int]  # width, height
_CHUNK = 2048  # rows checked at a time
_THREADS = 8  # header reads wait for storage, not for the processor


class PromptDataset:
    """Rows of comma-separated data files and folders, in normal form; all are checked on construction.

    Checked are: the file, the columns, the form of the prompt, that media match their placeholders, that local media
    exist and that each image's header is sound. A bad row is a DataError that names file, row and path, or with
    on_bad_row=skip is left out and counted in `skipped`. Pixels are decoded when a row is used, not here.

    sizes: rows of each data set, for PromptSampler. skipped: rows left out, by reason.
    """

    def __init__(
        self, spec: str, config: DataConfig, *, split: str, max_rows: int, limits: RolloutConfig | None = None
    ) -> None:
        """spec: comma-separated paths. split: of data set folders. max_rows: good rows taken of each data set.

        limits: of images and videos a prompt, which the rollout engine would refuse only in the middle of the run.
        """
        paths = [part.strip() for part in spec.split(",") if part.strip()]
        if not paths:
            raise DataError("no data set named")
        if max_rows < 1:
            raise ConfigError(f"{spec}: max_rows is {max_rows}; leave the data set out instead")
        self.config, self.limits = config, limits
        self.skipped: Counter[str] = Counter()
        self._sources: list[RowSource] = [open_source(path, split) for path in paths]
        self._rows: list[tuple[int, int]] = []  # source, row in it
        self._image_sizes: list[list[Size | None]] = []
        for number, path in enumerate(paths):
            self._admit(number, path, max_rows)
        self._report_skipped("bad row")

    @classmethod
    def for_training(cls, config: DataConfig, limits: RolloutConfig | None = None) -> PromptDataset:
        return cls(config.prompt_data, config, split=config.prompt_split, max_rows=config.max_samples, limits=limits)

    @classmethod
    def for_evaluation(cls, config: DataConfig, limits: RolloutConfig | None = None) -> PromptDataset:
        if config.eval_data is None:
            raise ConfigError("no eval_data named")
        return cls(config.eval_data, config, split=config.eval_split, max_rows=config.max_eval_samples, limits=limits)

    @property
    def sizes(self) -> list[int]:
        counts = Counter(source for source, _ in self._rows)
        return [counts[number] for number in range(len(self._sources))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        source, row = self._rows[index]
        return self._parse(self._sources[source], row, index)

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    def check_lengths(self, model_input: ModelInput, prompt_max_len: int) -> None:
        """Refuse prompts of more than prompt_max_len tokens, images expanded: an error or, by on_long_prompt, skipped.

        Nothing is ever cut. Image tokens are counted from the sizes in the headers; rows with videos are decoded.
        Remote images are not fetched here, so such rows are checked when they are used. Raises DataError.
        """
        kept = []
        for start in range(0, len(self), _CHUNK):
            rows = [self[index] for index in range(start, min(start + _CHUNK, len(self)))]
            for row, length in zip(rows, self._lengths(rows, model_input)):
                if length <= prompt_max_len:
                    kept.append(row.index)
                    continue
                message = f"{row.source}: the prompt has {length} tokens, above prompt_max_len = {prompt_max_len}"
                self._refuse(message, "long prompt", self.config.on_long_prompt, "on_long_prompt")
        self._rows = [self._rows[index] for index in kept]
        self._image_sizes = [self._image_sizes[index] for index in kept]
        if 0 in self.sizes:
            raise DataError(f"a data set has no row of at most prompt_max_len = {prompt_max_len} tokens")
        self._report_skipped("long prompt")

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        root = self.config.image_root or source.folder
        return parse_row(source[row], self.config, source=source.name(row), root=root, index=index)

    def _admit(self, number: int, path: str, max_rows: int) -> None:
        """Check rows in order until max_rows are good."""
        source, admitted = self._sources[number], 0
        for row, result in self._inspect_all(source, min(_CHUNK, max_rows)):
            if admitted == max_rows:
                break
            if isinstance(result, DataError):
                self._refuse(str(result), "bad row", self.config.on_bad_row, "on_bad_row", cause=result)
                continue
            self._rows.append((number, row))
            self._image_sizes.append(result)
            admitted += 1
        if admitted == 0:
            raise DataError(f"{path}: no usable row among {len(source)}")

    def _inspect_all(self, source: RowSource, chunk: int) -> Iterator[tuple[int, list[Size | None] | DataError]]:
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(source), chunk):
                rows = range(start, min(start + chunk, len(source)))
                yield from zip(rows, pool.map(lambda row: self._inspect(source, row), rows))

    def _inspect(self, source: RowSource, row: int) -> list[Size | None] | DataError:
        """Sizes of the row's images, None for remote ones; or what is wrong with the row."""
        name = source.name(row)
        try:
            parsed, config = self._parse(source, row, row), self.config
            self._check_counts(parsed)
            for video in parsed.videos:
                check_video(video, allow_remote=config.allow_remote_media)
            return [self._header(image) for image in parsed.images]
        except DataError as error:
            return error if name in str(error) else DataError(f"{name}: {error}")

    def _check_counts(self, row: PromptRow) -> None:
        for kind, items in (("image", row.images), ("video", row.videos)) if self.limits is not None else ():
            flag = f"limit_mm_{kind}_per_prompt"
            if len(items) > getattr(self.limits, flag):
                raise DataError(f"{len(items)} {kind}s, above {flag} = {getattr(self.limits, flag)}")

    def _header(self, image: Any) -> Size | None:
        if is_remote(image) and self.config.allow_remote_media:
            return None
        return image_size(image, max_pixels=self.config.max_image_pixels)

    def _refuse(self, message: str, reason: str, policy: str, flag: str, cause: Exception | None = None) -> None:
        if policy == "error":
            raise DataError(f"{message} (--{flag} skip leaves such rows out)") from cause
        if self.skipped[reason] < 5:
            logger.warning("skipped: %s", message)
        self.skipped[reason] += 1

    def _report_skipped(self, reason: str) -> None:
        if self.skipped[reason]:
            logger.warning("%d row(s) skipped as %s, %d left", self.skipped[reason], reason, len(self))

    def _lengths(self, rows: Sequence[PromptRow], model_input: ModelInput) -> Iterator[int]:
        prompts = [render_prompt(row, model_input, self.config) for row in rows]
        tokenizer = model_input.tokenizer if isinstance(model_input, ProcessorMixin) else model_input
        ids = tokenizer(prompts)["input_ids"]
        for row, prompt, row_ids in zip(rows, prompts, ids):
            check_placeholders(prompt, len(row.images), len(row.videos), model_input, row.source)
            sizes = [size for size in self._image_sizes[row.index] if size is not None]
            extra = sum(count - 1 for count in image_token_counts(model_input, sizes)) if sizes else 0
            yield len(row_ids) + extra + (self._video_tokens(row, model_input) if row.videos else 0)

    def _video_tokens(self, row: PromptRow, processor: ProcessorMixin) -> int:
        """Tokens that the videos of a row add to their placeholders; decodes them."""
        config = self.config
        options = {"allow_remote": config.allow_remote_media, "max_pixels": config.max_image_pixels}
        try:
            videos = [load_video(video, **options) for video in row.videos]
        except DataError as error:
            raise DataError(f"{row.source}: {error}") from error
        text = processor.video_token * len(videos)
        expanded = processor(text=[text], **video_arguments(videos))["input_ids"][0]
        return len(expanded) - len(processor.tokenizer(text)["input_ids"])


def render_prompt(row: PromptRow, model_input: ModelInput, config: DataConfig) -> str:
    """The prompt as the model's chat template writes it, up to where the answer begins.

    One placeholder per image or video, not expanded: what vLLM and MultimodalDataProcessor take. With
    apply_chat_template false it is the row's string as it stands. system_prompt comes first unless the row has its own.
    Raises DataError naming the row, or ConfigError when there is no chat template.
    """
    if not config.apply_chat_template:
        return row.prompt
    if model_input.chat_template is None:
        raise ConfigError("the model has no chat template: set --apply_chat_template false and write whole prompts")
    messages = [dict(message) for message in row.prompt]
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": config.system_prompt}]})
    if not isinstance(model_input, ProcessorMixin):
        messages = [_flat(message, row.source) for message in messages]
    try:
        return model_input.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        raise DataError(f"{row.source}: the chat template refuses the prompt: {error}") from error


def _flat(message: dict[str, Any], source: str) -> dict[str, Any]:
    """Text-only templates take one string a message."""
    if any(part["type"] != "text" for part in message["content"]):
        raise DataError(f"{source}: the row has images or videos, the model has no processor for them")
    return {**message, "content": "".join(part["text"] for part in message["content"])}
