"""Ask each reward once, with a sample of the data, before any model loads: what cannot work is said at the start of a
run, with what was asked and what was answered.

Users' functions are called, with the sample twice, in a copy of their file that is loaded for this, and goes
afterwards; servers are asked all at once. Models, built-in scorers and actors of Ray are not asked: their files and
settings are checked elsewhere.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from PIL import Image

from ..config.shared import RewardConfig
from ..errors import ConfigError, DataError, LightRFTVisualError, RewardError, StoppedBySignal
from ..runtime import collectives
from ..runtime.masking import shown_url
from ..runtime.start_up import log_stage
from ..runtime.usercode.calls import masked
from ..runtime.usercode.loading import on_trial
from ..runtime.usercode.surroundings import is_users
from .batch import Call, Job, PendingSource, RewardBatch, Scores, pick_output
from .engine import RewardComputationEngine, model_device
from .imaging import to_pil
from .local.callables import scores_parameter
from .recipe import RecipeEntry
from .registry import Catalogue, find_scorer
from .remote.client import (
    FIRST_WAIT,
    SHOWN_ANSWER,
    Exchange,
    RemoteReward,
    RequestFailed,
    ServerSource,
    shown_body,
    token_from_env,
)
from .remote.wire import AUTO, LIGHTRFT, NOT_SCORED, OPENRLHF, decode_reply

log = logging.getLogger(__name__)
SAID_AFTER = 4.0  # seconds without an answer after which a line says what is waited for
STARTING = 3.0  # seconds in which a server may still come up
BUSY = (429, 503)
MARKS = 2000  # bytes of a reply in which the words of a wire are looked for
SHOWN_ASKED = 400  # characters of a request
LOOKED_AT = 1.0  # seconds to find a sample of each label
TRIES = 3  # samples that a function is asked with where on_reward_error is skip
SHOWN = 200  # characters of each text of a sample
MEDIA = ("images", "videos", "source_images")
UNKNOWN = 0.5  # stands for the score of what is not asked, where a function aggregates by hand


@dataclass(frozen=True)
class Answer:
    """What a server said when it was asked once. problem: why there is no score in it; None where there is one."""

    url: str
    wire: str
    asked: bytes
    replied: tuple[int, bytes | None] | None
    problem: str | None

    @property
    def busy(self) -> bool:
        """Whether it is there, and has no time or is not ready."""
        return self.replied is not None and self.replied[0] in BUSY

    @property
    def of_openrlhf(self) -> bool:
        """Whether the reply has what OpenRLHF's servers write, and no other."""
        return self.replied is not None and b'"extra_logs"' in (self.replied[1] or b"")[:MARKS]


class _NotAsked:
    name = "not asked"


class _Asked(Catalogue):
    """A catalogue that builds users' functions and the ways to servers; the rest is not asked."""

    def _model(self, name: str, model: Any) -> Any:
        return _NotAsked()

    def _ray_actors(self, name: str, key: str, kwargs: Mapping[str, Any]) -> Any:
        return _NotAsked()

    def _scorer(self, entry: RecipeEntry) -> Any:
        scorer = find_scorer(entry.key)
        own = inspect.isfunction(scorer) and is_users(scorer.__code__.co_filename)
        return super()._scorer(entry) if own or "url" in entry.kwargs else _NotAsked()


class _AskedEngine(RewardComputationEngine):
    catalogue = _Asked

    @property
    def wires(self) -> dict[str, str]:
        """{entry: wire} of every server, as they were given."""
        return {source.entry: source.wire for source in self._all if isinstance(source, RemoteReward)}

    def jobs_of(self, label: str | None) -> list[Job]:
        """What scores a sample with this label; nothing where that is an error, which is raised elsewhere."""
        try:
            return self._plan([label])
        except ConfigError:
            return []


