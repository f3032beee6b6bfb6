"""Partial rollouts: responses are made in segments, between which workers take new weights and new prompts join.

Long answers then hold up neither: a call of an engine holds the unfinished responses of several batches, as many tokens
of each as a segment has, and what is unfinished afterwards goes on in the next call, by whichever worker.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from ....experience.rollouts import Completion, PromptFeatures, SamplingSettings
from .pool import WorkerPool


@dataclass
class _Batch:
    """Prompts that were begun together."""

    prompts: list[PromptFeatures]
    settings: SamplingSettings
    result: Future = field(default_factory=Future)
    made: dict[tuple[int, int], Completion] = field(default_factory=dict)  # by prompt and copy

    def take(self, place: tuple[int, int], completion: Completion) -> None:
        self.made[place] = completion
        n = self.settings.n
        if len(self.made) == len(self.prompts) * n:
            completions = [[self.made[index, copy] for copy in range(n)] for index in range(len(self.prompts))]
            self.result.set_result((completions, None))


@dataclass
class _Response:
    """One response in the making. versions: of the weights that drew each token."""

    batch: _Batch
    place: tuple[int, int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> PromptFeatures:
        index, copy = self.place
        return replace(self.batch.prompts[index], continued=list(self.token_ids), copy=copy)

    def extend(self, part: Completion, version: int) -> bool:
        """Take a segment; whether the response is finished by it. An image comes whole: lengths concern text alone."""
        drawn = part.image is not None
        most = len(part.token_ids) if drawn else self.batch.settings.max_new_tokens
        room = most - len(self.token_ids)
        self.token_ids += part.token_ids[:room]
        if part.log_probs is None:
            self.log_probs = None
        elif self.log_probs is not None:
            self.log_probs += part.log_probs[:room]
        self.versions += [version] * len(part.token_ids[:room])
        return len(self.token_ids) == most or not part.truncated

    def completion(self, last: Completion, tokenizer: PreTrainedTokenizerBase) -> Completion:
        """The whole response; last: its last segment."""
        if last.image is not None:
            return replace(last, versions=self.versions)
        cut = last.truncated or self.token_ids[-1] != last.token_ids[-1]
        text = self.batch.settings.text(self.token_ids, cut, tokenizer)
        made = self.token_ids, self.log_probs, text, cut, last.prompt_token_ids
        return Completion(*made, versions=self.versions, experts=last.experts)


class PartialRollouts:
    """Makes responses in segments of `tokens` tokens; a call of a worker holds at most `slots` responses.

    Raises what the pool's work raises, where the results of the batch are asked for.
    """

    def __init__(self, pool: WorkerPool, tokenizer: PreTrainedTokenizerBase, tokens: int, slots: int) -> None:
        self.pool, self.tokenizer, self.tokens, self.slots = pool, tokenizer, tokens, slots
        self._idle = len(pool.workers)
        self._waiting: deque[_Response] = deque()  # oldest first
        self._lock = threading.RLock()

    def begin(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> list[Future]:
        """The future of (n completions a prompt, None), whose `versions` are those of the weights."""
        batch = _Batch(list(prompts), settings)
        with self._lock:
            self._waiting += [_Response(batch, (i, copy)) for i in range(len(prompts)) for copy in range(settings.n)]
            self._pump()
        return [batch.result]

    def _pump(self) -> None:
        """Give idle workers what waits, in equal shares."""
        while self._idle and self._waiting:
            count = min(self.slots, math.ceil(len(self._waiting) / self._idle))
            settings = self._waiting[0].batch.settings
            segment = replace(settings, n=1, max_new_tokens=min(self.tokens, settings.max_new_tokens))
            responses = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._idle -= 1
            future = self.pool.submit([each.prompt for each in responses], segment)
            future.add_done_callback(lambda done, own=responses: self._take(done, own))

    def _take(self, done: Future, responses: list[_Response]) -> None:
        """What a worker made of its responses; where that failed, so do their batches, and it goes on with others."""
        with self._lock:
            self._idle += 1
            try:
                made, version = done.result()
                self._waiting.extendleft(reversed(self._unfinished(responses, made, version)))
            except BaseException as error:
                for each in responses:
                    if not each.batch.result.done():
                        each.batch.result.set_exception(error)
            self._waiting = deque(each for each in self._waiting if not each.batch.result.done())
            self._pump()

    def _unfinished(self, responses: list[_Response], made: list[list[Completion]], version: int) -> list[_Response]:
        left = []
        for each, (part,) in zip(responses, made, strict=True):
            if each.extend(part, version):
                each.batch.take(each.place, each.completion(part, self.tokenizer))
            else:
                left.append(each)
        return left
