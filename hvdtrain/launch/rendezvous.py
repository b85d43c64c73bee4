"""Where Gloo's ranks find each other: a key-value store over HTTP, as Horovod's C++ side speaks it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}
        super().__init__(("127.0.0.1", 0), _Handler)  # a port that is free: two jobs on a machine never collide


class _Handler(BaseHTTPRequestHandler):
    """GET, PUT and DELETE of ``/scope/key``; a key that is not there yet is a 404, and the client asks again."""

    server: _Store
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        value = self.server.values.get(self._key())
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        self.server.values[self._key()] = self.rfile.read(length)
        self._answer(200)

    def do_DELETE(self) -> None:  # a rank has finished with a scope; the store lives no longer than the job
        self._answer(200)

    def _key(self) -> tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: its lines would be taken for a rank's."""


@contextmanager
def serve() -> Iterator[int]:
    """Serve in a thread while this is open; the port."""
    with _Store() as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        try:
            yield store.server_address[1]
        finally:
            store.shutdown()
