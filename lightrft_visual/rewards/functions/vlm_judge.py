"""Generative judges: a model reads prompt, response and images and writes a score, which is parsed from its text.

`Judging` says how to ask and how to read; `VLMJudge` asks an OpenAI-compatible server, such as `vllm serve`.
"""

import asyncio
import json
import re
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...config.shared import RewardConfig
from ...errors import ConfigError
from ..batch import Call, Failed, RewardBatch, Scores
from ..remote.client import Exchange, Phase, RemoteClient, RequestFailed, ServerSource, replicas_of
from ..remote.wire import BadReply

TEXT_QUESTION = (
    "You grade answers. Question:\n{prompt}\n\nReference answer:\n{reference}\n\nAnswer to grade:\n{response}\n\n"
    "How good is the answer, from {low:g} (wrong) to {high:g} (perfect)? End with a line `Score: <number>`."
)
MEDIA_QUESTION = (
    "The picture was made for this description:\n{prompt}\n\nHow well does it show the description, and how good does "
    "it look, from {low:g} (not at all) to {high:g} (perfectly)? End with a line `Score: <number>`."
)
EDIT_QUESTION = (
    "The last picture was made from what stands before it by this instruction:\n{prompt}\n\nHow well is the "
    "instruction followed, with everything else left as it was, from {low:g} (not at all) to {high:g} (perfectly)? End "
    "with a line `Score: <number>`."
)
# Of chat templates: the judge would take them for turns and places of images of its own.
MARKS = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|</?(?:start|end)_of_(?:turn|image)>|<image(?:_soft_token)?>|\[/?(?:INST|IMG)\]"
)
SCORE_PATTERN = r"(?i)score(?:\s*[(\[][^)\]\n]{0,40}[)\]])?(?:\s+is|\s+of)?[^\w.-]{0,8}(-?(?:\d+(?:\.\d+)?|\.\d+))"

SHOWN_PATTERN = 100  # characters
CUT = "the judge's reply was cut at max_tokens"


@dataclass(frozen=True)
class Judging:
    """How a judge is asked and read. question: a template with {prompt}, {response}, {reference}, {low}, {high}.
    pattern: a regular expression whose first group is the score; its last match counts. The score must lie in
    [low, high], else it is failed, and is mapped to 0..1. sources: whether it sees what an image was made from."""

    question: str | None = None
    pattern: str = SCORE_PATTERN
    low: float = 0.0
    high: float = 10.0
    max_tokens: int = 256
    system: str | None = None
    sources: bool = True

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"judge: low is {self.low} and high is {self.high}; low must be smaller")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"judge: the pattern is not a regular expression: {error}") from error
        if groups < 1:
            raise ConfigError("judge: the pattern needs a group (...) around the number")
        try:
            self._fill("", "", "", self.question or "")
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"judge: the question has an unknown field {error}") from error

    def _fill(self, prompt: str, response: str, reference: str, question: str) -> str:
        return question.format(prompt=prompt, response=response, reference=reference, low=self.low, high=self.high)

    def messages(self, batch: RewardBatch, index: int, image_part: Any) -> list[dict[str, Any]]:
        """Chat messages about one sample, its images first, before these the ones that it was made from.

        Args:
            batch: which has the sample.
            index: of the sample in the batch.
            image_part: makes a content part of an image.
        """
        sources = batch.source_images[index] if batch.source_images and self.sources else []
        made = batch.generated or any(batch.drawn[index : index + 1])
        asked = (EDIT_QUESTION if sources else MEDIA_QUESTION) if made else TEXT_QUESTION
        question = self.question or asked
        reference = "(none)" if batch.references[index] is None else str(batch.references[index])
        text = self._fill(batch.prompts[index], batch.responses[index], reference, question)
        images = [image_part(image) for image in (*sources, *batch.frames(index))]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": [*images, {"type": "text", "text": text}]}]

    def read(self, text: str, cut: bool = False) -> float:
        """The score in 0..1. Raises BadReply when the text has none in range; of one that is cut, when it has none in a
        line of its own before the last, unless the pattern is one's own: `A score of 0 would mean` is none."""
        if cut and self.pattern == SCORE_PATTERN:
            alone = rf"(?i)\W*{SCORE_PATTERN.removeprefix('(?i)')}(?:/\d+)?\W*"
            text = "\n".join(line for line in text.split("\n")[:-1] if re.fullmatch(alone, line))
        found = list(re.finditer(self.pattern, text))
        if not found:
            told = "`Score: <number>`" if self.pattern == SCORE_PATTERN else ascii(self.pattern[:SHOWN_PATTERN])
            raise BadReply(CUT if cut else f"the judge's text has no score, for which pattern looks by {told}")
        try:
            value = float(found[-1][1] or "")
        except ValueError:
            raise BadReply("the judge's score is not a number") from None
        if not self.low <= value <= self.high:
            raise BadReply(f"the judge's score is outside {self.low:g} to {self.high:g}")
        return (value - self.low) / (self.high - self.low)


