"""Serves a live run to browsers on this machine.

Other users of the machine can connect to a port on loopback, and web pages can make a browser do so. Therefore each request needs
the token in the URL that ``serve`` prints, and its Host header must name this machine (against DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final
from urllib.parse import parse_qs, urlsplit

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.report.live_run import LiveRun
from echelon.report.page import asset, render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import read_run

_ADDRESS = "127.0.0.1"
_HOSTS = frozenset({"127.0.0.1", "localhost"})
_TIMEOUT_S = 10
_REPORT_EVERY_S = 2.0
_IDLE_FACTOR = 9
"""The report is made at most a tenth of the time."""
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),  # the token is in the URL
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
)


@final
class WebServer:
    """Serves a run on a port of 127.0.0.1.

    Raises:
        UsageError: the port is not available.
    """

    def __init__(self, live: LiveRun, *, port: int = 0) -> None:
        self._live = live
        self._token = secrets.token_urlsafe(32)
        self._lock, self._report_lock = threading.Lock(), threading.Lock()  # several windows may show the run
        self._data, self._next_report = b"", 0.0
        try:
            self._server = ThreadingHTTPServer((_ADDRESS, port), _handler(self))
        except (OSError, OverflowError) as error:
            raise UsageError(
                _("cannot listen on port {port} of {address}: {error}", port=port, address=_ADDRESS, error=error),
                where="--port",
                do=_("pass another port, or omit --port for a free one"),
            ) from error
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The URL of the report for the browser, with the token."""
        return f"http://{_ADDRESS}:{self.port}/?token={self._token}"

    @property
    def ranks_url(self) -> str:
        """The URL of the page that shows what each rank is doing, with the token."""
        return f"http://{_ADDRESS}:{self.port}/ranks?token={self._token}"

    def run(self) -> None:
        """Answer requests until ``stop`` is called or the program is interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """Make ``run`` return."""
        self._server.shutdown()

    def close(self) -> None:
        """Close the port."""
        self._server.server_close()

    def is_allowed(self, host: str, query: str) -> bool:
        """Return whether a request may be answered.

        Args:
            host: its Host header.
            query: the part of its URL after the question mark.
        """
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            return False
        given = parse_qs(query).get("token", [""])
        return len(given) == 1 and hmac.compare_digest(given[0].encode(), self._token.encode())

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return the type and the content of ``path``, or None if there is no such page."""
        if path == "/":
            page = render_page(json.loads(self._report()), live_url=f"report.json?token={self._token}")
            return "text/html; charset=utf-8", page.encode()
        if path == "/ranks":
            return "text/html; charset=utf-8", asset("ranks.html").encode()
        if path == "/report.json":
            return "application/json", self._report()
        if path == "/ranks.json":
            with self._lock:
                snapshot = self._live.read()
            return "application/json", json.dumps(snapshot.to_json()).encode()
        return None

    def _report(self) -> bytes:
        """Return the data of the report's page, which takes seconds for a long run with many ranks and is therefore kept."""
        with self._report_lock:
            began = time.monotonic()
            if began >= self._next_report:
                self._data = json.dumps(page_data([read_run(self._live.folder)])).encode()
                now = time.monotonic()
                self._next_report = now + max(_REPORT_EVERY_S, _IDLE_FACTOR * (now - began))
            return self._data


def serve(live: LiveRun, *, port: int, announce: Callable[[str], object]) -> None:
    """Serve ``live`` until the program is interrupted. ``announce`` prints the URL."""
    server = WebServer(live, port=port)
    try:
        announce(f"report: {server.url}\nranks:  {server.ranks_url}")
        announce(
            _(
                "Only this machine can open them; from another one, first: ssh -L {port}:{address}:{port} HOST",
                port=server.port,
                address=_ADDRESS,
            )
        )
        announce(_("Ctrl-C ends this view; the run continues."))
        server.run()
    finally:
        server.close()


def _handler(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if not server.is_allowed(self.headers.get("Host", ""), parts.query):
                self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open the URL that echelon watch --web printed\n")
                return
            found = server.answer(parts.path)
            if found is None:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
            else:
                self._send(HTTPStatus.OK, *found)

        def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            for name, value in _HEADERS:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass  # the requests contain the token

        def version_string(self) -> str:
            return "echelon"

    return Handler
