"""Tokens of a conversation: they grow by what the engine sampled and by what is put behind it, and are never made anew.

The chat template is asked for differences only: how a conversation goes on behind an answer. Tokens of earlier turns
stay as they were sampled, whatever text they decode to.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import ProcessorMixin

from ..data.media import Video
from ..data.rendering import text_of, without_marks
from ..errors import ConfigError, DataError, reason_of, writable
from ..experience.rollouts import Completion, Episode, PromptFeatures, Turn
from ..experience.vision import VisionTensors
from ..runtime.seeding import derive_seed
from .environments import CALL_ERROR, CUT, EnvironmentFailure, Message, Observation
from .multimodal import Added, MultimodalDataProcessor

_MARK = "THE-ANSWER"
_ANSWERS = (_MARK, f"<think>\nthoughts\n</think>\n\n{_MARK}")
_SEEN = "THE-OBSERVATION"
_QUESTION: Message = {"role": "user", "content": [{"type": "text", "text": "a question"}]}
_PRINTED = ("{'type'", '{"type"')  # how a template writes the parts of a content where it takes it for a value


class _Style(NamedTuple):
    """How chat templates take messages of tools. as_text: their content as a text, not as parts; called: they follow an
    answer that has calls."""

    as_text: bool = False
    called: bool = False


_STYLES = (_Style(), _Style(as_text=True), _Style(called=True), _Style(as_text=True, called=True))


class ObservationRenderer:
    """From observations to the tokens that follow an answer, by the model's chat template.

    data: makes tokens and reads media. end_tokens: texts of the tokens that end an answer. most_tokens: of an
    observation's text; what is longer is cut in the middle. most_media: images and videos of an episode, by kind.
    roles: that observations have, each checked here; others are at their first message. tools: their schemas.
    template_kwargs: what else the chat template reads. Raises ConfigError where the template leaves an observation out,
    or changes what stands before it, so that earlier turns would not be those that were sampled.
    """

    def __init__(
        self,
        data: MultimodalDataProcessor,
        end_tokens: Sequence[str],
        most_tokens: int | None = None,
        most_media: dict[str, int] | None = None,
        roles: Sequence[str] = ("user",),
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.data, self.end_tokens, self.most_tokens = data, tuple(end_tokens), most_tokens
        self.most_media, self.tools, self.template_kwargs = most_media or {}, list(tools), dict(template_kwargs or {})
        self.model_input = data.processor or data.tokenizer
        self._reserved = data.family.reserved(self.model_input)
        if self.model_input.chat_template is None:
            raise ConfigError("an environment needs the model's chat template, and this model has none")
        self._styles: dict[tuple[str, ...], _Style] = {}  # by the roles of messages
        for role in roles:
            self._style_of(role)

    def added(self, observation: Observation, what: str, last: str = "") -> Added:
        """Its tokens behind an answer that has ended.

        Args:
            observation: that the model is shown.
            what: for errors.
            last: the end token that the answer was sampled with.

        Raises:
            EnvironmentFailure: for what no model could be shown.
        """
        messages = [self._checked(message) for message in observation.messages]
        try:
            style = self._style_of(*(message["role"] for message in messages))
            text = self._behind(self._shortened(messages), style, last=last)
            added = self.data.difference(text, observation.images, observation.videos, what)
            images, videos = _kept(added.images, observation.images), _kept(added.videos, observation.videos)
            return replace(added, images=images, videos=videos)
        except (DataError, ConfigError) as error:
            raise EnvironmentFailure(f"an observation that cannot be shown: {error}") from error

    def hidden_tools(self) -> list[str]:
        """Names of the tools that the chat template does not show the model."""
        shown, plain = self._render([_QUESTION]), self._render([_QUESTION], tools=[])
        names = [tool.get("function", tool)["name"] for tool in self.tools]
        return [name for name in names if shown.count(name) <= plain.count(name)]

    def taught_call(self) -> str:
        """A call of the first tool as the chat template writes one; empty where it writes none."""
        answer = _answer_that_calls([self.tools[0].get("function", self.tools[0])["name"]])
        try:
            whole = self._render([_QUESTION, answer])
        except ConfigError:
            return ""
        for generation in (True, False):  # some write another beginning of an answer than the one they prompt with
            whole = whole.removeprefix(self._render([_QUESTION], generation))
        return whole if _MARK in whole else ""

    def begin(self, prompt: PromptFeatures, observation: Observation) -> PromptFeatures:
        """The prompt of an episode whose environment said how it begins: with an observation behind the last message of
        the sample, or with whole messages in their place. Raises EnvironmentFailure."""
        messages, images, videos = [self._checked(each) for each in observation.messages], [], []
        if not observation.whole:
            if prompt.messages is None:
                raise EnvironmentFailure("reset gave an observation, but the prompt is no list of messages")
            (added,), own = self._shortened(messages), list(prompt.messages)
            images, videos = prompt.images, prompt.videos
            messages = [*own[:-1], {**own[-1], "content": [*own[-1]["content"], *added["content"]]}]
        try:
            text = self._render(messages, generation=True)
            media = [*images, *observation.images], [*videos, *observation.videos]
            made = self.data.difference(text, *media, "reset", whole=True)
        except (DataError, ConfigError) as error:
            raise EnvironmentFailure(f"an observation that cannot be shown: {error}") from error
        ids = made.token_ids
        if len(ids) > self.data.prompt_max_len:
            raise EnvironmentFailure(f"the prompt after reset has {len(ids)} tokens, above prompt_max_len")
        kept = {"images": _kept(made.images, observation.images), "videos": _kept(made.videos, observation.videos)}
        begun = replace(prompt, text=text, token_ids=ids, **kept, vision=made.vision, messages=messages)
        self.check_media(begun, Episode(), Added([], []))
        return begun

    def check_media(self, prompt: PromptFeatures, episode: Episode, added: Added) -> None:
        """Raise EnvironmentFailure where an episode would hold more images or videos than the engine takes.

        Args:
            prompt, episode: what it holds so far.
            added: what would come to it.
        """
        for kind in ("images", "videos"):
            count = sum(len(getattr(each, kind)) for each in (prompt, episode, added))
            most = self.most_media.get(kind)
            if most is not None and count > most:
                flag = f"limit_mm_{kind[:-1]}_per_prompt"
                raise EnvironmentFailure(f"the episode has {count} {kind} with this observation, above {flag} = {most}")

    def _checked(self, message: Message) -> Message:
        """The message; the model's own words in it, a tool's name and what an error quotes, without its marks."""
        parts = [self._quoted(part, "text", CALL_ERROR) for part in message["content"]]
        message = self._quoted({**message, "content": parts}, "name")
        for part in message["content"]:
            text = part.get("text", "")
            if writable(text) != text:
                raise EnvironmentFailure("an observation that cannot be shown: its text holds a lone surrogate")
            typed = next((token for token in self._reserved if token in text), None)
            if typed is not None:
                raise EnvironmentFailure(f"the text of an observation holds {typed}, which the model reads as an image")
        return message

    def _quoted(self, given: dict[str, Any], key: str, begin: str = "") -> dict[str, Any]:
        text = given.get(key)
        return {**given, key: without_marks(text, self._reserved)} if text and text.startswith(begin) else given

    def _shortened(self, messages: list[Message]) -> list[Message]:
        """With the middle of the longest texts left out, so that all together have `most_tokens`."""
        if self.most_tokens is None:
            return messages
        tokenizer = self.data.tokenizer
        texts = [part for message in messages for part in message["content"] if part["type"] == "text"]
        ids = [tokenizer(part["text"], add_special_tokens=False)["input_ids"] for part in texts]
        excess = sum(map(len, ids)) - self.most_tokens
        if excess <= 0:
            return messages
        cut: dict[int, str] = {}
        mark = len(tokenizer(CUT, add_special_tokens=False)["input_ids"])
        for part, own in sorted(zip(texts, ids), key=lambda pair: -len(pair[1])):
            if excess > 0:
                keep = max(0, len(own) - excess - mark)
                head, tail = own[: (keep + 1) // 2], own[len(own) - keep // 2 :]
                cut[id(part)] = tokenizer.decode(head) + CUT + tokenizer.decode(tail)
                excess -= len(own) - keep - mark
        return [
            {**message, "content": [{**p, "text": cut[id(p)]} if id(p) in cut else p for p in message["content"]]}
            for message in messages
        ]

    def _style_of(self, *roles: str) -> _Style:
        """The first in which the chat template shows messages of these roles behind an answer."""
        if roles not in self._styles:
            messages: list[Message] = [{"role": role, "content": [{"type": "text", "text": _SEEN}]} for role in roles]
            styles = _STYLES if roles[0] == "tool" else _STYLES[:1]
            errors = []
            for style in styles:
                try:
                    if self._is_shown(messages, style):
                        self._styles[roles] = style
                        break
                except ConfigError as error:
                    errors.append(error)
            else:
                left_out = ConfigError(
                    f"the chat template leaves out messages that follow an answer (of role {', '.join(roles)}): the "
                    "model would not see what the environment replied. Use a template that writes them, or other roles"
                )
                raise errors[0] if errors else left_out
        return self._styles[roles]

    def _is_shown(self, messages: list[Message], style: _Style) -> bool:
        thinks = "think" in str(self.model_input.chat_template) and not style.called
        texts = [self._behind(messages, style, answer) for answer in (_ANSWERS if thinks else _ANSWERS[:1])]
        return all(text.count(_SEEN) >= len(messages) and not any(map(text.count, _PRINTED)) for text in texts)

    def _behind(self, messages: list[Message], style: _Style, answer: str = _MARK, last: str = "") -> str:
        """The text from behind the end of an answer to where the next one begins; empty where a template takes no
        calls and is to show messages behind some."""
        given: Message = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        if style.called:
            tools = [message for message in messages if message["role"] == "tool"]
            given = _answer_that_calls([message.get("name") or "unknown" for message in tools])
            ids = iter(given["tool_calls"])
            messages = [{**m, "tool_call_id": next(ids)["id"]} if m["role"] == "tool" else m for m in messages]
        conversation = [_QUESTION, given, *messages]
        if style.as_text:
            conversation = [{**m, "content": _text_of(m)} if _is_text(m) else m for m in conversation]
        earlier, whole = self._render(conversation[:2]), self._render(conversation, generation=True)
        if style.called and _MARK not in earlier:
            return ""
        kept = answer in earlier and answer in whole  # what a template puts before an answer does not matter
        marks = earlier.count(_MARK)  # an observation may hold more of them
        if not 0 < marks <= whole.count(_MARK) or not (kept or whole.startswith(earlier)):
            role = messages[0]["role"]
            raise ConfigError(
                f"the chat template writes an earlier answer otherwise once a message of role {role!r} follows it "
                "(such as without its thoughts): the tokens that were sampled would not be those of the conversation. "
                "Use a template that leaves earlier turns as they are"
            )
        behind, ended = whole.split(_MARK, marks)[-1], earlier.rpartition(_MARK)[2]
        if style.called:  # the end of the last call follows, then that of the answer
            ends = [ended.index(token) for token in self.end_tokens if token in ended]
            if not ends:
                raise ConfigError("the chat template writes none of the model's end tokens behind an answer with calls")
            behind = behind[min(ends) :]
        end = next((token for token in self.end_tokens if behind.startswith(token)), "")
        # One that opens the next turn is the template's own, unless it was sampled.
        opens = style.called or not ended.startswith(end)
        return behind if opens and last not in ("", end) else behind[len(end) :]

    def _render(self, messages: list[Message], generation: bool = False, tools: list | None = None) -> str:
        if not isinstance(self.model_input, ProcessorMixin):
            messages = [{**each, "content": _text_of(each)} for each in messages]
        tools = self.tools if tools is None else tools
        arguments: dict[str, Any] = {**self.template_kwargs, **({"tools": tools} if tools else {})}
        try:
            return self.model_input.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=False, **arguments
            )
        except Exception as error:  # a template is a program
            raise ConfigError(f"the chat template refuses messages of an environment: {reason_of(error)}") from error


def _kept(media: list, given: Sequence[Any]) -> list:
    """The media; of what an environment gave as it is a copy, for it may go on drawing on its own."""
    return [
        copy.deepcopy(e) if given and isinstance(e, Video) else e.copy() if any(e is g for g in given) else e
        for e in media
    ]


def _answer_that_calls(names: Sequence[str]) -> Message:
    """An answer with a call of each tool."""
    functions = [{"name": name, "arguments": {"given": _MARK}} for name in names]
    calls = [{"type": "function", "id": f"call{at:05d}", "function": each} for at, each in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _is_text(message: Message) -> bool:
    return all(part["type"] == "text" for part in message["content"])


def _text_of(message: Message) -> str:
    if isinstance(message["content"], str):
        return message["content"]
    if not _is_text(message):
        raise EnvironmentFailure("an observation has images or videos, the model has no processor for them")
    return text_of(message)


@dataclass
class Conversation:
    """One episode in the making: copy `copy` of a prompt.

    token_ids, unexpanded: behind the prompt. start: ids of the prompt with one placeholder a medium. log_probs: 0 for
    tokens of observations; None where the engine gives none.
    """

    prompt: PromptFeatures
    copy: int
    start: list[int]
    episode: Episode
    token_ids: list[int] = field(default_factory=list)
    unexpanded: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    text: str = ""
    truncated: bool = False
    experts: Any = None

    @property
    def turns(self) -> int:
        """Finished ones."""
        return len(self.episode.turns)

    def request(self, limit: int) -> PromptFeatures:
        """What the engine is asked to continue, as one response of at most `limit` tokens."""
        if not self.turns:
            return replace(self.prompt, copy=self.copy, limit=limit)
        episode, prompt = self.episode, self.prompt
        return replace(
            prompt,
            token_ids=prompt.token_ids + self.token_ids,
            unexpanded=self.start + self.unexpanded,
            images=[*prompt.images, *episode.images],
            videos=[*prompt.videos, *episode.videos],
            vision=VisionTensors.in_order([prompt.vision, *episode.vision]),
            seed=derive_seed(prompt.seed, self.copy, self.turns),
            limit=limit,
        )

    def sampled(self, completion: Completion) -> None:
        """The tokens of a turn."""
        self._extend(completion.token_ids, completion.token_ids, self.turns, completion.log_probs)
        self.text, self.truncated = completion.text, completion.truncated
        self.experts = completion.experts  # of all turns so far
        self.episode.turns.append(Turn(completion.text))

    def observed(self, added: Added, messages: list[Message]) -> None:
        """The tokens of an observation, which the next turn follows."""
        self._extend(added.token_ids, added.unexpanded, -1, [0.0] * len(added.token_ids))
        episode = self.episode
        episode.turns[-1].observation = messages
        episode.images, episode.videos = [*episode.images, *added.images], [*episode.videos, *added.videos]
        if added.vision.names:
            episode.vision = [*episode.vision, added.vision]

    def _extend(self, ids: list[int], unexpanded: list[int], turn: int, log_probs: list[float] | None) -> None:
        self.token_ids, self.unexpanded = self.token_ids + ids, self.unexpanded + unexpanded
        self.episode.turn_ids = self.episode.turn_ids + [turn] * len(ids)
        if self.log_probs is not None:
            self.log_probs = None if log_probs is None else self.log_probs + log_probs