def probed(
    config: RewardConfig | None,
    data: Any,
    batch_of: Callable[[int], RewardBatch],
    columns: Collection[str] | None = None,
) -> Any:
    """The configuration, with the wires of its servers as far as they were recognised. A collective; rank 0 asks.

    Args:
        config: of rewards or gold; None, and one that names nothing or has no reward_probe, comes back as it is.
        data: what is scored, samples with a label each; None or nothing: there is no sample to ask with.
        batch_of: the sample of an index as one that a policy has answered.
        columns: of all data of the run; None: those of `data`.

    Raises:
        ConfigError: for each reward that cannot score a sample, with what it was asked and what it answered. Whatever
            else of ours rank 0 met is raised on every rank, too.
    """
    if config is None or not config.given or not config.reward_probe or not data:
        return config
    found: str | LightRFTVisualError = config.reward_wire
    if collectives.is_rank_0():
        log_stage("asking each reward once")
        try:
            known = getattr(data, "columns", ()) if columns is None else columns
            with on_trial():
                found = _Probe(config, data, batch_of, frozenset(known)).run()
        except LightRFTVisualError as error:
            found = error
    collectives.meet()  # a first call may load a model, and a broadcast has a time limit
    found = collectives.broadcast_object(found)
    if isinstance(found, LightRFTVisualError):
        raise found
    return replace(config, reward_wire=found)


