"""Drives a headless Chromium through its DevTools protocol, over a pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser, or None if none is installed."""

_LIMIT_S = 60.0


class Browser:
    """A page in the browser, with everything that it reported: console messages, exceptions, and requests."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.problems: list[str] = []
        """Exceptions, and errors and warnings on the console."""
        self.requests: list[str] = []
        """Addresses that the page requested."""
        self.is_loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setScrollbarsHidden", hidden=True)  # as on a telephone, and equal on all systems
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def open(self, path: Path | str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> float:
        """Open a file or an address and wait until it is drawn; return the seconds that this took."""
        self.problems.clear()
        self.requests.clear()
        self.resize(width, height)
        self.prefer(is_dark=is_dark)
        self.is_loaded = False
        start = time.monotonic()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self.is_loaded:
            self._until(lambda found: found.get("method") == "Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - start

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Set the size of the page's window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, *, is_dark: bool) -> None:
        """Set the user's preferred colors."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; wait for it if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, text: str = "", shift: bool = False) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        fields = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def mouse(self, kind: str, x: float, y: float, *, button: str = "none", clicks: int = 0) -> None:
        """Send a mouse event: mouseMoved, mousePressed or mouseReleased."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    def screenshot(self, path: Path, *, is_full: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
                data = os.read(self._receive, 1 << 20) if ready else b""
                assert data, "the browser ended or does not answer"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            if is_wanted(message):
                return dict(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.problems.append(str([one.get("value", one.get("description")) for one in facts["args"]]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.problems.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser, and end it with its processes."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        # The protocol uses the file descriptors 3 and 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'
        flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu"]
        flags += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *flags],
            pass_fds=(to_browser, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Browser(from_us, from_browser)
        finally:
            os.close(from_us)  # the browser ends when its pipe does
            os.close(from_browser)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
