"""The page of runs that still go on, served on this machine only and made anew when they have written something."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

HOST = "127.0.0.1"


class Page:
    """The newest page. ``state`` is anything that changes when the page would."""

    def __init__(self, state: Callable[[], object], make: Callable[[], str]) -> None:
        self._state, self._make = state, make
        self._lock = Lock()
        self._seen: object = None
        self._page = b""

    def get(self) -> bytes:
        with self._lock:  # one reader at a time makes it
            if (state := self._state()) != self._seen:
                self._page = self._make().encode("utf-8", "replace")
                self._seen = state
            return self._page


def make_server(page: Page, port: int) -> ThreadingHTTPServer:
    """A server of this one page on 127.0.0.1; port 0: any free one. Raises ValueError when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may make a browser ask us; its name would be in Host.
            if self.path.split("?")[0] != "/" or self.headers.get("Host", "").split(":")[0] not in (HOST, "localhost"):
                self.send_error(404)
                return
            try:
                body, status = page.get(), 200
            except ValueError as error:  # the run's folder has gone
                body, status = f"{error}\n".encode(), 500
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html; charset=utf-8" if status == 200 else "text/plain; charset=utf-8"
            )
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ValueError(f"port {port} cannot be used ({error.strerror}): choose another --port") from None
