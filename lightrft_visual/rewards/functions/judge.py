"""Any vision-language model in this process as a judge: asked by a template, answered in numbers that are checked.

The model waits on the host while the policy generates and trains. A question about the same images is asked once.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from ...data.rendering import without_marks
from ...errors import ConfigError, refused_as
from ..batch import Failed, RewardBatch
from ..remote.wire import BadReply
from .judge_engines import Messages, TransformersReplies, VLLMReplies
from .vlm_judge import CUT, SCORE_PATTERN, Judging

TEMPLATE = ("question", "system", "reply", "pattern", "low", "high", "max_tokens")  # what a file of one may hold


@dataclass(frozen=True)
class Schema(Judging):
    """With `reply`, the fields of a JSON object that the answer ends with: {name: [lowest, highest]}. The score is
    their mean in 0..1. Without, a number that `pattern` finds."""

    reply: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reply, Mapping):
            raise ConfigError(f"judge: reply is {self.reply!r}; it must be a mapping of name to [lowest, highest]")
        for name, ends in self.reply.items():
            numbers = isinstance(ends, Sequence) and all(isinstance(end, Real) for end in ends)
            if not numbers or len(ends) != 2 or not ends[0] < ends[1]:
                raise ConfigError(f"judge: reply.{name} is {ends!r}; it must be [lowest, highest]")

    def messages(self, batch: RewardBatch, index: int, image_part: Any) -> Messages:
        """See `Judging.messages`; the question ends with the form of the reply."""
        found = super().messages(batch, index, image_part)
        fields = ", ".join(f'"{name}": <number from {low:g} to {high:g}>' for name, (low, high) in self.reply.items())
        if fields:
            found[-1]["content"][-1]["text"] += f"\n\nEnd with one JSON object and nothing else: {{{fields}}}"
        return found

    def fields(self, text: str, cut: bool) -> dict[str, float]:
        """{field: number in 0..1}. Raises BadReply as `read`, and where one is missing, no number or out of range; with
        `reply` also for a cut text, which may hold a draft."""
        if not self.reply:
            return {"score": self.read(text, cut)}
        if cut:
            raise BadReply(CUT)
        start, end = text.rfind("{"), text.rfind("}")
        try:
            given = json.loads(text[start : end + 1])
        except ValueError:
            raise BadReply("the judge's reply ends with no JSON object") from None
        found = {}
        for name, (low, high) in self.reply.items():
            value = given.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise BadReply(f"the judge's {name} is no number from {low:g} to {high:g}")
            found[name] = (value - low) / (high - low)
        return found


class Judge:
    """The mean of what the model replies, in 0..1; each field is a metric. What is not in the schema is a failure.

    model: a folder or hub name. template: a question with {prompt}, {response}, {reference}, {low} and {high}, or a
    YAML file of `question`, `system`, `reply`, `pattern`, `low`, `high`, `max_tokens`. reply, low, high, pattern,
    max_tokens, system: likewise, over those of the file. batch_size: samples at once. cache: replies that are kept.

    engine: `hf`, or `vllm` with `mem_util` of the device and at most `max_length` tokens; on CUDA it sleeps between
    calls where `offload` is set. vLLM lets one engine of a process sleep: beside a policy that sleeps, only `hf` can.

    Further metrics, a sample: `judge_asked` (0 where the reply was known), `judge_tokens` and `judge_seconds`.
    """

    def __init__(
        self,
        model: str,
        template: str | None = None,
        reply: Mapping[str, Sequence[float]] | None = None,
        system: str | None = None,
        pattern: str | None = None,
        low: float | None = None,
        high: float | None = None,
        max_tokens: int | None = None,
        batch_size: int = 8,
        cache: int = 100_000,
        bf16: bool = True,
        offload: bool = True,
        engine: str = "hf",
        mem_util: float = 0.3,
        max_length: int = 8192,
    ) -> None:
        given = {"reply": reply, "system": system, "pattern": pattern, "low": low, "high": high}
        given |= {"max_tokens": max_tokens}
        self.schema = Schema(**template_of(template) | {k: v for k, v in given.items() if v is not None})
        if engine not in ("hf", "vllm"):
            raise ConfigError(f"scorer judge: engine is {engine!r}; it must be hf or vllm")
        self.cache, own = cache, (model, bf16, self.schema.max_tokens, batch_size, offload)
        self._replies = VLLMReplies(*own, mem_util, max_length) if engine == "vllm" else TransformersReplies(*own)
        self._known: OrderedDict[bytes, tuple[dict[str, float] | str, int]] = OrderedDict()

    def __call__(self, batch: RewardBatch, device: Any) -> dict[str, list[Any]]:
        started = time.perf_counter()
        asked = [self.asked(batch, index) for index in range(len(batch))]
        keys = [_key(messages) for messages in asked]
        new = {key: messages for key, messages in zip(keys, asked) if key not in self._known}
        replied = self._replies(list(new.values()), device) if new else []
        for key, (text, tokens, cut) in zip(new, replied):
            try:
                self._known[key] = self.schema.fields(text, cut), tokens
            except BadReply as problem:
                self._known[key] = str(problem), tokens
        replies = [self._known[key] for key in keys]
        for key in keys:
            self._known.move_to_end(key)
        while len(self._known) > self.cache:
            self._known.popitem(last=False)
        first = [key in new and keys.index(key) == index for index, key in enumerate(keys)]
        return self._scores(replies, first, (time.perf_counter() - started) / max(1, len(batch)))

    def asked(self, batch: RewardBatch, index: int) -> Messages:
        """Chat messages about one sample. Marks in its text, such as its own template's places of images, are left out:
        the judge would take them for places of more images."""
        messages = self.schema.messages(batch, index, _shown)
        part = messages[-1]["content"][-1]
        part["text"] = without_marks(part["text"], self._replies.marks)
        return messages

    def _scores(
        self, replies: Sequence[tuple[dict[str, float] | str, int]], first: Sequence[bool], seconds: float
    ) -> dict[str, list[Any]]:
        scores = [Failed(f) if isinstance(f, str) else sum(f.values()) / len(f) for f, _ in replies]
        fields = {
            name: [None if isinstance(found, str) else found[name] for found, _ in replies]
            for name in self.schema.reply
        }
        tokens = [float(count) if new else 0.0 for (_, count), new in zip(replies, first)]
        costs = {"judge_asked": [float(new) for new in first], "judge_tokens": tokens}
        return {"rewards": scores, **fields, **costs, "judge_seconds": [seconds] * len(replies)}

    def close(self) -> None:
        """Give back what the engine holds."""
        self._replies.close()


def template_of(template: str | None) -> dict[str, Any]:
    """The settings of a template that is a YAML file, or the question that it is."""
    if template is None or not template.endswith((".yaml", ".yml")):
        return {"question": template, "pattern": SCORE_PATTERN}
    with refused_as(ConfigError, f"judge: the template {template} cannot be read"):
        found = yaml.safe_load(Path(template).read_bytes())
    others = sorted(map(str, set(found) - set(TEMPLATE))) if isinstance(found, Mapping) else ["no names with values"]
    if others:
        raise ConfigError(f"judge: the template {template} holds {', '.join(others)}; known are {', '.join(TEMPLATE)}")
    return dict(found)


def _shown(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image.convert("RGB")}


def _key(messages: Messages) -> bytes:
    """A hash of what is asked and of the pixels that are shown."""
    digest = hashlib.sha256()
    for message in messages:
        parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        for part in parts:
            image = part.get("image")
            said = part["text"].encode() if image is None else repr(image.size).encode() + image.tobytes()
            digest.update(f"{message['role']} {'text' if image is None else 'image'} {len(said)} ".encode() + said)
    return digest.digest()
