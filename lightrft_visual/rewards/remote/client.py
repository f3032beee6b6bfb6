"""Remote rewards over HTTP: concurrent, retried where that can help, bounded by a deadline, never a silent 0.

Requests of all servers and micro-batches run at once on one httpx client in a background event loop. Whatever goes
wrong makes the samples of that request invalid, with the server's name and the kind of failure.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
import torch

from ...config.shared import RewardConfig
from ...errors import ConfigError, DataError, RewardError, did_you_mean
from ...runtime.masking import MASK, mask_urls, shown_url, web_address
from ...runtime.usercode.calls import BackgroundLoop, masked
from ..batch import Call, RewardBatch, Scores, StreamingSource, metric_name
from ..imaging import MAX_PIXELS, decode_image, video_frames
from ..local.callables import MAX_SCORE, SCORE_KEYS

LIGHTRFT, OPENRLHF, AUTO = "lightrft", "openrlhf", "auto"
NOT_SCORED = "the server could not score it"
MAX_EXTRAS = 200  # further numbers by name that one reply may bring
Encode = Callable[[Any], str | None]


class BadReply(Exception):
    """A reply that holds nothing usable for any sample; the text says why, without repeating the reply."""


def encode_request(batch: RewardBatch, wire: str, encode: Encode) -> dict[str, Any]:
    """The body of one request. Optional fields are left out when no sample has them."""
    if wire == OPENRLHF:
        own = {"query": batch.queries, "prompts": batch.prompts, "labels": _plain(batch.labels_or_references)}
        return own | _media(batch, encode)
    body: dict[str, Any] = {"queries": batch.queries, "prompts": batch.prompts, "ids": batch.ids}
    for name, values in (("labels", batch.labels), ("references", batch.references)):
        if any(value is not None for value in values):
            body[name] = _plain(values)
    if any(batch.metadata):
        body["metadata"] = _plain(batch.metadata)
    return body | _media(batch, encode)


def wires_of(setting: str, remotes: Mapping[str, str]) -> dict[str, str]:
    """The wire of each entry of remote_rm_url, {name: entry}, by `reward_wire`; of any other entry under "".
    Raises ConfigError for a wire or name that does not exist, and for a list of another length.
    """
    parts = [part.strip() for part in setting.split(",") if part.strip()] or [AUTO]
    pairs = [part.rpartition("=") for part in parts]
    for *_, wire in pairs:
        if wire not in (AUTO, LIGHTRFT, OPENRLHF):
            raise ConfigError(f"reward_wire: there is no wire {wire!r}{did_you_mean(wire, (AUTO, LIGHTRFT, OPENRLHF))}")
    if all(mark for _, mark, _ in pairs):
        for key in (key.strip() for key, *_ in pairs):
            if key not in remotes and "://" not in key:
                raise ConfigError(f"reward_wire: remote_rm_url has no {key!r}{did_you_mean(key, remotes)}")
        return {"": AUTO} | {remotes.get(key.strip(), key.strip()): wire for key, _, wire in pairs}
    if len(parts) == 1:
        return {"": parts[0]}
    if any(mark for _, mark, _ in pairs) or len(parts) != len(remotes):
        raise ConfigError(
            f"reward_wire is {setting!r}: give one wire for all, one for each of the {len(remotes)} entries of "
            "remote_rm_url in their order, or url=wire with commas"
        )
    return {"": AUTO} | dict(zip(remotes.values(), parts))


def _media(batch: RewardBatch, encode: Encode) -> dict[str, Any]:
    """The fields of images and videos, where there are any."""
    body: dict[str, Any] = {}
    if any(batch.images):
        body["images"] = [[encode(image) for image in sample] for sample in batch.images]
    if any(batch.source_images):
        body["source_images"] = [[encode(image) for image in sample] for sample in batch.source_images]
    if any(batch.videos):
        body["videos"] = [[[encode(f) for f in video_frames(video)] for video in sample] for sample in batch.videos]
    if batch.generated:
        body["generated"] = True
    return body


def _plain(value: Any) -> Any:
    """JSON values only: what JSON cannot hold (images, tensors, bytes) becomes null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else None


