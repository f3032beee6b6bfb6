"""Episodes of several turns: what the engine samples goes to an environment, whose observation it goes on from.

    requests -> reset -> generate -> step -> observation's tokens -> generate -> ... -> rollouts

`EpisodeStage` stands where `RolloutStage` stands, and the experience maker does not know which it has. One rollout is
one episode; its tokens of observations are holes of the action mask.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from PIL import Image

from ..config.environment import EpisodeConfig
from ..data.bad_rows import warn_once
from ..data.rendering import text_of
from ..data.rows import REFERENCE_PATHS
from ..errors import RolloutError
from ..experience.rollouts import (
    Completion,
    Episode,
    PromptFeatures,
    Rollout,
    SamplingSettings,
)
from ..runtime import collectives
from ..runtime.seeding import derive_seed
from .conversation import Conversation, ObservationRenderer
from .engine import RolloutEngine, RolloutStage, Taker, check_completions
from .environments import Action, EnvironmentFailure, EnvironmentHost, Observation, StepResult, ToolCall
from .multimodal import MultimodalDataProcessor

Parser = Callable[[str], list[ToolCall]]
NO_ROOM = (
    "the first observation of an episode leaves no room for another answer within max_episode_tokens (%d), "
    "which counts its images too: the episode ends there"
)
BEGIN_TOGETHER = 0.5  # seconds that the first requests wait for each other's resets


class Admission(Protocol):
    """Generation that takes requests as they come, and gives responses as they are finished."""

    def add(self, key: int, request: PromptFeatures) -> None:
        """Take in a request of one response."""

    def step(self) -> list[tuple[int, Completion]]:
        """Go on a little; the responses that are finished by it. Only while something is to be done."""

    def close(self) -> None:
        """Give up what is not finished."""

    @property
    def busy(self) -> bool:
        """Whether a request is not finished."""


class EpisodeStage(RolloutStage):
    """A `RolloutStage` whose responses are episodes.

    host: runs the environments. renderer: makes tokens of observations. limits: of an episode, most_tokens behind its
    prompt. parse: the calls of tools in a response; None without tools.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        data_processor: MultimodalDataProcessor,
        run_seed: int,
        host: EnvironmentHost,
        renderer: ObservationRenderer,
        limits: EpisodeConfig,
        most_tokens: int,
        parse: Parser | None = None,
    ) -> None:
        super().__init__(engine, data_processor, run_seed)
        self.host, self.renderer, self.limits, self.parse = host, renderer, limits, parse
        self.most_tokens = most_tokens
        self._begun = 0  # episodes so far, for the host's numbers

    def draw(
        self,
        requests: list[PromptFeatures],
        settings: SamplingSettings,
        policy_version: int = 0,
        finished: Taker | None = None,
    ) -> list[Rollout]:
        """As in the base: an episode for each of the n samples of a prompt."""
        if any(each.variants for each in requests):
            raise RolloutError("variants of prompts (noisy images) cannot be part of episodes")
        round_ = _Round(self, requests, settings, policy_version, finished)
        try:
            round_.run()
        finally:
            for number in round_.numbers:
                self.host.end(number)
        return round_.rollouts()

    def numbers(self, count: int) -> range:
        """New numbers of episodes."""
        start, self._begun = self._begun, self._begun + count
        return range(start, self._begun)