@dataclass
class _Probe:
    """One probe. scores: by id of the source. problems: texts, one for each reward that cannot work."""

    config: RewardConfig
    data: Any
    batch_of: Callable[[int], RewardBatch]
    columns: frozenset[str]
    scores: dict[int, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    wires: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = getattr(self.data, "has_references", False)
        of_data = {"data_columns": self.columns, "data_references": known}
        self._batch = cache(lambda index: replace(self.batch_of(index), **of_data))

    def run(self) -> str:
        """`reward_wire` as it was recognised. Raises ConfigError."""
        asked = replace(self.config, on_reward_error="error", reward_retries=0)
        engine = _AskedEngine.from_config(asked)
        started = time.monotonic()
        try:
            jobs = self._jobs(engine)
            begun = [(*job, self._begin(*job)) for job in jobs if isinstance(job[0].source, PendingSource)]
            for job, index in jobs:
                if not isinstance(job.source, PendingSource):
                    self._ask_function(job, index)
            self._wait([future for *_, futures in begun for future in futures], started)
            looked = time.monotonic()
            for job, index, futures in begun:
                self._collect(job, index, futures, looked)
            if engine.aggregator is not None and not self.problems:
                self._ask_aggregator(engine)
        finally:
            engine.close()
        if self.problems:
            listed = "\n  ".join(self.problems)
            raise ConfigError(
                f"{len(self.problems)} of the rewards cannot be used; each was asked once with a sample of the data, "
                f"before any model is loaded (--no_reward_probe leaves this out):\n  {listed}"
            )
        if OPENRLHF not in self.wires.values():
            return self.config.reward_wire
        return ",".join(f"{entry}={wire}" for entry, wire in (engine.wires | self.wires).items())

    def _jobs(self, engine: _AskedEngine) -> list[tuple[Job, int]]:
        """One job of each source that is asked, with the index of a sample that it scores."""
        found: dict[int, tuple[Job, int]] = {}
        labels, end = set(), time.monotonic() + LOOKED_AT
        for index in range(len(self.data)):
            if (label := self.data[index].label) not in labels:
                jobs = [job for job in engine.jobs_of(label) if not isinstance(job.source, _NotAsked)]
                if found.keys() >= {id(job.source) for job in jobs} or self._loads(index):
                    labels.add(label)
                    for job in jobs:
                        found.setdefault(id(job.source), (job, index))
            if (engine.recipe is None and labels) or time.monotonic() > end:
                break
        return list(found.values())

    def _twice(self, index: int) -> RewardBatch:
        """A sample as two: of one alone a mean, or a list of one number, passes as a score of each sample. The media of
        one stay as they are whatever is done to the other's."""
        batch = self._batch(index)
        second = replace(batch, **{name: deepcopy(getattr(batch, name)) for name in MEDIA})
        return replace(RewardBatch.join([batch, second]), ids=[0, 1])

    def _loads(self, index: int) -> bool:
        """Whether the sample can be read; what happens to one that cannot, `on_bad_row` says when the run meets it."""
        with suppress(DataError):
            return bool(self._batch(index))
        return False

    def _ask_function(self, job: Job, index: int) -> None:
        """Where samples that it fails on are left out, one of several must be scored."""
        problems: list[str] = []
        several = self.config.on_reward_error == "skip"
        for each in filter(self._loads, range(index, min(index + (TRIES if several else 1), len(self.data)))):
            problem = self._score(job, self._twice(each))
            if problem is None:
                break
            problems.append(f"{problem}\n    asked with this sample twice: {shown_sample(self._batch(each))}")
        else:
            self.problems.append(problems[0])
            return
        for problem in problems:
            log.warning("reward %s", problem)

    def _score(self, job: Job, batch: RewardBatch) -> str | None:
        """Why a sample gets no score; None where it gets one, or where the reward does not apply."""
        try:
            return self._take(job, job.source.score(batch, Call(1, model_device())))
        except StoppedBySignal:
            raise
        except (RewardError, ConfigError) as error:
            return str(error)

    def _take(self, job: Job, scores: Scores) -> str | None:
        """Keep the score. Why there is none, as of `_score`."""
        every = list(range(len(scores.values)))
        scores = pick_output(scores, replace(job, indices=every), every)
        reasons = [reason for reason in scores.reasons if not reason.endswith(NOT_SCORED)]
        if bool(scores.failed.any()) and reasons:
            return f"reward {job.name}: {reasons[0]}"
        self.scores[id(job.source)] = float(scores.values[0])
        return None

    def _ask_aggregator(self, engine: _AskedEngine) -> None:
        index = next(filter(self._loads, range(min(TRIES, len(self.data)))), None)
        if index is None:
            return
        function, batch = engine.aggregator, self._batch(index)
        scores = [self.scores.get(id(job.source), UNKNOWN) for job in engine.jobs_of(batch.labels[0])]
        known = [UNKNOWN if score != score else score for score in scores]
        function.given[scores_parameter(function.signature)] = [torch.tensor([score] * 2) for score in known]
        self._ask_function(Job(function.name, function, [0], torch.ones(1)), index)

    # -- servers -------------------------------------------------------------------------------------------------

    def _begin(self, job: Job, index: int) -> list[Future]:
        """What each replica answers, or the scores of another source that works elsewhere."""
        batch, source = self._batch(index), job.source
        if isinstance(source, RemoteReward):
            return [source.client.loop.submit(_asked(source, url, batch)) for url in source.replicas]
        return [source.submit(batch, Call(1, model_device()))]

    def _wait(self, futures: list[Future], started: float) -> None:
        late = wait(futures, max(0.0, started + SAID_AFTER - time.monotonic())).not_done
        if late:
            log.warning(
                "%d reward servers have not answered a first request within %g s; they are waited for as long as "
                "reward_timeout allows (%g s), before any model is loaded",
                len(late),
                SAID_AFTER,
                self.config.reward_timeout,
            )

    def _collect(self, job: Job, index: int, futures: list[Future], since: float) -> None:
        source = job.source
        if isinstance(source, RemoteReward):
            self._judge(source, [future.result() for future in futures])
            return
        while (problem := self._taken(job, futures[0])) is not None and _may_start(source, since):
            time.sleep(FIRST_WAIT)
            futures = self._begin(job, index)
        if problem is None:
            return
        problem += f"\n    asked with {shown_sample(self._batch(index))}"
        if isinstance(source, ServerSource) and source.failed is not None:
            replied, token = source.failed.replied, token_from_env(source.client.config.reward_token_env)
            problem += f"\n    answered: {_shown_reply(replied, token, SHOWN_ASKED)}"
            if replied is not None and replied[0] in BUSY:
                log.warning("%s", problem)
                return
        self.problems.append(problem)

    def _taken(self, job: Job, future: Future) -> str | None:
        try:
            return self._take(job, future.result())
        except RewardError as error:
            return str(error)

    def _judge(self, source: RemoteReward, replicas: list[list[Answer]]) -> None:
        """One replica must give a score; what the others say is a warning."""
        token = token_from_env(self.config.reward_token_env)
        chosen = [_chosen(source.wire, answers) for answers in replicas]
        self.wires[source.entry] = next((a.wire for a in chosen if a.problem is None), source.wire)
        problems = [_told_of(source.wire, a, answers, token) for a, answers in zip(chosen, replicas) if a.problem]
        if len(problems) == len(chosen) and not any(answer.busy for answer in chosen):
            self.problems += problems
            return
        for problem in problems:
            log.warning("reward server %s", problem)
        for answer in chosen:
            if answer.problem is None and source.wire == AUTO and answer.wire == OPENRLHF:
                log.info("reward server %s speaks OpenRLHF's wire, as its reply shows", answer.url)


async def _asked(source: RemoteReward, url: str, batch: RewardBatch) -> list[Answer]:
    """What a replica answers when it is asked once, and where that is no score, by the other wire too."""
    first = LIGHTRFT if source.wire == AUTO else source.wire
    answers = [await _answer(source, url, batch, first)]
    unclear = answers[0].problem is not None or (source.wire == AUTO and answers[0].of_openrlhf)
    if unclear and answers[0].replied is not None and not answers[0].busy:
        answers.append(await _answer(source, url, batch, OPENRLHF if first == LIGHTRFT else LIGHTRFT))
    return answers


async def _answer(source: RemoteReward, url: str, batch: RewardBatch, wire: str) -> Answer:
    content, end = await asyncio.to_thread(source.body, batch, Call(), wire), time.monotonic() + STARTING
    while True:
        exchange = Exchange([url], lambda: content, partial(decode_reply, size=len(batch)))
        try:
            scores = await source.client.exchange(exchange)
            reasons = [reason for reason in scores.reasons if reason != NOT_SCORED]
            problem = f"{shown_url(url)}: {reasons[0]}" if reasons else None
        except RequestFailed as failure:
            problem = str(failure)
        answer = Answer(url, wire, content, exchange.replied, problem)
        if problem is None or (answer.replied is not None and not answer.busy) or time.monotonic() > end:
            return answer
        await asyncio.sleep(FIRST_WAIT)


def _chosen(wire: str, answers: list[Answer]) -> Answer:
    """Of the answers by both wires the one that counts: where none is named, OpenRLHF's if it gives a score."""
    good = [answer for answer in answers if answer.problem is None]
    return good[-1] if wire == AUTO and good else answers[0]


def _told_of(wire: str, answer: Answer, answers: list[Answer], token: str | None) -> str:
    """A problem, with request and reply, shortened, and with the wire that would do where there is one."""
    asked, said = shown_body(answer.asked, token, SHOWN_ASKED), _shown_reply(answer.replied, token)
    other = next((each for each in answers if each.problem is None), None)
    hint = "" if other is None else f"\n    by --reward_wire {other.wire} it gives a score"
    if wire == AUTO and len(answers) > 1:
        hint = f"\n    by {OPENRLHF} as well: {answers[1].problem}" if answers[1].problem != answer.problem else ""
    return f"{answer.problem}\n    asked ({answer.wire}): {asked}\n    answered: {said}{hint}"


def _may_start(source: Any, since: float) -> bool:
    """Whether its server gave no reply at all, and may still come up."""
    asked = source.failed if isinstance(source, ServerSource) else None
    return asked is not None and asked.replied is None and time.monotonic() < since + STARTING


def _shown_reply(replied: tuple[int, bytes | None] | None, token: str | None, length: int = SHOWN_ANSWER) -> str:
    return "nothing" if replied is None else f"HTTP {replied[0]} {shown_body(replied[1], token, length)}"


def shown_sample(batch: RewardBatch) -> str:
    """The one sample of a batch, shortened and masked."""
    texts = {"prompt": batch.prompts[0], "completion": batch.responses[0], "reference": batch.references[0]}
    told = [f"{name} {masked(ascii(value))[:SHOWN]}" for name, value in texts.items() if value not in (None, "")]
    told += [f"label {masked(ascii(batch.labels[0]))[:SHOWN]}"] if batch.labels[0] is not None else []
    media = {"images": batch.images[0], "videos": batch.videos[0]}
    told += [f"{len(values)} {kind}" for kind, values in media.items() if values]
    return ", ".join([*told, *([f"columns {', '.join(sorted(batch.columns))[:SHOWN]}"] if batch.columns else [])])


def plausible_media(height: int, width: int, frames: int | None = None) -> torch.Tensor:
    """An image (3, H, W) or a video (3, T, H, W), in 0..1: soft colours of no flat area.

    Args:
        height: H, in pixels.
        width: W, in pixels.
        frames: T; None: an image.
    """
    coarse = torch.rand((1, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
    return image if frames is None else torch.stack([image * (1 - 0.5 * i / frames) for i in range(frames)], dim=1)


def plausible_image() -> Image.Image:
    """`plausible_media` of an image, as PIL."""
    return to_pil(plausible_media(64, 64))