def decode_reply(reply: Any, size: int) -> Scores:
    """Scores of a parsed reply. A score that is not a plain finite number within ±MAX_SCORE makes its sample failed;
    null means not applicable. Raises BadReply when the reply as a whole is unusable."""
    if not isinstance(reply, Mapping):
        raise BadReply(f"the reply is a JSON {type(reply).__name__}, not an object")
    key = next((k for k in SCORE_KEYS if k in reply), None)
    if key is None:
        raise BadReply('the reply has no "rewards"')
    if not isinstance(reply[key], list) or len(reply[key]) != size:
        count = len(reply[key]) if isinstance(reply[key], list) else "no list of"
        raise BadReply(f"the reply has {count} scores for {size} samples")
    values = torch.full((size,), float("nan"), dtype=torch.float64)
    failed, reasons = torch.zeros(size, dtype=torch.bool), Counter()
    told = reply.get("failed") or []
    if not isinstance(told, list) or not all(type(each) is int and 0 <= each < size for each in told):
        raise BadReply('"failed" of the reply is no list of positions of samples')
    for index, entry in enumerate(reply[key]):
        problem = NOT_SCORED if index in told else _problem(entry)
        if problem is not None:
            failed[index] = True
            reasons[problem] += 1
        elif entry is not None:
            values[index] = float(entry)
    return Scores(values, failed, _extras(reply, size), reasons)


def _problem(entry: Any) -> str | None:
    if entry is None:
        return None
    if not isinstance(entry, (bool, int, float)):
        return f"a score is a JSON {'string' if isinstance(entry, str) else type(entry).__name__}"
    if isinstance(entry, float) and not math.isfinite(entry):
        return "a score is not finite"
    return f"a score is beyond ±{MAX_SCORE:.0e}" if abs(entry) > MAX_SCORE else None  # of an integer of any length


def _extras(reply: Mapping[str, Any], size: int) -> dict[str, torch.Tensor]:
    """`components` of our wire, `extra_logs` of OpenRLHF's. Numbers that are none become NaN; they do not count."""
    extras: dict[str, torch.Tensor] = {}
    for group in ("components", "extra_logs"):
        named = reply.get(group)
        for name, entries in list(named.items())[:MAX_EXTRAS] if isinstance(named, Mapping) else ():
            if isinstance(entries, list) and len(entries) == size:
                usable = [float(e) if e is not None and _problem(e) is None else float("nan") for e in entries]
                extras[metric_name(name)] = torch.tensor(usable, dtype=torch.float64)
    return extras


def decode_request(body: Any, max_samples: int, max_images: int, max_pixels: int = MAX_PIXELS) -> RewardBatch:
    """The batch of a request, either wire. Raises DataError that names the field, never its content."""
    if not isinstance(body, Mapping):
        raise DataError("the body is not a JSON object")
    queries = body.get("queries", body.get("query"))
    if not _is_strings(queries):
        raise DataError('"queries" must be a list of strings')
    size = len(queries)
    if not 0 < size <= max_samples:
        raise DataError(f"{size} samples in one request; 1 to {max_samples} are allowed")
    prompts = _column(body, "prompts", size, "")
    if not _is_strings(prompts):
        raise DataError('"prompts" must be a list of strings')
    metadata = _column(body, "metadata", size, {})
    if not all(isinstance(sample, Mapping) for sample in metadata):
        raise DataError('"metadata" must be a list of objects')
    labels, ids = _column(body, "labels", size, None), _column(body, "ids", size, None)
    return RewardBatch(
        prompts=prompts,
        responses=[q[len(p) :] if q.startswith(p) else q for q, p in zip(queries, prompts)],
        labels=[None if label is None else str(label) for label in labels],
        references=_column(body, "references", size, None) if "references" in body else list(labels),
        metadata=[dict(sample) for sample in metadata],
        images=_images(body, "images", size, max_images, max_pixels),
        videos=_videos(body, size, max_images, max_pixels),
        source_images=_images(body, "source_images", size, max_images, max_pixels) if "source_images" in body else [],
        ids=[i if isinstance(i, int) else n for n, i in enumerate(ids)],
        group_ids=list(range(size)),
        generated=body.get("generated") is True,
    )


def _is_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _column(body: Mapping[str, Any], name: str, size: int, default: Any) -> list[Any]:
    values = body.get(name)
    if values is None:
        return [default] * size
    if not isinstance(values, list) or len(values) != size:
        raise DataError(f'"{name}" must be a list of {size} entries')
    return values


