"""Remote rewards over HTTP: concurrent, retried where that can help, bounded by a deadline, never a silent 0.

Requests of all servers and micro-batches run at once on one httpx client in a background event loop. Whatever goes
wrong makes the samples of that request invalid, with the server's name and the kind of failure.
"""

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx

from ...config.shared import RewardConfig
from ...errors import ConfigError, RewardError
from ...runtime.masking import MASK, mask_urls, shown_url, web_address
from ...runtime.usercode.calls import BackgroundLoop, masked
from ..batch import Call, PendingSource, RewardBatch, Scores, StreamingSource
from .wire import AUTO, LIGHTRFT, BadReply, decode_reply, encode_request

MAX_REPLY_BYTES = 64 * 1024 * 1024
FIRST_WAIT = 0.25  # seconds before the first retry
LONGEST_SAID = 2000
SHOWN_ANSWER = 200  # characters of the answer of a server that is not ours
ENCODED = re.compile(r"[A-Za-z0-9+/=_-]{60,}")  # base64
GATEWAY_ALONE = (502, 504)  # a gateway says that the server behind it does not answer
OF_THE_REQUEST = (400, 413, 422)  # another replica would say the same
SHUN_SECONDS = 30.0  # a replica that failed is tried last for this long
WRITTEN_AHEAD = 4  # request bodies in memory beyond those in flight: they are ready for the next slots
SILENCE = 8  # requests in a row, beyond those in flight at once, without an answer of a server that gave some: it hangs


def check_url(url: str) -> None:
    """Raise ConfigError unless the URL is http(s) with a host, and holds no secret: URLs are written to files."""
    if web_address(url) is None:
        raise ConfigError(f"reward URL {shown_url(url)!r}: write it as http://host:port/path")
    if mask_urls(url) != url:
        raise ConfigError(
            f"reward URL {shown_url(url)!r} holds a password or key, which would end up in files: "
            "put it into an environment variable and name that in reward_token_env"
        )


