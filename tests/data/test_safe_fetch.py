import http.server
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from lightrft_visual.data import safe_fetch
from lightrft_visual.data.safe_fetch import fetch_bytes, is_public
from lightrft_visual.errors import DataError

LIMITS = {"max_bytes": 1000, "timeout": 3.0}


REPLIES = {  # path: status, headers, body
    "/nowhere": (302, {"Location": "http://["}, b""),
    "/loop": (302, {"Location": "/loop"}, b""),
    "/packed": (200, {"Content-Encoding": "gzip, gzip"}, b"\x1f\x8b"),
    "/short": (200, {"Content-Length": "50"}, b"abc"),
    "/2000": (200, {}, b"x" * 2000),
    "/7": (404, {"Content-Length": "7"}, b"x" * 7),
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits.append(self.path)
        count = int(self.path.strip("/").split("?")[0]) if self.path[1:2].isdigit() else 0
        status, headers, body = REPLIES.get(self.path, (200, {"Content-Length": str(count)}, b"x" * count))
        if self.server.first is not None:
            (status, headers, body), self.server.first = self.server.first, None
        self.server.named.append(self.headers["Host"])
        if self.path.startswith("/to/"):
            status, headers = 302, {"Location": self.path.removeprefix("/to/"), "Content-Length": "0"}
        self.send_response(status)
        for name, value in ({} if self.path == "/drip" else headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        for _ in range(200 if self.path == "/drip" else 0):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.1)

    def log_message(self, *arguments):
        """Quiet."""

    def handle(self):
        with suppress(BrokenPipeError, ConnectionResetError):
            super().handle()


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.hits, server.named, server.first = True, [], [], None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def public(server, monkeypatch):
    """The loopback server under a name that counts as public: only `example.test` resolves to it."""
    monkeypatch.setattr(safe_fetch, "PAUSE", 0.0)
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


def test_nothing_is_fetched_unless_allowed_and_the_own_network_never(server):
    refused = [(url, remote) for url in hostile(server.server_port) for remote in (False, True)]
    for url, remote in [*refused, ("http://example.com/x.png", False)]:
        with pytest.raises(DataError):
            fetch_bytes(url, allow_remote=remote, **LIMITS)
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
        ("/short", "IncompleteRead"),
    ],
)
def test_limits(public, path, words):
    with pytest.raises(DataError, match=words):
        fetch_bytes(public + path, allow_remote=True, **LIMITS)


@pytest.mark.parametrize("first", [(503, {}, b""), (429, {}, b""), (200, {"Content-Length": "5"}, b"xx")])
def test_a_busy_server_and_a_broken_connection_are_asked_once_more(public, server, first):
    server.first = first
    assert fetch_bytes(f"{public}/5", allow_remote=True, **LIMITS) == b"xxxxx"
    assert server.hits == ["/5", "/5"]


@pytest.mark.parametrize(("path", "hits"), [("/7", 1), ("/short", 2)])
def test_no_server_is_asked_a_third_time_and_a_file_that_is_not_there_once(public, server, path, hits):
    with pytest.raises(DataError):
        fetch_bytes(public + path, allow_remote=True, **LIMITS)
    assert len(server.hits) == hits


def test_a_host_is_named_without_the_usual_port_of_its_scheme_as_signatures_of_urls_want_it(server, monkeypatch):
    monkeypatch.setattr(safe_fetch, "resolve_public", lambda host, port: "127.0.0.1")
    own = lambda *given: socket.create_connection(server.server_address, timeout=3)  # noqa: E731
    monkeypatch.setattr(safe_fetch, "_connect", own)
    for address in ("https://example.test", "http://example.test", "https://example.test:80"):
        fetch_bytes(f"{address}/5", allow_remote=True, **LIMITS)
    assert server.named == ["example.test", "example.test", "example.test:80"]


def test_a_server_that_drips_is_cut_at_the_time_limit_which_is_told(public):
    started = time.monotonic()
    with pytest.raises(DataError, match="/drip cannot be fetched: it took longer than 0.5 seconds"):
        fetch_bytes(f"{public}/drip", allow_remote=True, max_bytes=1000, timeout=0.5)
    assert time.monotonic() - started < 10


def test_the_handshake_has_what_the_connection_left_of_the_time(server, monkeypatch):
    """Which bounds it as a whole, however slowly its bytes come."""
    left, given = iter((3.0, 1.25)), []
    context = SimpleNamespace(wrap_socket=lambda plain, server_hostname: given.append(plain.gettimeout()) or plain)
    monkeypatch.setattr(safe_fetch, "_left", lambda deadline: next(left))
    monkeypatch.setattr(safe_fetch.ssl, "create_default_context", lambda: context)
    safe_fetch._connect(*server.server_address, "example.test", 0.0).close()
    assert given == [1.25]


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