def _images(body: Mapping[str, Any], name: str, size: int, limit: int, max_pixels: int) -> list[list[Any]]:
    samples = _column(body, name, size, None)
    return [_decode_images(sample, name, limit, max_pixels) for sample in samples]


def _decode_images(sample: Any, name: str, limit: int, max_pixels: int) -> list[Any]:
    sample = [sample] if isinstance(sample, str) else sample or []
    if not isinstance(sample, Sequence) or len(sample) > limit:
        raise DataError(f'"{name}" must hold lists of at most {limit} base64 images')
    return [None if image is None else decode_image(image, max_pixels) for image in sample]


def _videos(body: Mapping[str, Any], size: int, limit: int, max_pixels: int) -> list[list[Any]]:
    samples = _column(body, "videos", size, None)
    if not all(sample is None or (isinstance(sample, list) and len(sample) <= limit) for sample in samples):
        raise DataError('"videos" must hold lists of videos, each a list of base64 frames')
    return [[_decode_images(video, "videos", limit, max_pixels) for video in sample or []] for sample in samples]


def encode_reply(scores: Scores) -> dict[str, Any]:
    """The server's reply: null where there is no score, and the places of failed samples in "failed".

    JSON has no infinity: an infinite score is failed, an infinite number beside it is null."""
    reply: dict[str, Any] = {"rewards": _numbers(scores.values)}
    if scores.extras:
        reply["components"] = {name: _numbers(values) for name, values in scores.extras.items()}
    failed = scores.failed | scores.values.isinf()
    if failed.any():
        reply["failed"] = failed.nonzero().flatten().tolist()
    return reply


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


MAX_REPLY_BYTES = 64 * 1024 * 1024
FIRST_WAIT = 0.25  # seconds before the first retry
LONGEST_SAID = 2000
SHOWN_ANSWER = 200  # characters of the answer of a server that is not ours
ENCODED = re.compile(r"[A-Za-z0-9+/=_-]{60,}")  # base64
GATEWAY_ALONE = (502, 504)  # a gateway says that the server behind it does not answer
SHUN_SECONDS = 30.0  # a replica that failed is tried last for this long


def check_url(url: str) -> None:
    """Raise ConfigError unless the URL is http(s) with a host, and holds no secret: URLs are written to files."""
    if web_address(url) is None:
        raise ConfigError(f"reward URL {shown_url(url)!r}: write it as http://host:port/path")
    if mask_urls(url) != url:
        raise ConfigError(
            f"reward URL {shown_url(url)!r} holds a password or key, which would end up in files: "
            "put it into an environment variable and name that in reward_token_env"
        )


class RequestFailed(Exception):
    """One attempt failed. retry: trying the same server again can help. move: another replica can help.
    wait: seconds the server asked for. answered: the server is there; what it said concerns this request alone."""

    def __init__(
        self, reason: str, *, retry: bool, move: bool = True, wait: float = 0.0, answered: bool = True
    ) -> None:
        super().__init__(reason)
        self.retry, self.move, self.wait, self.answered = retry, move, wait, answered


@dataclass
class Phase:
    """What one scoring call has learned about one reward: queued requests to a dead server fail at once.

    answered: there was an answer of any kind, so the server is not dead. gave_up: why a request got none at all."""

    answered: bool = False
    gave_up: str | None = None


@dataclass
class Exchange:
    """One request on its way. decode: reads the parsed reply, or raises BadReply. position: its number in the call,
    which spreads requests over replicas. deadline: set with its first slot. replied: the last reply."""

    replicas: list[str]
    content: bytes
    decode: Callable[[Any], Any]
    position: int = 0
    phase: Phase = field(default_factory=Phase)
    deadline: float | None = None
    replied: tuple[int, bytes | None] | None = None

    def start(self, seconds: float) -> None:
        """Begin the time limit, once. Raises RequestFailed when requests before this one found the server dead."""
        if self.deadline is not None:
            return
        self.deadline = time.monotonic() + seconds
        if self.phase.gave_up is not None and not self.phase.answered:
            raise RequestFailed(self.phase.gave_up, retry=False, answered=False)


