"""Requests that vLLM takes in while it is at work on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...experience.rollouts import Completion, PromptFeatures, SamplingSettings


class VLLMAdmission:
    """An `Admission` of one `VLLMEngine`: its own step loop, to which requests come at any time.

    Copy i of a prompt is drawn with the seed that vLLM gives the i-th sample of one request. What a request is batched
    with depends on when it comes, which can show in the last bits of its log-probs.
    """

    def __init__(self, engine: Any, settings: SamplingSettings) -> None:
        self.engine, self.settings = engine, replace(settings, n=1)
        self._keys: dict[int, int] = {}  # of requests that are not finished, by vLLM's number

    @property
    def busy(self) -> bool:
        """See `Admission`."""
        return bool(self._keys)

    def add(self, key: int, request: PromptFeatures) -> None:
        """See `Admission`."""
        engine = self.engine
        params = engine.params(self.settings, request.seed + request.copy, request.limit)
        self._keys[engine.llm.request_counter.counter] = key
        with engine.working():
            engine.llm.enqueue([engine.entry(request)], [params], use_tqdm=False)

    def step(self) -> list[tuple[int, Completion]]:
        """See `Admission`."""
        engine = self.engine
        with engine.working():
            outputs = [output for output in engine.llm.llm_engine.step() if output.finished]
        found = []
        for output in sorted(outputs, key=lambda each: int(each.request_id)):
            (completion,) = engine.completions(output, self.settings, 0)
            found.append((self._keys.pop(int(output.request_id)), completion))
        return found

    def close(self) -> None:
        """See `Admission`."""
        if self._keys:
            self.engine.llm.llm_engine.abort_request([str(number) for number in self._keys])
            self._keys.clear()
