"""``python -m echelon`` in a fork of a rank worker, which has imported torch: a second of processor time less for each launcher."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import NoReturn


def run_echelon(argv: Sequence[str], folder: str, environ: Mapping[str, str]) -> tuple[int, str, str, float]:
    """Run ``echelon ARGV`` in ``folder`` and return its exit code (negative for a signal), output, errors and seconds. Called in a worker."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _be_launcher(argv, folder, environ, out.fileno(), err.fileno())
        _, status = os.waitpid(pid, 0)
        wall_s = time.monotonic() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return os.waitstatus_to_exitcode(status), texts[0], texts[1], wall_s


def _be_launcher(argv: Sequence[str], folder: str, environ: Mapping[str, str], out: int, err: int) -> NoReturn:
    code = 1
    try:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        encoding = environ.get("PYTHONIOENCODING", "utf-8")
        sys.stdin = io.TextIOWrapper(io.FileIO(0, "rb", closefd=False), encoding=encoding)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "wb", closefd=False)), encoding=encoding)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "wb", closefd=False)), encoding=encoding, line_buffering=True
        )
        sys.argv[:] = ["echelon", *argv]
        sys.path.insert(0, folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("echelon", "tests", "click")]:
            del sys.modules[name]  # nothing that earlier calls have kept
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        atexit._clear()
        code = _run()
    except BaseException:  # noqa: BLE001 - a fork must never return into the worker's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run() -> int:
    """Return the exit code that the interpreter would give."""
    code: object = 0
    try:
        runpy.run_module("echelon", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code & 0xFF if isinstance(code, int) else int(code is not None)