class RemoteClient:
    """One httpx client and event loop for all remote rewards of an engine."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError when `reward_token_env` names a variable that is not set."""
        self.config = config
        self._token = token_from_env(config.reward_token_env)
        self.loop = BackgroundLoop("reward-http")
        self._failed_at: dict[str, float] = {}
        self.loop.run(self._open())

    async def _open(self) -> None:
        limit = self.config.reward_concurrency
        # Nothing is unpacked: a few bytes may stand for gigabytes.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._token}"} if self._token else {})
        self._slots = asyncio.Semaphore(limit)
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # asyncio.timeout bounds each attempt as a whole
            limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
            trust_env=False,
        )
        async with anyio.Lock():  # imports what httpx would import at its first request, which takes 0.1 s
            await anyio.sleep(0)

    def close(self) -> None:
        """Close the connections and end the loop."""
        self.loop.run(self._http.aclose())
        self.loop.close()

    async def exchange(self, exchange: Exchange) -> Any:
        """What `decode` makes of the reply. Raises RequestFailed with server and reason, at the latest at the deadline.

        The deadline runs from when the request gets its first slot. Replicas are tried in turn, each with its share of
        the time that is left; then, where retrying can help, all again after a wait that grows geometrically from
        FIRST_WAIT to a sixth of the timeout, so that few retries outlast both a hiccup and a restart.
        """
        attempt = 0
        while True:
            try:
                return await self._round(exchange)
            except RequestFailed as failure:
                wait = max(self._wait(attempt), failure.wait)
                attempt += 1
                if (
                    not failure.retry
                    or attempt > self.config.reward_retries
                    or time.monotonic() + wait >= exchange.deadline
                ):
                    told = f"{failure} (asked {attempt} times)" if attempt > 1 else str(failure)
                    if not failure.answered:
                        exchange.phase.gave_up = told
                    raise RequestFailed(told, retry=False, answered=failure.answered) from None
            await asyncio.sleep(wait)

    def _wait(self, attempt: int) -> float:
        last = max(FIRST_WAIT, self.config.reward_timeout / 6)
        steps = max(1, self.config.reward_retries - 1)
        return FIRST_WAIT * (last / FIRST_WAIT) ** (attempt / steps)

    async def _round(self, exchange: Exchange) -> Any:
        """Every replica once, those that failed lately last."""
        order = self._order(exchange)
        failures: list[RequestFailed] = []
        for position, url in enumerate(order):
            async with self._slots:
                exchange.start(self.config.reward_timeout)
                left = max(0.0, exchange.deadline - time.monotonic()) / (len(order) - position)
                try:
                    result = await self._attempt(url, exchange, left)
                except RequestFailed as failure:
                    self._failed_at[url] = time.monotonic()
                    exchange.phase.answered |= failure.answered
                    failures.append(failure)
                    if failure.move:
                        continue
                    break
            self._failed_at.pop(url, None)
            exchange.phase.answered = True
            return result
        raise next((f for f in failures if f.retry), failures[-1])

    def _order(self, exchange: Exchange) -> list[str]:
        turn, now = exchange.position % len(exchange.replicas), time.monotonic()
        rotated = exchange.replicas[turn:] + exchange.replicas[:turn]
        return sorted(rotated, key=lambda url: now - self._failed_at.get(url, now - SHUN_SECONDS) < SHUN_SECONDS)

    async def _attempt(self, url: str, exchange: Exchange, seconds: float) -> Any:
        name = shown_url(url)
        try:
            async with asyncio.timeout(seconds):
                status, headers, data = await self._post(url, exchange.content)
                exchange.replied = status, data
        except TimeoutError:
            reason = f"{name}: no reply within {self.config.reward_timeout:g} s"
            raise RequestFailed(reason, retry=False, answered=False) from None
        except httpx.TransportError as error:
            reason = f"{name}: connection failed ({type(error).__name__})"
            raise RequestFailed(reason, retry=True, answered=False) from None
        except BadReply as problem:
            raise RequestFailed(f"{name}: {problem}", retry=False) from None
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise RequestFailed(f"{name}: the reply cannot be read ({type(error).__name__})", retry=False) from None
        told = f"{name}: HTTP {status}" + ("" if status == 200 else _said(data, self._token))
        if status == 429 or status >= 500:
            answered = status not in GATEWAY_ALONE
            raise RequestFailed(told, retry=True, wait=_retry_after(headers), answered=answered)
        if status != 200:
            raise RequestFailed(told, retry=False, move=False)
        return self._read(name, data, exchange)

    @staticmethod
    def _read(name: str, data: bytes | None, exchange: Exchange) -> Any:
        if data is None:
            raise RequestFailed(f"{name}: the reply is larger than {MAX_REPLY_BYTES} bytes", retry=False)
        try:
            return exchange.decode(json.loads(data))
        except BadReply as problem:
            raise RequestFailed(f"{name}: {problem}", retry=False) from None
        except (ValueError, RecursionError):
            raise RequestFailed(f"{name}: the reply is not JSON", retry=False) from None
        except Exception as error:  # whatever a server says, it costs its own request only
            reason = f"{name}: the reply cannot be used ({type(error).__name__})"
            raise RequestFailed(reason, retry=False) from None

    async def _post(self, url: str, content: bytes) -> tuple[int, httpx.Headers, bytes | None]:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", url, content=content, headers=headers) as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.strip().lower() not in ("", "identity"):
                if response.status_code != 200:
                    return response.status_code, response.headers, b""
                raise BadReply(f"the reply is encoded ({encoding[:40]!r}), which was not asked for and is not unpacked")
            data = bytearray()
            async for part in response.aiter_raw():
                data += part
                if len(data) > MAX_REPLY_BYTES:
                    return response.status_code, response.headers, None
            return response.status_code, response.headers, bytes(data)


