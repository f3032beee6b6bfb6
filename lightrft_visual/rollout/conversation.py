"""Tokens of a conversation: they grow by what the engine sampled and by what is put behind it, and are never made anew.

The chat template is asked for differences only: how a conversation goes on behind an answer. Tokens of earlier turns
stay as they were sampled, whatever text they decode to.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import ProcessorMixin

from ..data.media import Video
from ..errors import ConfigError, DataError, reason_of, writable
from ..experience.rollouts import Completion, Episode, PromptFeatures, Turn
from ..experience.vision import VisionTensors
from ..runtime.seeding import derive_seed
from .environments import EnvironmentFailure, Message, Observation
from .multimodal import MultimodalDataProcessor

_MARK = "THE-ANSWER"
_ANSWERS = (_MARK, f"<think>\nthoughts\n</think>\n\n{_MARK}")
_SEEN = "THE-OBSERVATION"
_QUESTION: Message = {"role": "user", "content": [{"type": "text", "text": "a question"}]}
_NOTHING: dict[str, str] = {"type": "text", "text": ""}
_CUT = "\n[...]\n"


@dataclass
class Added:
    """What an observation adds to a conversation. token_ids: media expanded; unexpanded: one placeholder a medium."""

    token_ids: list[int]
    unexpanded: list[int]
    images: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    vision: VisionTensors = field(default_factory=VisionTensors)


class ObservationRenderer:
    """From observations to the tokens that follow an answer, by the model's chat template.

    data: makes tokens and reads media. end_tokens: texts of the tokens that end an answer. most_tokens: of an
    observation's text; what is longer is cut in the middle. most_media: images and videos of an episode, by kind.
    roles: that observations have, each checked here; others are at their first message. tools: their schemas. Raises
    ConfigError where the template leaves an observation out, or changes what stands before it, so that earlier turns
    would not be those that were sampled.
    """

    def __init__(
        self,
        data: MultimodalDataProcessor,
        end_tokens: Sequence[str],
        most_tokens: int | None = None,
        most_media: dict[str, int] | None = None,
        roles: Sequence[str] = ("user",),
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.data, self.end_tokens, self.most_tokens = data, tuple(end_tokens), most_tokens
        self.most_media, self.tools = most_media or {}, list(tools)
        self.model_input = data.processor or data.tokenizer
        self._reserved = data.family.reserved(self.model_input)
        if self.model_input.chat_template is None:
            raise ConfigError("an environment needs the model's chat template, and this model has none")
        self._shown: set[tuple[str, ...]] = set()  # roles of messages that were checked
        for role in roles:
            self._check_roles(role)

    def added(self, observation: Observation, what: str) -> Added:
        """Its tokens behind an answer that has ended. Raises EnvironmentFailure for what no model could be shown."""
        messages = [self._checked(message) for message in observation.messages]
        try:
            self._check_roles(*(message["role"] for message in messages))
            text = self._behind(self._shortened(messages))
            added = Added(*self.data.difference(text, observation.images, observation.videos, what))
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
        function = {"name": self.tools[0].get("function", self.tools[0])["name"], "arguments": {"given": _MARK}}
        calls = [{"type": "function", "id": "call00000", "function": function}]
        try:
            whole = self._render([_QUESTION, {"role": "assistant", "content": [_NOTHING], "tool_calls": calls}])
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
            ids, _, loaded, clips, vision = self.data.difference(text, *media, "reset", whole=True)
        except (DataError, ConfigError) as error:
            raise EnvironmentFailure(f"an observation that cannot be shown: {error}") from error
        if len(ids) > self.data.prompt_max_len:
            raise EnvironmentFailure(f"the prompt after reset has {len(ids)} tokens, above prompt_max_len")
        loaded, clips = _kept(loaded, observation.images), _kept(clips, observation.videos)
        begun = replace(prompt, text=text, token_ids=ids, images=loaded, videos=clips, vision=vision, messages=messages)
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
        for part in message["content"]:
            text = part.get("text", "")
            if writable(text) != text:
                raise EnvironmentFailure("an observation that cannot be shown: its text holds a lone surrogate")
            typed = next((token for token in self._reserved if token in text), None)
            if typed is not None:
                raise EnvironmentFailure(f"the text of an observation holds {typed}, which the model reads as an image")
        return message

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
        mark = len(tokenizer(_CUT, add_special_tokens=False)["input_ids"])
        for part, own in sorted(zip(texts, ids), key=lambda pair: -len(pair[1])):
            if excess > 0:
                keep = max(0, len(own) - excess - mark)
                head, tail = own[: (keep + 1) // 2], own[len(own) - keep // 2 :]
                cut[id(part)] = tokenizer.decode(head) + _CUT + tokenizer.decode(tail)
                excess -= len(own) - keep - mark
        return [
            {**message, "content": [{**p, "text": cut[id(p)]} if id(p) in cut else p for p in message["content"]]}
            for message in messages
        ]

    def _check_roles(self, *roles: str) -> None:
        if roles in self._shown:
            return
        messages: list[Message] = [{"role": role, "content": [{"type": "text", "text": _SEEN}]} for role in roles]
        for answer in _ANSWERS if "think" in str(self.model_input.chat_template) else _ANSWERS[:1]:
            if self._behind(messages, answer).count(_SEEN) < len(roles):
                raise ConfigError(
                    f"the chat template leaves out messages that follow an answer (of role {', '.join(roles)}): the "
                    "model would not see what the environment replied. Use a template that writes them, or other roles"
                )
        self._shown.add(roles)

    def _behind(self, messages: list[Message], answer: str = _MARK) -> str:
        """The text from behind the end of an answer to where the next one begins."""
        before = [_QUESTION, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        earlier, whole = self._render(before), self._render([*before, *messages], generation=True)
        if _MARK not in earlier or not whole.startswith(earlier):
            role = messages[0]["role"]
            raise ConfigError(
                f"the chat template writes an earlier answer otherwise once a message of role {role!r} follows it "
                "(such as without its thoughts): the tokens that were sampled would not be those of the conversation. "
                "Use a template that leaves earlier turns as they are"
            )
        behind = whole[earlier.rindex(_MARK) + len(_MARK) :]
        end = next((token for token in self.end_tokens if behind.startswith(token)), "")
        return behind[len(end) :]

    def _render(self, messages: list[Message], generation: bool = False, tools: list | None = None) -> str:
        if not isinstance(self.model_input, ProcessorMixin):
            messages = [{**each, "content": _text_of(each)} for each in messages]
        tools = self.tools if tools is None else tools
        arguments: dict[str, Any] = {"tools": tools} if tools else {}
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


def _text_of(message: Message) -> str:
    if any(part["type"] != "text" for part in message["content"]):
        raise EnvironmentFailure("an observation has images or videos, the model has no processor for them")
    return "".join(part["text"] for part in message["content"])


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
