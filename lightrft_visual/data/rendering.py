"""Prompts as text: a model's chat template, and how its processor handles images and videos in it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from PIL import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..config.vl import DataConfig
from ..errors import ConfigError, DataError, reason_of
from .bad_rows import warn_once
from .media import Video
from .rows import PromptRow

_VISION_NAME = re.compile("vision|image|img|video", re.IGNORECASE)
ModelInput = ProcessorMixin | PreTrainedTokenizerBase
# By the model input: by its template, roles of messages and what else is given, which of the messages is left out.
_LEFT_OUT: WeakKeyDictionary[Any, dict[tuple[Any, ...], int | None]] = WeakKeyDictionary()
OWN_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


@cache
def _parts(kind: type[ProcessorMixin]) -> frozenset[str]:
    """What a processor is made of; transformers reads it out of a signature at each call."""
    return frozenset(kind.get_attributes())


class MediaConventions:
    """How most processors of transformers handle media; the adapter of a model family overrides what its own does else.

    kinds: of media that prompts may hold.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image", "video")

    @classmethod
    def placeholders(cls, model_input: ModelInput) -> dict[str, str]:
        """The text that stands for one image and for one video, by kind; empty for a text-only model's tokenizer."""
        if not isinstance(model_input, ProcessorMixin):
            return {}
        parts = _parts(type(model_input))
        return {kind: getattr(model_input, f"{kind}_token") for kind in cls.kinds if f"{kind}_processor" in parts}

    @classmethod
    def check_prompt(cls, prompt: str, images: int, videos: int, model_input: ModelInput, where: str) -> None:
        """Raise DataError unless the rendered prompt holds one placeholder a medium, and none where it asks for an
        image: models that draw do it from text alone.

        Args:
            prompt: as the chat template writes it, or a part of it.
            images: how many come with it.
            videos: likewise.
            model_input: which takes the prompt.
            where: the prompt stands, with which a message begins.
        """
        if images and cls.asks_for_image(prompt, model_input):
            text = f"{where}: the prompt asks for an image and brings {images}; this model draws from text"
            raise DataError(text, "drawing")
        tokens = cls.placeholders(model_input)
        for kind, wanted in (("image", images), ("video", videos)):
            if kind not in tokens:
                if wanted:
                    raise DataError(f"{where}: {wanted} {kind}(s), but the model takes no {kind}s")
                continue
            found = prompt.count(tokens[kind])
            if found != wanted:
                raise DataError(
                    f"{where}: the rendered prompt holds {found} {kind} placeholder(s) {tokens[kind]}, "
                    f"but {wanted} {kind}(s) came with it"
                )

    @classmethod
    def asks_for_image(cls, prompt: str, model_input: ModelInput) -> bool:
        """Whether a rendered prompt is to be answered by an image."""
        return False

    @classmethod
    def begin_drawing(cls, prompt: str, model_input: ModelInput, where: str) -> str:
        """The rendered prompt up to where an image begins. Raises DataError where the model draws none.

        Args:
            prompt: as the chat template writes it.
            model_input: which takes the prompt.
            where: the prompt stands, with which a message begins.
        """
        raise DataError(f"{where}: the row asks for an image, but this model writes text only", "drawing")

    @classmethod
    def reserved(cls, model_input: ModelInput) -> tuple[str, ...]:
        """The special tokens that a model has for images and videos, as text; none for a text-only model's tokenizer.

        Typed into a prompt they would be read as an image that is not there.
        """
        if not isinstance(model_input, ProcessorMixin):
            return ()
        special = [token for token in model_input.tokenizer.get_added_vocab() if _VISION_NAME.search(token)]
        return (*cls.placeholders(model_input).values(), *special)

    @classmethod
    def image_token_counts(cls, processor: ProcessorMixin, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens that images of these (width, height) take in the prompt, without decoding any."""
        # The method vLLM's transformers backend relies on; there is no public one, and some processors lack it.
        if not hasattr(processor, "_get_num_multimodal_tokens"):
            return [measured_tokens(cls, processor, size) for size in sizes]
        counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
        return list(counts["num_image_tokens"])

    @classmethod
    def media_arguments(cls, images: Sequence[Any], videos: Sequence[Video]) -> dict[str, Any]:
        """Keyword arguments with which a processor takes the media of its prompts; frames are already chosen."""
        arguments: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            told = [{key: each.metadata[key] for key in each.metadata.keys() - {"do_sample_frames"}} for each in videos]
            frames = [each.frames for each in videos]
            arguments |= {"videos": frames, "video_metadata": told, "do_sample_frames": False}
        return arguments


@lru_cache(maxsize=4096)
def measured_tokens(media: type[MediaConventions], processor: Any, size: tuple[int, int]) -> int:
    """Tokens that an image takes, by processing a blank one.

    Args:
        media: the conventions of the model's family.
        processor: of the model.
        size: (width, height) in pixels.
    """
    text = media.placeholders(processor)["image"]
    expanded = processor(text=[text], **media.media_arguments([Image.new("RGB", size)], []))["input_ids"][0]
    return len(expanded) - len(processor.tokenizer(text)["input_ids"]) + 1


def special_tokens(prompt: str, tokenizer: Any) -> dict[str, bool]:
    """Keyword arguments with which a tokenizer or processor reads a whole prompt: it adds its special tokens, but for
    a text that begins with one, as many chat templates write it."""
    begin = getattr(tokenizer, "bos_token", None)  # not all of vLLM's tokenizers name it
    return {"add_special_tokens": False} if begin and prompt.startswith(begin) else {}


def without_marks(text: str, marks: Sequence[str]) -> str:
    """The text without tokens that a model would read as more than text."""
    while any(mark in text for mark in marks):  # without one, what stood around it may be another
        for mark in marks:
            text = text.replace(mark, "")
    return text


def prompt_ids(prompts: Sequence[str], tokenizer: Any, rendered: bool = False) -> list[list[int]]:
    """Token ids of whole prompts, with one placeholder a medium.

    Args:
        prompts: texts.
        tokenizer: of the model.
        rendered: its own chat template has written them, with all special tokens; a processor adds its own.
    """
    if rendered:
        return [list(ids) for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]
    runs = groupby(prompts, key=partial(special_tokens, tokenizer=tokenizer))
    return [list(ids) for arguments, texts in runs for ids in tokenizer(list(texts), **arguments)["input_ids"]]


def render_prompt(
    row: PromptRow,
    model_input: ModelInput,
    config: DataConfig,
    media: type[MediaConventions] = MediaConventions,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt as the model's chat template writes it, up to where the answer begins, or the image to be drawn.

    One placeholder per image or video, not expanded: what vLLM and MultimodalDataProcessor take. With
    apply_chat_template false it is the row's string as it stands. system_prompt comes first unless the row has its own.

    Args:
        row: whose prompt it is, and which may ask for an image.
        model_input: which has the chat template.
        config: of the data, for apply_chat_template and system_prompt.
        media: the conventions of the model's family, which say how an image begins.
        tools: schemas of what the model may call.

    Raises:
        DataError: naming the row, also where the template leaves out a message. ConfigError: when there is no template.
    """
    text = row.prompt
    if config.apply_chat_template:
        if model_input.chat_template is None:
            raise ConfigError("the model has no chat template: set --apply_chat_template false and write whole prompts")
        messages = messages_of(row, config)
        given = template_arguments(config, tools) | {"add_generation_prompt": True}
        text = _templated(messages, row.source, model_input, given)
        roles = tuple(message["role"] for message in messages)
        left_out = _left_out(model_input, roles, given)
        if left_out is not None:
            told = f"leaves out message {left_out}, of role {roles[left_out]!r}, of a prompt of {', '.join(roles)}"
            raise DataError(f"{row.source}: the chat template {told}", "chat template")
    return media.begin_drawing(text, model_input, row.source) if row.draw else text


def check_template_kwargs(model_input: ModelInput, config: DataConfig) -> None:
    """Raise ConfigError for a name of chat_template_kwargs that the chat template does not read."""
    template = model_input.chat_template
    for name in config.chat_template_kwargs if template is not None else ():
        if name in OWN_KWARGS:
            raise ConfigError(f"chat_template_kwargs: {name} is set by the run itself")
        if re.search(rf"\b{re.escape(name)}\b", str(template)) is None:
            raise ConfigError(f"chat_template_kwargs: the model's chat template reads no {name}")


def caption_of(row: PromptRow) -> str | None:
    """What a row that asks for an image wants drawn: the text of its last message."""
    if not row.draw or isinstance(row.prompt, str):
        return row.prompt if row.draw else None
    return text_of(row.prompt[-1])


def text_of(message: Mapping[str, Any]) -> str:
    """The text parts of a message."""
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def messages_of(row: PromptRow, config: DataConfig) -> list[dict[str, Any]] | None:
    """The messages that a prompt is rendered of, the system prompt among them; None where it is a whole text."""
    if not config.apply_chat_template:
        return None
    messages = [dict(message) for message in row.prompt]
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": config.system_prompt}]})
    return messages


def render_answer(
    answer: str,
    prompt: str,
    messages: Sequence[dict[str, Any]] | None,
    model_input: ModelInput,
    ends: Mapping[str, int],
    given: Mapping[str, Any],
) -> tuple[str, int]:
    """What a model is to write behind a prompt, and the id of the end token behind it.

    It is the answer as the chat template writes it there, thoughts that the prompt has opened closed, up to its first
    end token. Where the template does not write it whole behind the prompt, it is the answer as it stands, up to the
    end token that it may end with.

    Args:
        answer: a text.
        prompt: as `render_prompt` has it.
        messages: that it was rendered of; None: no chat template was.
        model_input: which has the chat template.
        ends: ids of the end tokens by their text, first the one for where the template writes none.
        given: to the template besides, see `template_arguments`.
    """
    end = next(iter(ends.values()), -1)
    if brought := [text for text in ends if text and answer.rstrip().endswith(text)]:
        own = max(brought, key=len)
        answer, end = answer.rstrip().removesuffix(own), ends[own]
    stripped = answer.strip()
    if messages is None or not stripped:
        return answer, end
    said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    with suppress(DataError):
        whole = _templated([*messages, said], "", model_input, given)
        behind = whole[len(prompt) :] if whole.startswith(prompt) else ""
        stops = [(behind.index(text), -len(text), token) for text, token in ends.items() if text and text in behind]
        before, found, _ = behind.rpartition(stripped)
        last = len(before + found) if found else len(behind.rstrip())  # a turn may end with what ends no generation
        stop, _, end_here = min(stops, default=(last, 0, end))
        written, asked, whole_answer = ("".join(text.split()) for text in (prompt + behind[:stop], prompt, answer))
        if whole_answer in written and written.rindex(whole_answer) + len(whole_answer) > len(asked):
            return behind[:stop], end_here
    told = "the chat template does not write every answer whole behind its prompt: such ones are trained as they stand"
    warn_once(told)
    return answer, end


def _left_out(model_input: ModelInput, roles: tuple[str, ...], given: Mapping[str, Any]) -> int | None:
    """Which message of such roles the chat template does not write; None: it writes all, or refuses the marks."""
    known = _LEFT_OUT.setdefault(model_input, {})
    tools = [tool.get("function", tool)["name"] for tool in given.get("tools", ())]  # whose schemas are long
    key = str(model_input.chat_template), roles, repr({**given, "tools": tools})
    if key not in known:  # rows are checked by several threads: it is written once it is known
        marks, found = [f"m4rk{index}m" for index in range(len(roles))], None
        messages = [{"role": role, "content": [{"type": "text", "text": mark}]} for role, mark in zip(roles, marks)]
        with suppress(DataError):
            text = _templated(messages, "", model_input, given)
            found = next((index for index, mark in enumerate(marks) if mark not in text), None)
        known[key] = found
    return known[key]


def template_arguments(config: DataConfig, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a chat template is given beside the messages."""
    return {**config.chat_template_kwargs, **({"tools": list(tools)} if tools else {})}


def _templated(
    messages: Sequence[dict[str, Any]], source: str, model_input: ModelInput, given: Mapping[str, Any]
) -> str:
    if not isinstance(model_input, ProcessorMixin):
        if any(part["type"] != "text" for message in messages for part in message["content"]):
            raise DataError(f"{source}: the row has images or videos, the model has no processor for them", "media")
        messages = [{**message, "content": text_of(message)} for message in messages]  # one text each
    try:
        return model_input.apply_chat_template(messages, tokenize=False, **given)
    except Exception as error:  # a template is a program: `{{ 1 / 0 }}`
        text = f"{source}: the chat template refuses the prompt: {reason_of(error)}"
        raise DataError(text, "chat template") from error