def replicas_of(entry: str) -> list[str]:
    """The URLs of `url|url|...`. Raises ConfigError as `check_url` does."""
    urls = [url.strip() for url in entry.split("|") if url.strip()]
    for url in urls or [entry]:
        check_url(url)
    return urls


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

    answered: there was an answer of any kind. silent: requests that got none since the last one, and why, gave_up.
    again: when a dead server is asked once more."""

    answered: bool = False
    silent: int = 0
    gave_up: str = ""
    again: float = 0.0

    def heard(self) -> None:
        """There is an answer."""
        self.answered, self.silent = True, 0

    def unheard(self, told: str, seconds: float) -> None:
        """A request got no answer. seconds: its time limit."""
        self.silent, self.gave_up, self.again = self.silent + 1, told, time.monotonic() + seconds

    def dead(self, slots: int, seconds: float) -> bool:
        """Whether the server gives no answers any more, though it may be slow: never one, or none to many requests. One
        request in `seconds` is let through to see."""
        if self.silent <= (slots + SILENCE if self.answered else 0):
            return False
        now = time.monotonic()
        waits = now < self.again
        self.again = self.again if waits else now + seconds
        return waits


@dataclass
class Exchange:
    """One request on its way. write: makes its body, anew for each retry. decode: reads the parsed reply, or raises
    BadReply. position: its number in the call, which spreads requests over replicas. deadline: set with its first slot.
    replied: the last reply."""

    replicas: list[str]
    write: Callable[[], bytes]
    decode: Callable[[Any], Any]
    position: int = 0
    phase: Phase = field(default_factory=Phase)
    deadline: float | None = None
    replied: tuple[int, bytes | None] | None = None

    def start(self, seconds: float, slots: int) -> None:
        """Begin the time limit, once. Raises RequestFailed when requests before this one found the server dead.
        slots: requests in flight at once."""
        if self.deadline is not None:
            return
        self.deadline = time.monotonic() + seconds
        if self.phase.dead(slots, seconds):
            raise RequestFailed(self.phase.gave_up, retry=False)  # not asked, and so no news of the server


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
        self._bodies = asyncio.Semaphore(limit + WRITTEN_AHEAD)
        known = httpx.create_ssl_context(trust_env=False)
        known.set_default_verify_paths()  # authorities of the host, and those that SSL_CERT_FILE names
        self._http = httpx.AsyncClient(
            headers=headers,
            verify=known,
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
                async with self._bodies:
                    return await self._round(exchange, await asyncio.to_thread(exchange.write))
            except RequestFailed as failure:
                wait = max(self._wait(attempt), failure.wait)
                attempt += 1
                over = attempt > self.config.reward_retries or time.monotonic() + wait >= exchange.deadline
                if over or not failure.retry:
                    told = f"{failure} (asked {attempt} times)" if attempt > 1 else str(failure)
                    if not failure.answered:
                        exchange.phase.unheard(told, self.config.reward_timeout)
                    raise RequestFailed(told, retry=False, answered=failure.answered) from None
            await asyncio.sleep(wait)

    def _wait(self, attempt: int) -> float:
        last = max(FIRST_WAIT, self.config.reward_timeout / 6)
        steps = max(1, self.config.reward_retries - 1)
        return FIRST_WAIT * (last / FIRST_WAIT) ** (attempt / steps)

    async def _round(self, exchange: Exchange, content: bytes) -> Any:
        """Every replica once, those that failed lately last."""
        order = self._order(exchange)
        failures: list[RequestFailed] = []
        for position, url in enumerate(order):
            async with self._slots:
                exchange.start(self.config.reward_timeout, self.config.reward_concurrency)
                left = (exchange.deadline - time.monotonic()) / (len(order) - position)
                if left <= 0:  # while it waited for the slot: not asked, and so no news of the server
                    told = RequestFailed(f"{shown_url(url)}: the time limit passed before its turn", retry=False)
                    failures = failures or [told]
                    break
                try:
                    result = await self._attempt(url, exchange, content, left)
                except RequestFailed as failure:
                    self._failed_at[url] = time.monotonic()
                    if failure.answered:
                        exchange.phase.heard()
                    failures.append(failure)
                    if failure.move:
                        continue
                    break
            self._failed_at.pop(url, None)
            exchange.phase.heard()
            return result
        try:
            raise next((f for f in failures if f.retry), failures[-1])
        finally:
            failures.clear()  # with them in it, this frame would keep the body until a garbage collection

    def _order(self, exchange: Exchange) -> list[str]:
        turn, now = exchange.position % len(exchange.replicas), time.monotonic()
        rotated = exchange.replicas[turn:] + exchange.replicas[:turn]
        return sorted(rotated, key=lambda url: now - self._failed_at.get(url, now - SHUN_SECONDS) < SHUN_SECONDS)

    async def _attempt(self, url: str, exchange: Exchange, content: bytes, seconds: float) -> Any:
        name = shown_url(url)
        try:
            async with asyncio.timeout(seconds):
                status, headers, data = await self._post(url, content)
                exchange.replied = status, data
            if status == 200:
                return _read(data, exchange.decode)
        except TimeoutError:
            reason = f"{name}: no reply within {round(seconds, 1):g} s"
            raise RequestFailed(reason, retry=False, answered=False) from None
        except httpx.TransportError as error:
            broken = isinstance(error, httpx.RemoteProtocolError)  # whose text may repeat the reply
            why = "" if broken or not str(error) else f": {masked(str(error))}"
            told = "no whole reply of HTTP/1.1" if broken else "connection failed"
            reason = f"{name}: {told} ({type(error).__name__}{why})"
            raise RequestFailed(reason, retry=True, answered=False) from None
        except BadReply as problem:
            raise RequestFailed(f"{name}: {problem}", retry=False) from None
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise RequestFailed(f"{name}: the reply cannot be read ({type(error).__name__})", retry=False) from None
        busy, wait = status == 429 or status >= 500, headers.get("retry-after", "")
        to = headers.get("location") if status // 100 == 3 else None
        moved = f", a redirect to {shown_url(to)}" if to else ""
        raise RequestFailed(
            f"{name}: HTTP {status}{moved}{_said(data, self._token)}",
            retry=busy,
            move=status not in OF_THE_REQUEST,
            wait=float(wait) if wait.isascii() and wait.isdigit() else 0.0,
            answered=status not in GATEWAY_ALONE,
        )

    async def _post(self, url: str, content: bytes) -> tuple[int, httpx.Headers, bytes | None]:
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        async with self._http.stream("POST", url, content=_once(content), headers=headers) as response:
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


async def _once(content: bytes) -> AsyncIterator[bytes]:
    """A body that is let go when it is sent; httpx holds a request's bytes until a garbage collection."""
    yield content


