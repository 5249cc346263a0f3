"""A store with S3's interface on the loopback interface, for tests: moto's server behind a proxy that injects faults.

``python -m tests.object_server`` prints the URL of the proxy, and serves until its standard input is closed. A test gives orders
by HTTP (``order``): how often requests fail, and in which ways; and a process that is killed at its n-th request.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ORDERS = "/orders"
FAULTS = ("error", "throttled", "silent", "torn", "lost reply", "half a reply")
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_TIMEOUT": "2s",  # of a request: the fault "silent" takes as long
}
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_REFUSED = b"<Error><Code>NotImplemented</Code><Message>A header is not implemented.</Message></Error>"


# ---- in the process of the tests -------------------------------------------------------------------------------------


@contextmanager
def serving() -> Iterator[str]:
    """Start a server in a process, with a bucket ``bucket``, and yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.object_server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            assert url.startswith("http://127.0.0.1:"), process.stderr.read() if process.stderr else ""
            yield url
        finally:
            process.kill()


def order(url: str, **values: Any) -> dict[str, Any]:
    """Replace the orders of the server, and return its counters since the last ones.

    Args:
        share: the share of requests that fail.
        faults: how they fail, from ``FAULTS``.
        seed: of the random numbers.
        refuses_conditions: whether to refuse conditional writes, as Aliyun's store does.
        victim, at, is_done: kill this process at the ``at``-th request, after or before the store has done it.
    """
    request = urllib.request.Request(url + ORDERS, data=json.dumps(values).encode(), method="PUT")
    with urllib.request.urlopen(request) as reply:
        counters: dict[str, Any] = json.loads(reply.read())
    return counters


# ---- in the process of the server ------------------------------------------------------------------------------------


class _Orders:
    def __init__(self, values: dict[str, Any]) -> None:
        self.share = values.get("share", 0.0)
        self.faults = values.get("faults", FAULTS)
        self.refuses_conditions = values.get("refuses_conditions", False)
        self.victim, self.at, self.is_done = values.get("victim"), values.get("at", 0), values.get("is_done", False)
        self.counters: dict[str, Any] = {"requests": 0, "has_killed": False, **dict.fromkeys(FAULTS, 0)}
        self._random = random.Random(values.get("seed", 0))
        self._lock = threading.Lock()

    def next(self) -> tuple[str | None, bool]:
        """Count a request; return its fault, and whether to kill the victim."""
        with self._lock:
            self.counters["requests"] += 1
            kills = self.victim is not None and self.counters["requests"] == self.at
            fault = self._random.choice(self.faults) if self._random.random() < self.share else None
            if fault is not None:
                self.counters[fault] += 1
            return fault, kills

    def kill(self) -> None:
        os.kill(self.victim, signal.SIGKILL)
        self.counters["has_killed"] = True


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    store: tuple[str, int]
    orders = _Orders({})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that were killed."""


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == ORDERS:
            counters, self.server.orders = self.server.orders.counters, _Orders(json.loads(body))
            self._send(200, {}, json.dumps(counters).encode())
            return
        orders = self.server.orders
        fault, kills = orders.next()
        if kills and not orders.is_done:
            orders.kill()
        if orders.refuses_conditions and any(name in self.headers for name in ("If-None-Match", "If-Match")):
            self._send(501, {}, _REFUSED)
        elif fault == "error":
            self._send(500, {}, b"")
        elif fault == "throttled":
            self._send(503, {}, _SLOW_DOWN)
        elif fault == "torn":
            self.close_connection = True
        elif fault == "silent":
            self.rfile.read(1)  # until the client has given up
            self.close_connection = True
        else:
            status, headers, content = self._forward(body)
            if kills and orders.is_done:
                orders.kill()
            if fault == "lost reply":
                self.close_connection = True
            elif fault == "half a reply":
                self._send(status, headers, content, cut_off=True)
            else:
                self._send(status, headers, content)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server.store)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    def _send(self, status: int, headers: dict[str, str], content: bytes, *, cut_off: bool = False) -> None:
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        is_head = self.command == "HEAD"
        kept = {
            n.lower(): v for n, v in headers.items() if n.lower() not in ("connection", "transfer-encoding", "date")
        }
        if not is_head:
            kept["content-length"] = str(len(content))
        lines += [f"{name}: {value}" for name, value in kept.items()]
        sent = b"" if is_head else content[: len(content) // 2] if cut_off else content
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)
        self.wfile.flush()
        self.close_connection = cut_off or self.headers.get("Connection", "").lower() == "close"


def main() -> None:
    from moto.server import ThreadedMotoServer

    store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    server = _Server(("127.0.0.1", 0), _Proxy)
    server.store = store.get_host_and_port()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")):
        print(url, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    main()
