"""A reward server: any scorer or callable behind POST /reward, with batching and /health.

JSON only, either wire of `wire.py`. Limits on body, samples and images hold before anything is decoded; answers and
logs never repeat what was sent, but for what the scorer itself says when it fails.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from ...errors import ConfigError, DataError, RewardError
from ...runtime.packages import needed
from ...runtime.usercode.calls import describe_error, masked
from ..batch import Call, RewardBatch, Scores, Source
from ..imaging import MAX_PIXELS
from ..local.callables import CallableSource
from .wire import decode_request, encode_reply

with needed("fastapi"):
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.requests import ClientDisconnect

log = logging.getLogger(__name__)
# Inputs of functions that the wire does not carry.
NOT_SENT = ("completion_ids", "turns", "environment_rewards", "trainer_state")
PIXELS_A_BYTE = 16  # of all images of a request, for each byte that a body may have
WAKING = 1.0  # seconds; a signal that the system hands to another thread is answered when this one wakes
RunBeside = Callable[..., Awaitable[Any]]  # runs a function with its arguments outside the event loop's thread
OF_ALL_SAMPLES = ("generated", "data_columns", "data_references")  # what merged requests have in common


@dataclass(frozen=True)
class ServerSettings:
    """max_batch: samples that requests are merged into. max_wait: seconds a request waits for others to join.
    max_waiting: requests held at once; more are answered 503, which clients retry.
    token: required as a bearer token when set. device: where model-based scorers run."""

    max_batch: int = 64
    max_wait: float = 0.005
    max_body_bytes: int = 256 * 1024 * 1024
    max_samples: int = 1024
    max_waiting: int = 256
    max_images: int = 32
    max_pixels: int = MAX_PIXELS
    token: str | None = None
    device: str = "cpu"


@dataclass(eq=False)
class _Waiting:
    batch: RewardBatch
    gone: Callable[[], Awaitable[bool]]  # whether nobody waits for the answer any more
    answer: asyncio.Future[Scores] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Merges waiting requests into batches of at most `max_batch` samples and scores them one batch at a time."""

    def __init__(self, source: Source, settings: ServerSettings, beside: RunBeside) -> None:
        self._source, self._settings, self._beside = source, settings, beside
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._held: _Waiting | None = None
        self.open: set[_Waiting] = set()  # not answered yet
        self.ended: RewardError | None = None  # why no request is answered any more

    async def score(self, batch: RewardBatch, gone: Callable[[], Awaitable[bool]]) -> Scores:
        """Scores of a request's batch, which may be scored together with others. Raises ClientDisconnect where its
        client has gone before: a backlog of such requests would make those time out that come after them."""
        if self.ended is not None:
            raise self.ended
        waiting = _Waiting(batch, gone)
        self.open.add(waiting)
        await self._queue.put(waiting)
        try:
            return await waiting.answer
        finally:
            self.open.discard(waiting)

    def start(self) -> asyncio.Task[None]:
        """Serve until the task is cancelled. Whatever else ends it is told to those who wait and who come later."""
        task = asyncio.create_task(self._run())
        task.add_done_callback(self._over)
        return task

    async def _run(self) -> None:
        while True:
            group = await self._gather()
            for waiting in [waiting for waiting in group if await waiting.gone()]:
                _settle(waiting, ClientDisconnect())
                group.remove(waiting)
            if group:
                await self._answer(group)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            told = masked(describe_error(task.exception())) if task.exception() else "returned"
            self.ended = RewardError(f"the server scores no more: its batching {told}; start it again")
            log.error("%s", self.ended)
            for waiting in list(self.open):
                _settle(waiting, self.ended)

    async def _answer(self, group: list[_Waiting]) -> None:
        outcome = await self._beside(self._outcome, [waiting.batch for waiting in group])
        if isinstance(outcome, RewardError) and len(group) > 1:
            for waiting in group:  # one bad request must not fail those it was merged with
                await self._answer([waiting])
            return
        for waiting, part in zip(group, [outcome] if isinstance(outcome, RewardError) else outcome):
            _settle(waiting, part)

    async def _gather(self) -> list[_Waiting]:
        group = [self._held or await self._queue.get()]
        self._held = None
        size, deadline = len(group[0].batch), time.monotonic() + self._settings.max_wait
        while size < self._settings.max_batch:
            try:
                left = max(0.0, deadline - time.monotonic())
                waiting = await asyncio.wait_for(self._queue.get(), left) if left else self._queue.get_nowait()
            except (TimeoutError, asyncio.QueueEmpty):
                break
            alike = all(getattr(waiting.batch, name) == getattr(group[0].batch, name) for name in OF_ALL_SAMPLES)
            if not alike or size + len(waiting.batch) > self._settings.max_batch:
                self._held = waiting  # opens the next batch
                break
            group.append(waiting)
            size += len(waiting.batch)
        return group

    def _outcome(self, batches: list[RewardBatch]) -> list[Scores] | RewardError:
        """Scores of each, or why there are none. Nothing that a scorer raises reaches the event loop, which would take
        CancelledError, StopIteration and SystemExit for its own."""
        try:
            scores = self._source.score(RewardBatch.join(batches), Call(device=self._settings.device))
        except RewardError as error:
            return error
        except BaseException as error:
            return RewardError(f"it {masked(describe_error(error))}")
        return scores.split([len(batch) for batch in batches])


def _settle(waiting: _Waiting, outcome: Scores | Exception) -> None:
    if waiting.answer.done():  # the client went away
        return
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)