def token_from_env(variable: str | None) -> str | None:
    """The token in an environment variable; ConfigError when a variable is named and not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"the environment variable {variable}, which should hold the reward token, is not set")
    return os.environ[variable]


def _retry_after(headers: httpx.Headers) -> float:
    value = headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _said(data: bytes | None, token: str | None) -> str:
    """What a server answered with an error: of ours, what the user's function did; of others the beginning, in which
    encoded images and the run's own token are left out."""
    try:
        told = json.loads(data or b"")
    except (ValueError, RecursionError):
        told = None
    said = told.get("user_error") if isinstance(told, dict) else None
    if isinstance(said, str):
        return f": {masked(said[:LONGEST_SAID])}"
    shown = shown_body(data, token)
    return f": {shown}" if shown else ""


def shown_body(data: bytes | None, token: str | None, length: int = SHOWN_ANSWER) -> str:
    """The beginning of a request or reply, without encoded images and the run's own token, secrets masked."""
    text = (data or b"")[: 8 * LONGEST_SAID].decode(errors="replace")
    text = ENCODED.sub("...", text.replace(token, MASK) if token else text)
    return masked(" ".join(text.split()))[:length].strip()


class RemoteReward(StreamingSource):
    """One remote reward: `url`, or `url|url|...` for replicas that serve the same one."""

    def __init__(self, entry: str, client: RemoteClient, wire: str | None = None) -> None:
        self.replicas = [url.strip() for url in entry.split("|") if url.strip()]
        for url in self.replicas or [entry]:
            check_url(url)
        self.entry, self.name = entry, shown_url(self.replicas[0])
        self.client, self.wire = client, wire or AUTO

    def submit_parts(self, parts: Sequence[Future[RewardBatch]], call: Call) -> list[Future[Scores]]:
        """Send each part as soon as it is there, one request a part; no future fails for what a server does."""
        phase = Phase()
        return [self.client.loop.submit(self._part(part, call, i, phase)) for i, part in enumerate(parts)]

    async def _part(self, part: Future[RewardBatch], call: Call, position: int, phase: Phase) -> Scores:
        batch = await asyncio.wrap_future(part)
        content = await asyncio.to_thread(self.body, batch, call, LIGHTRFT if self.wire == AUTO else self.wire)
        decode = partial(decode_reply, size=len(batch))
        try:
            scores = await self.client.exchange(Exchange(self.replicas, content, decode, position, phase))
        except RequestFailed as failure:
            return Scores.all_failed(len(batch), str(failure))
        scores.reasons = Counter({f"{self.name}: {reason}": count for reason, count in scores.reasons.items()})
        return scores

    def body(self, batch: RewardBatch, call: Call, wire: str) -> bytes:
        """A request by one of the wires."""
        encode = partial(call.encoded.encode, image_format=self.client.config.reward_image_format)
        try:
            return json.dumps(encode_request(batch, wire, encode)).encode()
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"a request to {self.name} cannot be written: {type(error).__name__}") from None