def _read(data: bytes | None, decode: Callable[[Any], Any]) -> Any:
    """What `decode` makes of a reply. Raises BadReply for whatever a server may say."""
    if data is None:
        raise BadReply(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
    try:
        return decode(json.loads(data))
    except BadReply:
        raise
    except (ValueError, RecursionError):
        raise BadReply("the reply is not JSON") from None
    except Exception as error:
        raise BadReply(f"the reply cannot be used ({type(error).__name__})") from None


def token_from_env(variable: str | None) -> str | None:
    """The token in an environment variable, without white space around it; ConfigError when a variable is named and
    not set, or holds what no header can."""
    if variable is None:
        return None
    told = f"the environment variable {variable}, which should hold the reward token,"
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"{told} is not set")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{told} holds characters that no HTTP header can: give a token of printable ASCII")
    return token


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
    """The beginning of a request or reply, without encoded images, secrets masked.

    Args:
        data: a body; None: nothing to show.
        token: the run's own, which is masked too.
        length: characters that are shown at most.
    """
    text = (data or b"")[: 8 * LONGEST_SAID].decode(errors="replace")
    text = ENCODED.sub("...", text.replace(token, MASK) if token else text)
    return masked(" ".join(text.split()))[:length].strip()


class ServerSource(PendingSource):
    """A scorer that asks a server itself, by `client`. failed: its last request without a usable reply."""

    client: RemoteClient
    failed: Exchange | None = None


class RemoteReward(StreamingSource):
    """One remote reward: `url`, or `url|url|...` for replicas that serve the same one."""

    def __init__(self, entry: str, client: RemoteClient, wire: str | None = None) -> None:
        self.replicas = replicas_of(entry)
        self.entry, self.name = entry, shown_url(self.replicas[0])
        self.client, self.wire = client, wire or AUTO

    def submit_parts(self, parts: Sequence[Future[RewardBatch]], call: Call) -> list[Future[Scores]]:
        """Send each part as soon as it is there, one request a part; no future fails for what a server does."""
        phase = Phase()
        return [self.client.loop.submit(self._part(part, call, i, phase)) for i, part in enumerate(parts)]

    async def _part(self, part: Future[RewardBatch], call: Call, position: int, phase: Phase) -> Scores:
        batch = await asyncio.wrap_future(part)
        write = partial(self.body, batch, call, LIGHTRFT if self.wire == AUTO else self.wire)
        decode = partial(decode_reply, size=len(batch))
        try:
            scores = await self.client.exchange(Exchange(self.replicas, write, decode, position, phase))
        except RequestFailed as failure:
            return Scores.all_failed(len(batch), str(failure))
        scores.reasons = Counter({f"{self.name}: {reason}": count for reason, count in scores.reasons.items()})
        return scores

    def body(self, batch: RewardBatch, call: Call, wire: str) -> bytes:
        """A request. Raises RewardError where it cannot be written.

        Args:
            batch: samples of one request.
            call: holds what is encoded already.
            wire: LIGHTRFT or OPENRLHF.
        """
        try:
            request = encode_request(batch, wire, call.encoded, self.client.config.reward_image_format)
            return json.dumps(request).encode()
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"a request to {self.name} cannot be written: {type(error).__name__}") from None
