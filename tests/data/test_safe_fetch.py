import http.server
import socket
import threading
import time

import pytest

from lightrft_visual.data import safe_fetch
from lightrft_visual.data.safe_fetch import fetch_bytes, is_public
from lightrft_visual.errors import DataError

LIMITS = {"max_bytes": 1000, "timeout": 3.0}


REDIRECTED = {"/nowhere": "http://[", "/loop": "/loop"}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/packed"):
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip, gzip")
            self.end_headers()
            self.wfile.write(b"\x1f\x8b")
        elif self.path in REDIRECTED:
            self.send_response(302)
            self.send_header("Location", REDIRECTED[self.path])
            self.end_headers()
        elif self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.1)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "50")
            self.end_headers()
            self.wfile.write(b"abc")
        else:
            body = b"x" * int(self.path.strip("/").split("?")[0] or 3)
            self.send_response(404 if self.path == "/7" else 200)
            if self.path != "/2000":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Quiet."""

    def handle(self):
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            return


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.hits = True, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def public(server, monkeypatch):
    """The loopback server under a name that counts as public: only `example.test` resolves to it."""
    original = safe_fetch.resolve_public

    def resolve(host, port):
        return "127.0.0.1" if host == "example.test" else original(host, port)

    monkeypatch.setattr(safe_fetch, "resolve_public", resolve)
    return f"http://example.test:{server.server_port}"


def hostile(port):
    return [
        f"http://127.0.0.1:{port}/3",
        f"http://localhost:{port}/3",
        f"http://[::1]:{port}/3",
        f"http://[::ffff:127.0.0.1]:{port}/3",
        f"http://0.0.0.0:{port}/3",
        f"http://2130706433:{port}/3",
        f"http://user:pw@127.0.0.1:{port}/3",
        "http://a b/x",
        "http://10.0.0.1/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://[fe80::1]/x",
        "http://[fd00::1]/x",
        "http://[64:ff9b::7f00:1]/x",
        "http://224.0.0.1/x",
        "file:///etc/hostname",
        "//127.0.0.1/x",
        "http://",
        "http://127.0.0.1:99999/",
        "/etc/hostname",
        "",
    ]


def test_nothing_is_fetched_unless_allowed(server):
    for url in [*hostile(server.server_port), "http://example.com/x.png"]:
        with pytest.raises(DataError):
            fetch_bytes(url, allow_remote=False, **LIMITS)
    assert server.hits == []


def test_own_network_stays_refused_when_remote_is_allowed(server):
    for url in hostile(server.server_port):
        with pytest.raises(DataError):
            fetch_bytes(url, allow_remote=True, **LIMITS)
    assert server.hits == []


def test_redirect_to_a_refused_address(server, public):
    for target in hostile(server.server_port)[:-4]:  # the last four are relative: they stay on the public host
        server.hits.clear()
        with pytest.raises(DataError):
            fetch_bytes(f"{public}/to/{target}", allow_remote=True, **LIMITS)
        assert len(server.hits) <= 1


def test_public_fetch_and_redirect(public, server):
    assert fetch_bytes(f"{public}/5?q=1", allow_remote=True, **LIMITS) == b"xxxxx"
    assert fetch_bytes(f"{public}/to/{public}/4", allow_remote=True, **LIMITS) == b"xxxx"
    assert server.hits[0] == "/5?q=1"
    assert fetch_bytes(f"{public}/5?name=a b\u00e9%20", allow_remote=True, **LIMITS) == b"xxxxx"
    assert server.hits[-1] == "/5?name=a%20b%C3%A9%20"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/2000", "larger than 1000"),
        ("/7", "HTTP 404"),
        ("/packed", "the reply is encoded .'gzip, gzip'"),
        ("/nowhere", "cannot be fetched: ValueError"),
        ("/loop", "more than 5 redirects"),
        ("/short", "IncompleteRead|ended before"),
    ],
)
def test_limits(public, path, words):
    with pytest.raises(DataError, match=words):
        fetch_bytes(public + path, allow_remote=True, **LIMITS)


def test_a_server_that_drips_is_cut_at_the_time_limit(public):
    started = time.monotonic()
    with pytest.raises(DataError):
        fetch_bytes(f"{public}/drip", allow_remote=True, max_bytes=1000, timeout=0.5)
    assert time.monotonic() - started < 10


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    def both(host, port, type):
        return [(socket.AF_INET, type, 6, "", (address, port)) for address in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(DataError, match="not public"):
        safe_fetch.resolve_public("mixed.test", 80)


def test_message_holds_no_query_and_no_password():
    with pytest.raises(DataError) as caught:
        fetch_bytes("http://user:pw@example.com/a?token=SECRET", allow_remote=False, **LIMITS)
    assert "SECRET" not in str(caught.value) and "pw" not in str(caught.value)


def test_is_public():
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1:248:1893:25c8:1946")
    for address in ("127.0.0.1", "::", "100.64.0.1", "192.0.2.1", "240.0.0.1", "2002:7f00:1::", "ff02::1"):
        assert not is_public(address)
