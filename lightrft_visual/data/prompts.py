"""The prompt data set: rows of one or several files, checked before any engine starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..config.vl import DataConfig, RolloutConfig
from ..errors import ConfigError, DataError, did_you_mean, refused_as, writable
from ..runtime import collectives
from .bad_rows import LONG_PROMPT, BadRow, BadRows, TooManyBadRows, most_characters
from .forms import json_list
from .media import image_size, is_remote, load_image
from .rendering import (
    MediaConventions,
    ModelInput,
    messages_of,
    prompt_ids,
    render_answer,
    render_prompt,
    template_arguments,
)
from .rows import PromptRow, parse_row, response_of
from .sources import CsvSource, RowSource, located, open_source
from .video import check_video, is_remote_video, load_video

logger = logging.getLogger(__name__)

FINGERPRINTED = 256  # rows by which a resumed run knows its data
Size = tuple[int, int]  # width, height
_SILENCE = 20.0  # seconds after which rows that are checked are counted aloud
_CHUNK = 2048  # rows that a rank checks at a time; of videos, which are decoded whole, an eighth
_THREADS = 8  # header reads wait for storage, not for the processor
_SLICE = 64  # rows that a thread takes at a time, at most


@dataclass(frozen=True)
class RowChecks:
    """What the rows of a data set are checked against, beside their own form.

    limits: of images and videos a prompt, which the rollout engine would refuse only in the middle of the run.
    model_input, prompt_max_len: the model's processor or tokenizer, and the tokens that a prompt may have, images
    expanded; None: lengths are not looked at. labels: those that are scored; a row with another one, or without any, is
    bad; None: every row is. decode: all pixels are read too, not only headers. media: how the model's
    family handles placeholders. response_key, response_max_len, ends: of supervised rows, the column of the response,
    the tokens that it may have with its end token, and end tokens as of `render_answer`; None: rows need none. tools:
    schemas in every prompt.
    """

    limits: RolloutConfig | None = None
    model_input: ModelInput | None = None
    prompt_max_len: int | None = None
    decode: bool = False
    media: type[MediaConventions] = MediaConventions
    labels: frozenset[str] | None = None
    response_key: str | None = None
    response_max_len: int | None = None
    ends: Mapping[str, int] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class _Found:
    """A sound row, without its media. tokens: of its videos and images beyond their placeholders, and once the text is
    counted, of all; response: of what is to be answered; text: rendered; draws: whether it asks for an image; videos:
    whether it has any."""

    label: str | None
    columns: frozenset[str]
    form: str | None
    has_reference: bool
    text: str | None = None
    tokens: int = 0
    response: int = 0
    draws: bool = False
    videos: bool = False


def reference_in(source: RowSource, reference: Any) -> Any:
    """A reference as rewards get it. In CSV, where all is text, a JSON list of texts is several right answers."""
    listed = json_list(reference) if isinstance(source, CsvSource) else None
    texts = isinstance(listed, list) and bool(listed) and all(isinstance(each, str) for each in listed)
    return listed if texts else reference


class PromptDataset:
    """Rows of comma-separated data files and folders, in normal form; each is read and checked once on construction.

    Checked are: the file, the columns, the form of the prompt, that media match their placeholders, that local media
    exist and that each image's header is sound; with a model input also the length. A bad row is a DataError that
    names file, row and path, or with on_bad_row=skip (on_long_prompt=skip for long ones) it is left out and counted in
    `bad`. No prompt is ever cut. Image tokens are counted from the sizes in the headers; videos are decoded for that.
    What is remote is not fetched here. The ranks share the work: construction is a collective.

    sizes: rows of each data set, for PromptSampler. fingerprint: of the rows in their order. bad: rows left out.
    labels, columns: of any row; columns are those of the metadata. has_references: whether any row has one;
    has_drawings: whether any asks for an image. video_labels: labels of the rows with videos. longest: tokens of the
    longest row with its response, as far as nothing of it is remote.
    """

    def __init__(
        self, spec: str, config: DataConfig, *, split: str, max_rows: int, checks: RowChecks | None = None
    ) -> None:
        """spec: comma-separated paths. split: of data set folders. max_rows: good rows taken of each data set.

        Raises DataError for a bad row by the policy, for a larger share of bad rows than max_bad_share, and for a data
        set without a usable row.
        """
        paths = [part.strip() for part in spec.split(",") if part.strip()]
        if not paths:
            raise DataError("no data set named")
        if max_rows < 1:
            raise ConfigError(f"{spec}: max_rows is {max_rows}; leave the data set out instead")
        self.config, self.checks = config, checks or RowChecks()
        self._image_root = located(config.image_root).absolute() if config.image_root else None
        self.bad = BadRows(spec, config.max_bad_share)
        self.labels: set[str | None] = set()
        self.video_labels: set[str | None] = set()
        self.columns: set[str] = set()
        self.has_references = self.has_drawings = False
        self.longest = 0
        model_input = self.checks.model_input
        self._most = sys.maxsize  # characters of a prompt
        if model_input is not None and self.checks.prompt_max_len is not None:
            self._most = most_characters(_tokenizer_of(model_input), self.checks.prompt_max_len)
        self._reserved: tuple[str, ...] = ()
        if model_input is not None:
            self._reserved = self.checks.media.reserved(model_input)
            self._check_system_prompt()
        self._sources: list[RowSource] = [open_source(path, split) for path in paths]
        collectives.meet()  # hosts that share no cache fetch models and data in times of their own
        self._check_alike(f"{[len(source) for source in self._sources]} rows")
        self._rows: list[tuple[int, int]] = []  # source, row in it
        self._read: list[int] = []  # rows of each source that were looked at, up to the last one taken
        for number, path in enumerate(paths):
            self._admit(number, path, max_rows)
        self.bad.check()
        self.bad.report()
        self.fingerprint = self._fingerprint()
        self._check_alike(self.fingerprint, self._fingerprint)

    @classmethod
    def for_training(cls, config: DataConfig, checks: RowChecks | None = None) -> PromptDataset:
        """The rows of prompt_data."""
        return cls(config.prompt_data, config, split=config.prompt_split, max_rows=config.max_samples, checks=checks)

    @classmethod
    def for_evaluation(cls, config: DataConfig, checks: RowChecks | None = None) -> PromptDataset:
        """The rows of eval_data, pixels read too: an evaluation is the same every time and has no other rows."""
        if config.eval_data is None:
            raise ConfigError("no eval_data named")
        checks = replace(checks or RowChecks(), decode=True)
        return cls(config.eval_data, config, split=config.eval_split, max_rows=config.max_eval_samples, checks=checks)

    @property
    def sizes(self) -> list[int]:
        """Rows of each data set."""
        counts = Counter(source for source, _ in self._rows)
        return [counts[number] for number in range(len(self._sources))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        source, row = self._rows[index]
        return self._parse(self._sources[source], row, index)

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    def is_stored(self, index: int) -> bool:
        """Whether each reading makes the row anew, and alike."""
        return self._sources[self._rows[index][0]].stored

    def _fingerprint(self) -> str:
        """The number of rows, and a hash of FINGERPRINTED of them, evenly over the data; their media are left out."""
        digest = hashlib.sha256()
        for source, row in self._rows[:: len(self._rows) // FINGERPRINTED + 1]:
            text = json.dumps(self._sources[source][row], skipkeys=True, default=lambda media: None)
            digest.update(text.encode())
        return f"{len(self)} rows, {digest.hexdigest()[:16]}"

    def _check_alike(self, own: str, again: Callable[[], str] | None = None) -> None:
        """Raise DataError on all ranks where they have other data: each reads rows that another one has checked.

        own: what is known of this rank's. again: tells it once more; what differs then is drawn anew at each reading.
        """
        found = collectives.all_gather_object(own)
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if not others or (again is not None and not all(collectives.all_gather_object(again() == own))):
            return
        told = f"{found[0]} on rank 0, {found[others[0]]} on rank {', '.join(map(str, others))}"
        advice = "shuffle with a seed, and give every host the same files"
        raise DataError(f"{self.bad.name}: ranks do not have the same data: {told}; {advice}")

    def check_resumed(self, saved: str | None) -> None:
        """Raise DataError where the run that is resumed began on other data. saved: its fingerprint, if it has one."""
        if saved is not None and saved != self.fingerprint:
            told = f"its rows or their order are others now ({saved}; now {self.fingerprint})"
            raise DataError(f"cannot resume on this data: {told}; a new run takes the exported model: --pretrain")

    def labels_cut_away(self) -> set[str | None]:
        """Labels of the rows beyond max_rows, which are read for it; bad ones are passed over. A collective."""
        found: set[str | None] = set()
        for source, start in zip(self._sources, self._read):
            for row in _own_stretch(range(start, len(source))):
                with contextlib.suppress(DataError):
                    found.add(self._parse(source, row, row).label)
        return set().union(*collectives.all_gather_object(found))

    def check_draw_column(self) -> None:
        """Raise ConfigError for a named draw_key that is true in no row: a slip of the pen there would turn rows that
        ask for an image into questions."""
        config, spec = self.config, self.config.prompt_data
        if config.draw_key != DataConfig.draw_key and not self.has_drawings:
            hint = did_you_mean(config.draw_key, self.columns - {config.draw_key})
            raise ConfigError(f"draw_key: no row of {spec} is true in {config.draw_key!r}{hint}")

    def load(self, index: int) -> PromptRow:
        """The row with its images and videos decoded. Raises DataError naming the row for what cannot be used."""
        row = self[index]
        try:
            loaded = self._decoded(row)
            if self.checks.prompt_max_len is not None and is_remote_row(row):  # not known at the start
                (length,) = self._lengths([self._found(loaded, [image.size for image in loaded.images])])
                if length > self.checks.prompt_max_len:
                    raise DataError(self._too_long(length), LONG_PROMPT)
            return loaded
        except DataError as error:
            raise DataError(f"{row.source}: {error}", error.cause) from error

    def load_or_bad(self, index: int) -> PromptRow | BadRow:
        """The same, or why it cannot be used."""
        source, row = self._rows[index]
        try:
            return self.load(index)
        except DataError as error:
            return BadRow.of(error, self._sources[source].name(row))

    def count_bad(
        self, met: Iterable[Mapping[int, BadRow]], found: str, asked_again: bool = False
    ) -> dict[int, BadRow]:
        """The bad rows that ranks met, by index, each counted once.

        Args:
            met: those of each rank.
            found: when.
            asked_again: what was lost earlier is not lost for good, and no part of the share.

        Raises:
            DataError: for one that may not be skipped, and for a larger share of them than max_bad_share.
        """
        bad = {index: row for part in met for index, row in part.items()}
        for row in bad.values():
            if self.policy(row) == "error":
                raise row.as_error()
            self.bad.add(replace(row, found=found))
        if bad:
            (self.bad.with_those_of_the_start(bad.values()) if asked_again else self.bad).check()
        return bad

    def bad_taken(self) -> dict[int, BadRow]:
        """Rows that were sound at the start and have turned out bad, by index."""
        names = (self._sources[source].name(row) for source, row in self._rows)
        return {index: self.bad.rows[name] for index, name in enumerate(names) if name in self.bad.rows}

    def policy(self, bad: BadRow) -> str:
        """What to do with a bad row: "error" or "skip"."""
        return self.config.on_long_prompt if bad.cause == LONG_PROMPT else self.config.on_bad_row

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        parsed = parse_row(source[row], self.config, source=source.name(row), root=self._root(source), index=index)
        if self.checks.response_key is not None:  # there a reference is a text to answer
            return parsed
        return replace(parsed, reference=reference_in(source, parsed.reference))

    def _root(self, source: RowSource) -> Path:
        """Where relative media paths start."""
        return self._image_root or source.folder

    @property
    def _reading(self) -> dict[str, Any]:
        return {"allow_remote": self.config.allow_remote_media, "max_pixels": self.config.max_image_pixels}

    def _decoded(self, row: PromptRow) -> PromptRow:
        images = [load_image(image, **self._reading) for image in row.images]
        return replace(row, images=images, videos=[load_video(video, **self._reading) for video in row.videos])

    # -- checks at the start -------------------------------------------------------------------------------------

    def _admit(self, number: int, path: str, max_rows: int) -> None:
        """Check rows in order until max_rows are good."""
        source, admitted, start, forms = self._sources[number], 0, 0, set()
        world, told = collectives.world_size(), time.monotonic()
        while admitted < max_rows and start < len(source):
            most = _CHUNK if start and not self.video_labels else max(1, _CHUNK // 8)  # at first nobody knows
            share = min(most, -(-(max_rows - admitted) // world))  # of each rank, before they tell each other
            rows = range(start, min(len(source), start + world * share))
            for row, found in zip(rows, self._inspect_shared(source, rows)):
                self.bad.inspected += 1
                if isinstance(found, BadRow):
                    if self.policy(found) == "error":
                        raise found.as_error()
                    self.bad.add(found)
                    continue
                self._rows.append((number, row))
                self.labels.add(found.label)
                self.video_labels |= {found.label} if found.videos else set()
                self.columns |= found.columns
                self.has_references |= found.has_reference
                self.has_drawings |= found.draws
                self.longest = max(self.longest, found.tokens + found.response)
                forms.add(found.form)
                admitted += 1
                if admitted == max_rows:
                    start = row + 1
                    break
            else:
                start = rows.stop
            if time.monotonic() - told > _SILENCE and collectives.is_rank_0():
                logger.info("%s: %d of %d rows are checked", path, start, len(source))
                told = time.monotonic()
        self._read.append(start)
        if start < len(source) and collectives.is_rank_0():
            cut = "the first %d usable rows of %d are taken (max_samples, of held-out data max_eval_samples)"
            logger.info(f"%s: {cut}", path, admitted, len(source))
        if admitted == 0:
            none = f"{path}: no usable row among {len(source)}"
            raise TooManyBadRows(f"{none}: {self.bad.summary()}", self.bad) if len(self.bad) else DataError(none)
        if (said := forms - {None}) and collectives.is_rank_0():
            logger.info("%s: rows read as %s; --data_format plain turns this off", path, "; ".join(sorted(said)))

    def _inspect_shared(self, source: RowSource, rows: range) -> list[_Found | BadRow]:
        """What is found in `rows`, each rank looking at its own stretch."""
        mine = _own_stretch(rows)
        size = max(1, min(_SLICE, -(-len(mine) // _THREADS)))
        slices = [mine[start : start + size] for start in range(0, len(mine), size)]
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(chain(*pool.map(lambda rows: [self._inspect(source, row) for row in rows], slices)))
        return list(chain(*collectives.all_gather_object(self._within_length(source, mine, found))))

    def _inspect(self, source: RowSource, row: int) -> _Found | BadRow:
        name = source.name(row)
        try:
            parsed = self._parse(source, row, row)
            self._check_counts(parsed)
            self._check_label(parsed.label)
            self._check_response(parsed)
            for video in parsed.videos:
                check_video(video, **self._reading)
            sizes = [self._header(image) for image in parsed.images]
            decoded = self.checks.decode and not is_remote_row(parsed)
            return self._found(self._decoded(parsed) if decoded else parsed, sizes)
        except DataError as error:
            return BadRow.of(error, name)

    def _check_counts(self, row: PromptRow) -> None:
        limits = self.checks.limits
        for kind, items in (("image", row.images), ("video", row.videos)) if limits is not None else ():
            flag = f"limit_mm_{kind}_per_prompt"
            if len(items) > getattr(limits, flag):
                text = f"{len(items)} {kind}s, above {flag} = {getattr(limits, flag)}"
                raise DataError(text, f"too many {kind}s")

    def _check_label(self, label: str | None) -> None:
        known = self.checks.labels
        if known is not None and label not in known:
            told = "the row has no label" if label is None else f"the label {label!r} has no reward recipe"
            raise DataError(f"{told}{did_you_mean(label or '', known)}", "label without a recipe")

    def _check_response(self, row: PromptRow) -> None:
        if self.checks.response_key is None:
            return
        text = response_of(row, self.checks.response_key)
        typed = next((token for token in self._reserved if token in text), None)
        if typed is not None:
            told = f"the response holds {typed}, which stands for an image or video"
            raise DataError(told, "vision token in the text")

    def _response_length(self, row: PromptRow, prompt: str) -> int:
        key, model_input, most = self.checks.response_key, self.checks.model_input, self.checks.response_max_len
        if key is None or most is None:
            return 0
        answer, messages = response_of(row, key), messages_of(row, self.config)
        given = template_arguments(self.config, self.checks.tools)
        text, _ = render_answer(answer, prompt, messages, model_input, self.checks.ends, given)
        count = len(_tokenizer_of(model_input).encode(text, add_special_tokens=False)) + 1
        if count > most:
            told = f"the response has {count} tokens with its end token, above generate_max_len = {most}"
            raise DataError(told, LONG_PROMPT)
        return count

    def _header(self, image: Any) -> Size | None:
        return None if is_remote(image) and self._reading.get("allow_remote") else image_size(image, **self._reading)

    def _check_system_prompt(self) -> None:
        text = self.config.system_prompt or ""
        if writable(text) != text:
            raise ConfigError(f"system_prompt is not text in UTF-8: {writable(text)!r}")
        typed = next((token for token in self._reserved if token in text), None)
        if typed is not None:
            raise ConfigError(f"system_prompt holds {typed}, which stands for an image or video")

    # -- lengths -------------------------------------------------------------------------------------------------

    def _found(self, row: PromptRow, sizes: Sequence[Size | None]) -> _Found:
        """The row as text for the tokenizer, checked against the model. sizes: of its images, None where unknown."""
        found = _Found(row.label, frozenset(row.metadata), row.form, row.reference is not None, videos=bool(row.videos))
        if (model_input := self.checks.model_input) is None:
            return found
        self._check_text(row)
        text = render_prompt(row, model_input, self.config, self.checks.media, self.checks.tools)
        response = self._response_length(row, text)
        self.checks.media.check_prompt(text, len(row.images), len(row.videos), model_input, row.source)
        known = [size for size in sizes if size is not None]
        tokens = sum(count - 1 for count in self.checks.media.image_token_counts(model_input, known)) if known else 0
        tokens += self._video_tokens(row, model_input) if row.videos else 0
        return replace(found, text=text, tokens=tokens, response=response, draws=row.draw)

    def _check_text(self, row: PromptRow) -> None:
        """It may not be longer than any prompt of prompt_max_len tokens, nor hold a token that the model reads as an
        image or video."""
        messages = [] if isinstance(row.prompt, str) else row.prompt
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        length = len(row.prompt) if isinstance(row.prompt, str) else sum(map(len, texts))
        if length > self._most:
            raise DataError(self._too_long(length, "characters"), LONG_PROMPT)
        # Whole prompts bring the placeholders themselves.
        typed = next((token for token in self._reserved for text in texts if token in text), None)
        if typed is not None:
            text = f"the text holds {typed}, which the model would read as an image or video that is not there"
            raise DataError(text, "vision token in the text")

    def _within_length(
        self, source: RowSource, rows: Sequence[int], found: list[_Found | BadRow]
    ) -> list[_Found | BadRow]:
        """The same, with prompts above prompt_max_len as bad rows, and without texts."""
        if self.checks.model_input is None:
            return found
        sound = [place for place, each in enumerate(found) if isinstance(each, _Found)]
        for place, length in zip(sound, self._lengths([found[place] for place in sound])):
            found[place] = replace(found[place], text=None, tokens=length)
            if length > self.checks.prompt_max_len:
                name = source.name(rows[place])
                found[place] = BadRow(name, LONG_PROMPT, f"{name}: {self._too_long(length)}")
        return found

    def _lengths(self, found: Sequence[_Found]) -> list[int]:
        """Tokens of prompts, media expanded."""
        if not found:
            return []
        tokenizer = _tokenizer_of(self.checks.model_input)
        rendered = self.config.apply_chat_template and tokenizer is self.checks.model_input
        ids = prompt_ids([each.text for each in found], tokenizer, rendered)
        return [len(own) + each.tokens for own, each in zip(ids, found)]

    def _too_long(self, length: int, unit: str = "tokens") -> str:
        return f"the prompt has {length} {unit}, above prompt_max_len = {self.checks.prompt_max_len}"

    def _video_tokens(self, row: PromptRow, processor: ProcessorMixin) -> int:
        """Tokens that the videos of a row add to their placeholders; decodes them."""
        if any(map(is_remote_video, row.videos)):
            return 0
        videos = [load_video(video, **self._reading) for video in row.videos]
        text = self.checks.media.placeholders(processor)["video"] * len(videos)
        with refused_as(DataError, "the model's processor cannot read its videos"):
            expanded = processor(text=[text], **self.checks.media.media_arguments([], videos))["input_ids"][0]
        return len(expanded) - len(processor.tokenizer(text)["input_ids"])


def _own_stretch(rows: range) -> range:
    """This rank's part, whose rows follow each other: it reads few row groups of a Parquet file."""
    share = -(-len(rows) // collectives.world_size())
    return rows[collectives.rank() * share : (collectives.rank() + 1) * share]


def _tokenizer_of(model_input: ModelInput) -> PreTrainedTokenizerBase:
    return model_input.tokenizer if isinstance(model_input, ProcessorMixin) else model_input


def is_remote_row(row: PromptRow) -> bool:
    """Whether media of the row come from the network."""
    return any(map(is_remote, row.images)) or any(map(is_remote_video, row.videos))