class _Round:
    """The episodes of one call, which go on together."""

    def __init__(
        self,
        stage: EpisodeStage,
        requests: list[PromptFeatures],
        settings: SamplingSettings,
        policy_version: int,
        finished: Taker | None,
    ) -> None:
        self.stage, self.settings, self.requests = stage, settings, requests
        self.policy_version, self.finished = policy_version, finished
        starts = [stage.data_processor.unexpanded(each) for each in requests]
        self.conversations = [
            Conversation(prompt, copy, start, Episode(gamma=stage.limits.turn_gamma))
            for prompt, start in zip(requests, starts)
            for copy in range(settings.n)
        ]
        self.numbers = stage.numbers(len(self.conversations))
        self.left, self.active = set(range(len(self.conversations))), set[int]()  # not over, and begun of them
        self.changed = False  # whether an environment gave another beginning, or none
        self.made: dict[int, Rollout] = {}
        self.begun: dict[int, tuple[Any, PromptFeatures]] = {}  # of prompts, the latest beginning that a reset gave

    # -- one after the other ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until no rank has an active episode, where the engine keeps ranks in step."""
        admission, most = self.stage.engine.admission(self.settings), self.stage.limits.max_environments
        if admission is not None:
            try:
                self._run_freely(admission, most)
            finally:
                admission.close()
            return
        n, start = self.settings.n, 0
        most = most // n * n or most  # whole prompts, where there is room for one
        while self._any_rank(start < len(self.conversations)):
            end = min(start + most, len(self.conversations))
            self._reset(range(start, end))
            self._run_rounds(None if most % n else self.requests[start // n : end // n])
            start += most

    def _run_rounds(self, prompts: list[PromptFeatures] | None) -> None:
        """The episodes that have begun: all that are active generate together, then all their environments step.
        prompts: whose they are, where these are all of their samples."""
        engine = self.stage.engine
        first = True
        while self._any_rank(bool(self.active)):
            keys = sorted(self.active)
            if prompts is not None and first and not self._any_rank(self.changed):
                # As without an environment: the samples of a prompt are one request.
                requests, n = [replace(each, limit=self.stage.most_tokens) for each in prompts], self.settings.n
            else:
                requests, n = [self._request(key) for key in keys], 1
            settings = replace(self.settings, n=n)
            found = list(engine.generate(requests, settings))
            check_completions(engine, requests, found, settings)
            completions = [one for each in found for one in each]
            first = False
            steps = {self._sampled(key, completion): key for key, completion in zip(keys, completions)}
            for future, key in steps.items():
                self._stepped(key, future)

    def _run_freely(self, admission: Admission, most: int) -> None:
        """Each episode begins and goes on as soon as its environment has answered; `most` at once."""
        asked: dict[int, PromptFeatures] = {}
        stepping: dict[Future[StepResult], int] = {}
        resetting: dict[Future[Observation | None], int] = {}
        waiting = deque(range(len(self.conversations)))

        def ask(key: int) -> None:
            asked[key] = self._request(key)
            admission.add(key, asked[key])

        def refill() -> None:
            while waiting and len(self.active) + len(resetting) < most:
                key = waiting.popleft()
                resetting[self._asked_to_begin(key)] = key

        refill()
        wait(resetting, timeout=BEGIN_TOGETHER)  # what begins quickly is asked for together, in order
        while admission.busy or stepping or resetting:
            for key, completion in admission.step() if admission.busy else ():
                check_completions(self.stage.engine, [asked.pop(key)], [[completion]], replace(self.settings, n=1))
                stepping[self._sampled(key, completion)] = key
            going = {**stepping, **resetting}
            done, _ = wait(going, timeout=0 if admission.busy else None, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=going.__getitem__):
                key = going[future]
                if resetting.pop(future, None) is None:
                    del stepping[future]
                    self._stepped(key, future)
                else:
                    self._started(key, future)
                if key in self.active:
                    ask(key)
            refill()
        if asked:
            name = type(self.stage.engine).__name__
            raise RolloutError(f"engine {name} left {len(asked)} requests without completion")

    # -- one episode -----------------------------------------------------------------------------------------------

    def _reset(self, keys: Sequence[int]) -> None:
        """These environments begin."""
        self.changed = False
        futures = [self._asked_to_begin(key) for key in keys]
        for key, future in zip(keys, futures, strict=True):
            self._started(key, future)

    def _asked_to_begin(self, key: int) -> Future[Observation | None]:
        return self.stage.host.reset(self.numbers[key], _sample_of(self.conversations[key]))

    def _started(self, key: int, future: Future[Observation | None]) -> None:
        """Its environment has begun; what it says of the beginning takes the place of the prompt."""
        conversation = self.conversations[key]
        self.active.add(key)
        try:
            found = future.result()
            if found is not None:
                self.changed = True
                conversation.prompt = self._begun(key // self.settings.n, conversation.prompt, found)
                conversation.start = self.stage.data_processor.unexpanded(conversation.prompt)
        except EnvironmentFailure as error:
            self.changed = True
            self._failed(key, error)

    def _begun(self, number: int, prompt: PromptFeatures, found: Observation) -> PromptFeatures:
        """The prompt that begins so; of samples that begin alike it is prepared once, as where no reset says anything.
        Compared is what was kept: an environment may paint over what it has shown. number: of the prompt."""
        said, known = (found.messages, found.whole), self.begun.get(number)
        alike = known is not None and known[0] == said and not found.videos
        if alike and all(isinstance(each, Image.Image) for each in found.images):
            kept = known[1].images
            if kept[len(kept) - len(found.images) :] == found.images:
                return known[1]
        begun = self.stage.renderer.begin(prompt, found)
        self.begun[number] = deepcopy(said), begun
        return begun

    def _request(self, key: int) -> PromptFeatures:
        conversation = self.conversations[key]
        return conversation.request(self.stage.most_tokens - len(conversation.token_ids))

    def _sampled(self, key: int, completion: Completion) -> Future[StepResult]:
        """Take in a turn, and ask the environment."""
        conversation, parse = self.conversations[key], self.stage.parse
        conversation.sampled(completion)
        if conversation.truncated:
            self._at_limit(conversation, "tokens")
        calls: list[ToolCall] = []
        if parse is not None:
            tokenizer = self.stage.data_processor.tokenizer
            calls = parse(tokenizer.decode(completion.token_ids, skip_special_tokens=False))
            known = {tool.get("function", tool)["name"] for tool in self.stage.renderer.tools} or {
                call.name for call in calls
            }
            told = [(call.name, call.error if call.name in known else call.error or "no such tool") for call in calls]
            conversation.episode.turns[-1].calls = told
        action = Action(completion.text, list(completion.token_ids), calls)
        return self.stage.host.step(self.numbers[key], action)

    def _stepped(self, key: int, future: Future[StepResult]) -> None:
        """Take in the environment's answer: the episode goes on with an observation, or is over."""
        conversation, limits = self.conversations[key], self.stage.limits
        episode, turn = conversation.episode, conversation.episode.turns[-1]
        try:
            result = future.result()
            turn.reward, turn.info = result.reward or 0.0, result.info
            episode.rewarded |= result.reward is not None
            if not result.done and episode.limit is None:
                if conversation.turns >= limits.max_turns:
                    self._at_limit(conversation, "turns")
                elif not self._observed(conversation, result.observation):
                    self._at_limit(conversation, "tokens")
        except EnvironmentFailure as error:
            self._failed(key, error)
            return
        if result.done or episode.limit is not None:
            self._over(key)

    def _at_limit(self, conversation: Conversation, what: str) -> None:
        """It ends at its limit of turns or tokens, and is what the limit's setting says."""
        limits = self.stage.limits
        policy = limits.on_turn_limit if what == "turns" else limits.on_token_limit
        conversation.episode.limit = what
        conversation.truncated, conversation.episode.failed = policy != "end", policy == "invalid"

    def _observed(self, conversation: Conversation, observation: Observation) -> bool:
        """Whether there is room for it and an answer."""
        renderer, what = self.stage.renderer, f"turn {conversation.turns} of prompt {conversation.prompt.group_id}"
        last = self.stage.data_processor.tokenizer.convert_ids_to_tokens(conversation.token_ids[-1])
        added = renderer.added(observation, what, last)
        renderer.check_media(conversation.prompt, conversation.episode, added)
        if len(conversation.token_ids) + len(added.token_ids) >= self.stage.most_tokens:
            if conversation.turns == 1:
                warn_once(NO_ROOM, self.stage.most_tokens)
            return False
        conversation.observed(added, observation.messages)
        return True

    def _failed(self, key: int, error: EnvironmentFailure) -> None:
        conversation, policy = self.conversations[key], self.stage.limits.on_environment_error
        if policy == "stop":
            told = f"the environment of prompt {conversation.prompt.group_id} failed in turn {conversation.turns}"
            raise RolloutError(f"{told}: {error} (on_environment_error stop)") from error
        conversation.episode.failure = str(error)
        # Without a turn there is nothing that the episode could end with.
        conversation.episode.failed |= policy == "mask" or not conversation.turns
        self._over(key)

    def _over(self, key: int) -> None:
        self.active.discard(key)
        self.left.discard(key)
        self.stage.host.end(self.numbers[key])
        n = self.settings.n
        group = range(key - key % n, key - key % n + n)
        if self.finished is not None and not self.left.intersection(group):
            self.finished(group.start, [self._rollout(each) for each in group])

    # -- what comes out --------------------------------------------------------------------------------------------

    def rollouts(self) -> list[Rollout]:
        """One for each episode, prompt-major."""
        return [self._rollout(key) for key in range(len(self.conversations))]

    def _rollout(self, key: int) -> Rollout:
        if key in self.made:
            return self.made[key]
        own = self.conversations[key]
        ids, log_probs = own.token_ids, own.log_probs
        if not ids:  # it failed before anything was sampled: a token that no one trains on
            eos = self.stage.data_processor.tokenizer.convert_tokens_to_ids(self.stage.renderer.end_tokens[0])
            full = self.settings.full_distribution and all(c.log_probs is not None for c in self.conversations)
            ids, log_probs, own.episode.turn_ids = [eos], ([0.0] if full else None), [-1]
        self.made[key] = Rollout(
            own.prompt,
            ids,
            log_probs,
            own.text,
            own.truncated,
            sample_id=own.prompt.group_id * self.settings.n + own.copy,
            policy_version=self.policy_version,
            valid=not own.episode.failed,
            episode=own.episode,
            experts=own.experts,
        )
        return self.made[key]

    def _any_rank(self, own: bool) -> bool:
        """Whether it holds on any rank, where ranks generate together; else whether it holds here."""
        if not self.stage.engine.in_step:
            return own
        collectives.meet()  # one rank's environments may take minutes longer than another's
        return bool(collectives.all_reduce_max(torch.tensor([float(own)])).item())


def _sample_of(conversation: Conversation) -> dict[str, Any]:
    """What an environment is begun with."""
    prompt = conversation.prompt
    seeds = {"seed": derive_seed(prompt.seed, conversation.copy), "group_seed": prompt.seed}
    if "seed" in prompt.metadata:  # the data's own
        seeds["group_seed"] = prompt.metadata["seed"]
    return {
        **dict.fromkeys(REFERENCE_PATHS[1:], prompt.reference),
        **seeds,
        **prompt.metadata,
        "prompt": prompt.text if prompt.messages is None else text_of(prompt.messages[-1]),
        "messages": prompt.messages,
        "images": list(prompt.images),
        "videos": list(prompt.videos),
        "reference": prompt.reference,
        "label": prompt.label,
    }