def create_app(
    scorer: Callable[..., Any] | Source,
    settings: ServerSettings | None = None,
    beside: RunBeside = asyncio.to_thread,
) -> FastAPI:
    """The application that serves one scorer. Raises ConfigError for a function that must be given what requests do
    not hold.

    Args:
        scorer: a callable, adapted by its signature, or a Source.
        settings: None: the defaults.
        beside: runs the scorer, in another thread than the event loop's.
    """
    settings = settings or ServerSettings()
    source = scorer if isinstance(scorer, Source) else CallableSource(scorer)
    for part in (part for part in getattr(source, "parts", [source]) if isinstance(part, CallableSource)):
        for name in (name for name in NOT_SENT if name in part.signature.required):
            raise ConfigError(f"reward function {part.name} asks for {name!r}, which no request to a server holds")
        part.signature.names = [name for name in part.signature.names if name not in NOT_SENT]
    batchers: list[Batcher] = []  # one while the application runs; it belongs to that run's event loop

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batchers.append(Batcher(source, settings, beside))
        task = batchers[0].start()
        yield
        task.cancel()
        batchers.clear()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        ended = batchers[0].ended
        if ended is not None:
            return JSONResponse({"status": "failed", "scorer": source.name, "error": str(ended)}, 503)
        return JSONResponse({"status": "ok", "scorer": source.name})

    @app.post("/reward")
    async def reward(request: Request) -> JSONResponse:
        try:
            if len(batchers[0].open) >= settings.max_waiting:
                raise HTTPException(503, "too many requests are waiting")
            batch = await _read_batch(request, settings)
            scores = await batchers[0].score(batch, request.is_disconnected)
        except HTTPException as refusal:
            return JSONResponse({"error": refusal.detail}, refusal.status_code)
        except ClientDisconnect:
            return JSONResponse({"error": "the client went away"}, 499)
        except Exception as error:
            told = str(error) if isinstance(error, RewardError) else f"it {masked(describe_error(error))}"
            log.error("scorer %s failed: %s", source.name, told)
            return JSONResponse({"error": f"scorer {source.name} failed: {told}", "user_error": told}, 500)
        return JSONResponse(encode_reply(scores))

    return app


async def _read_batch(request: Request, settings: ServerSettings) -> RewardBatch:
    given = request.headers.get("authorization", "").encode()
    if settings.token is not None and not hmac.compare_digest(given, f"Bearer {settings.token}".encode()):
        raise HTTPException(401, "a bearer token is required")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send application/json")
    data, declared = bytearray(), request.headers.get("content-length", "")
    too_large = HTTPException(413, f"the body is larger than {settings.max_body_bytes} bytes")
    if declared.isdigit() and int(declared) > settings.max_body_bytes:
        raise too_large
    async for part in request.stream():
        data += part
        if len(data) > settings.max_body_bytes:
            raise too_large
    return await asyncio.to_thread(_parse, bytes(data), settings)


def _parse(data: bytes, settings: ServerSettings) -> RewardBatch:
    try:
        most = max(settings.max_pixels, PIXELS_A_BYTE * settings.max_body_bytes)
        return decode_request(json.loads(data), settings.max_samples, settings.max_images, settings.max_pixels, most)
    except DataError as error:
        raise HTTPException(422, str(error)) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None


def bind(host: str, port: int, settings: ServerSettings) -> socket.socket:
    """A listening socket. Raises ConfigError for a host that others can reach without a token, and when the port is
    taken.

    Args:
        host: address or name to listen on.
        port: 0 takes a free one.
        settings: for the token.
    """
    if not _is_loopback(host) and settings.token is None:
        raise ConfigError(f"host {host} can be reached by others: set a token (--token_env), or bind to 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}") from None
    return sock


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _CallingThread:
    """Runs functions of an event loop in the thread that calls `work`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future, Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns. It must not raise."""
        future: Future = Future()
        self._waiting.put((future, function, arguments))
        return await asyncio.wrap_future(future)

    def work(self) -> None:
        """Run what comes until `end`."""
        while True:
            try:
                item = self._waiting.get(timeout=WAKING)
            except Empty:
                continue
            if item is None:
                return
            future, function, arguments = item
            if future.set_running_or_notify_cancel():
                future.set_result(function(*arguments))

    def end(self, *_: object) -> None:
        """`work` returns once all before is done."""
        self._waiting.put(None)


class _Server(uvicorn.Server):
    """Prints its address once it accepts connections, so that whoever started it knows the port."""

    def __init__(self, config: uvicorn.Config, address: str) -> None:
        super().__init__(config)
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"serving on {self._address}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C also ends a function that does not return."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            raise KeyboardInterrupt


def serve(scorer: Callable[..., Any] | Source, host: str, port: int, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Prints one line, `serving on http://HOST:PORT/reward`.

    The scorer runs in the thread that calls this, the main one of a process: libraries with time limits by
    `signal.alarm`, as math_verify, work in no other.

    Args: as of `create_app` and `bind`.
    """
    scoring = _CallingThread()
    app = create_app(scorer, settings, scoring.run)
    sock = bind(host, port, settings)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    server = _Server(config, f"http://{shown}:{sock.getsockname()[1]}/reward")
    with server.capture_signals(), ThreadPoolExecutor(1, "server") as thread:
        running = thread.submit(server.run, [sock])
        running.add_done_callback(scoring.end)
        scoring.work()
        running.result()
