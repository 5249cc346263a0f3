"""The server of ``echelon watch --web`` answers only this machine's browser with the token."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.base.errors import UsageError
from echelon.report.live_run import LiveRun
from echelon.report.web_server import WebServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run_id": "r", "outcome": "succeeded", "began": 1.0}))
    server = WebServer(LiveRun(tmp_path))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()
    server.close()


def _get(server: WebServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_data_need_the_token(server: WebServer) -> None:
    query = server.url.partition("?")[2]
    status, text = _get(server, f"/?{query}")
    assert status == 200
    assert f'data-live="report.json?{query}"' in text  # the report's page, which asks for new data
    assert _get(server, f"/ranks?{query}")[0] == 200
    assert "title" in json.loads(_get(server, f"/report.json?{query}")[1])
    status, text = _get(server, f"/ranks.json?{query}")
    assert status == 200
    assert json.loads(text)["outcome"] == "succeeded"
    token = query.removeprefix("token=")
    wrong = [
        "",
        "?token=",
        "?token=" + token[:-1],
        "?token=" + token[:-1] + ("A" if token[-1] != "A" else "B"),
        "?Token=" + token,
        f"?token={token}&token={token}",
        "?token=%c3%a9",
        "?token=" + token + "%00",
    ]
    for page in ("/", "/report.json", "/ranks", "/ranks.json", "/none"):
        for given in wrong:
            status, text = _get(server, page + given)
            assert status == 403, (page, given)
            assert "succeeded" not in text
    assert _get(server, f"/none?{query}")[0] == 404


def test_a_host_header_of_another_name_is_refused(server: WebServer) -> None:
    query = server.url.partition("?")[2]
    for host in (f"localhost:{server.port}", "127.0.0.1", "localhost:9999"):
        assert _get(server, f"/?{query}", host)[0] == 200, host
    for host in (
        "attacker.example",
        f"attacker.example:{server.port}",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example:80",
        "",
    ):
        assert _get(server, f"/?{query}", host)[0] == 403, host


def test_only_get_is_answered_and_only_on_loopback(server: WebServer) -> None:
    query = server.url.partition("?")[2]
    assert _get(server, f"/?{query}", method="POST")[0] == 501
    assert server.url.startswith("http://127.0.0.1:")


def test_each_server_has_another_token(server: WebServer, tmp_path: Path) -> None:
    other = WebServer(LiveRun(tmp_path))
    try:
        assert other.url.partition("token=")[2] != server.url.partition("token=")[2]
        assert len(server.url.partition("token=")[2]) >= 32
    finally:
        other.close()


def test_a_port_in_use_is_an_error(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on port {server.port}"):
        WebServer(LiveRun(tmp_path), port=server.port)
