"""Reward servers for tests: ours, `with serving(scorer) as url:`, and good and broken ones of other people, `with
FaultyServer() as server:`, then POST to server.base + '/good'."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvicorn

from lightrft_visual.rewards.remote.server import ServerSettings, bind, create_app


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    extra: dict[str, str] = {}  # further headers of replies

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: FaultyServer = self.server.owner
        kind = self.path.strip("/").split("/")[0]
        with server.lock:
            server.calls[kind] += 1
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            call = server.calls[kind]
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            self.answer(kind, body, call)
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, kind: str, body: dict, call: int) -> None:
        size = len(body.get("queries", body.get("query", [])))
        scores = [0.25 + index for index in range(size)]
        plain = {
            **dict.fromkeys(("good", "slow", "together"), {"rewards": scores, "components": {"detail": scores}}),
            "openrlhf": {"rewards": scores, "scores": [1.0] * size, "extra_logs": {"length": [3.0] * size}},
            "short": {"rewards": scores[:-1]},
            "shapeless": {"rewards": scores, "components": {"detail": [*scores, 0.0]}},
            "huge": {"rewards": [1e30] * size},
            "strings": {"rewards": ["0.5"] * size},
            "failed": {"rewards": [None] * size, "failed": list(range(size))},
            "list": scores,
            "empty": {},
        }
        owner = self.server.owner
        if kind == "hang":
            owner.released.wait(30)
        if kind == "together":
            if call == owner.together:
                owner.all_there.set()
            owner.all_there.wait(30)
        if kind in ("slow", "504"):
            time.sleep(owner.delay)
        known = ("query" if kind == "theirs" else "queries") in body  # by a server that knows one wire alone
        if kind in plain:
            self.reply(200, plain[kind])
        elif kind == "html":
            self.reply(200, "<html>Bad gateway</html>", "text/html")
        elif kind == "http2":  # the frame with which a server that knows nothing else begins
            self.wfile.write(b"\0\0\0\4\0\0\0\0\0")
            self.close_connection = True
        elif kind == "flaky":  # two failures, then well
            self.reply(200 if call > 2 else 503, {"rewards": scores})
        elif kind in ("theirs", "ours"):
            extras = {"scores": scores, "extra_logs": {}} if kind == "theirs" else {}
            self.reply(200 if known else 500, {"rewards": scores, **extras} if known else {"error": "KeyError"})
        else:
            self.reply(int(kind), {"error": "no"})

    def reply(self, status: int, content: object, content_type: str = "application/json") -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *arguments: object) -> None:
        """Quiet: tests cut connections on purpose."""


class FaultyServer:
    def __init__(self, delay: float = 0.0, port: int = 0, together: int = 0) -> None:
        """delay: of 'slow' and '504', in seconds. together: so many requests of that kind are answered at once."""
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.delay, self.together = delay, together
        self.lock, self.released, self.all_there = threading.Lock(), threading.Event(), threading.Event()
        self._http = _Server(("127.0.0.1", port), Handler)
        self._http.owner = self
        self.base = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in self._http.connections:  # kept connections die with the server
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)


@contextlib.contextmanager
def serving(scorer: object, **settings: object) -> Iterator[str]:
    """Our own server of a scorer, in this process; its URL."""
    app = create_app(scorer, ServerSettings(**settings))
    sock = bind("127.0.0.1", 0, ServerSettings())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/reward"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)
        sock.close()


def closed_port() -> int:
    """A port on which nobody listens."""
    probe = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = probe.server_port
    probe.server_close()
    return port