class VLMJudge(ServerSource):
    """Asks the model at `url` about each sample with its images, one request a sample; see `Judging` for question and
    pattern. Unusable answers are failed, with the server's name.

    url: the server's base, such as http://host:8000/v1, or `a|b` for replicas. token_env: environment variable with its
    key. timeout and concurrency: as reward_timeout and reward_concurrency of the run, whose they are by default, as its
    retries and the format of its images are. reward_config: these settings of the run, which gives them.
    """

    name = "vlm_judge"

    def __init__(
        self,
        url: str,
        model: str,
        question: str | None = None,
        pattern: str = SCORE_PATTERN,
        low: float = 0.0,
        high: float = 10.0,
        max_tokens: int = 256,
        timeout: float | None = None,
        concurrency: int | None = None,
        token_env: str | None = None,
        reward_config: RewardConfig | None = None,
    ) -> None:
        self.model, self.judging = model, Judging(question, pattern, low, high, max_tokens)
        self.replicas = [f"{base.rstrip('/')}/chat/completions" for base in replicas_of(url)]
        run = reward_config or RewardConfig()
        own = {"reward_timeout": timeout or run.reward_timeout, "reward_token_env": token_env}
        own["reward_concurrency"] = concurrency or run.reward_concurrency
        self.client = RemoteClient(replace(run, **own))

    def submit(self, batch: RewardBatch, call: Call) -> Future[Scores]:
        """Ask about every sample at once."""
        return self.client.loop.submit(self._score(batch, call))

    async def _score(self, batch: RewardBatch, call: Call) -> Scores:
        phase = Phase()
        return Scores.of(await asyncio.gather(*(self._one(batch, i, call, phase) for i in range(len(batch)))))

    async def _one(self, batch: RewardBatch, index: int, call: Call, phase: Phase) -> float | Failed:
        exchange = Exchange(self.replicas, partial(self._body, batch, index, call), self._decode, index, phase)
        try:
            return await self.client.exchange(exchange)
        except RequestFailed as failure:
            self.failed = exchange
            return Failed(str(failure))

    def _body(self, batch: RewardBatch, index: int, call: Call) -> bytes:
        kind = self.client.config.reward_image_format
        encode = partial(call.encoded.encode, image_format=kind)

        def part(image: Any) -> dict[str, Any]:
            return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{encode(image)}"}}

        messages = self.judging.messages(batch, index, part)
        asked = messages[-1]["content"][-1]
        while MARKS.search(asked["text"]):  # without one, what stood around it may be another
            asked["text"] = MARKS.sub("", asked["text"])
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self.judging.max_tokens,
        }
        return json.dumps(body).encode()

    def _decode(self, reply: Any) -> float:
        try:
            choice = reply["choices"][0]
            text, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            raise BadReply("the reply is no chat completion") from None
        if not isinstance(text, str):
            raise BadReply("the judge gave no text")
        return self.judging.read(text, cut)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
