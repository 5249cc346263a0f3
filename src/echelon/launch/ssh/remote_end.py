"""The remote end of ``ssh_launcher.py``: starts ``echelon launch`` on this machine, and stops it when the connection
closes.

This file is run by its path, before echelon can be imported, so it uses only the standard library. The first line of
stdin is JSON with the token and the environment, which other users could read in argv. Each following line is the name
of a signal for the launcher. The end of stdin means that the connection is closed; the launcher then receives SIGHUP
and later SIGKILL.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_NAMES = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"})
_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0  # the launcher stops its ranks within 5


def main(argv: list[str]) -> int:
    """Run ``echelon launch`` with arguments ``argv`` and return its exit code."""
    greeting: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    try:
        os.chdir(greeting["directory"])
    except OSError as error:
        print(
            f"echelon: cannot use the directory {greeting['directory']} on this machine: {error.strerror}",
            file=sys.stderr,
        )
        print("  do:    run the command in a directory that exists on every machine", file=sys.stderr)
        return 1
    # Only the launcher can read the token from this pipe, once.
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as file:
        file.write(greeting["token"])
    launcher = subprocess.Popen(
        [sys.executable, "-m", "echelon", "launch", *argv],
        env={**_own_environment(), **greeting["environment"], greeting["token_variable"]: "/dev/stdin"},
        stdin=read_end,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()) if sys.platform == "linux" else None,  # safe: no thread is running yet
    )
    os.close(read_end)
    threading.Thread(target=_forward_signals, args=(launcher,), daemon=True).start()
    code = launcher.wait()
    return 128 - code if code < 0 else code


def _die_with(parent: int) -> Callable[[], None]:
    """Return a function that, called in a new process, makes that process receive SIGHUP when ``parent`` dies."""
    import ctypes  # noqa: PLC0415 - Linux only; the child must not import between fork and exec

    prctl = ctypes.CDLL(None).prctl

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGHUP)

    return request_signal


def _own_environment() -> dict[str, str]:
    """Return the environment, read through ``base/environ.py``, which is loaded by its path."""
    path = os.path.join(
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "base", "environ.py"
    )
    spec = importlib.util.spec_from_file_location("_echelon_environ", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own: dict[str, str] = module.snapshot()
    return own


def _forward_signals(launcher: subprocess.Popen[bytes]) -> None:
    for line in sys.stdin.buffer:
        name = line.strip().decode("ascii", "replace")
        if name in _NAMES:
            _send(launcher, signal.Signals[name])
    _send(launcher, signal.SIGHUP)
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_GRACE_S)
    _send(launcher, signal.SIGKILL)  # its ranks are killed with it


def _send(launcher: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        launcher.send_signal(number)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for the lock of stdin, which the thread may hold
