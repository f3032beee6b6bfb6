"""A reward server whose answers take their time, and which has no score for few of the responses."""

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS = 0.1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        time.sleep(SECONDS)
        numbers = [zlib.crc32(query.encode()) for query in queries]
        scores = [None if number % 31 == 2 else number % 8 / 8 for number in numbers]
        data = json.dumps({"rewards": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Quiet."""


@contextmanager
def late_rewards_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/late"
    finally:
        server.shutdown()
