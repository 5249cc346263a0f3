"""The warm server: a process that has imported torch and forks ranks, which start in a tenth of a second instead of seconds.

It only imports: one thread (a fork copies no other), no torch operation, no device. Like the worker it is run by its path:
``python warm_server.py SOCKET PARENT``. Requests on the socket:

- ``{"import": [...]}``: imports the modules and answers ``{"ready": ...}``, whether ranks can be forked now;
- ``{"argv": ..., "environment": ...}`` with the two files of a rank's output: forks the rank and answers ``{"pid": ...}``, and when the
  rank has ended ``{"pid": ..., "status": ...}``.

Not ``multiprocessing.forkserver``: its children run a pickled function with the server's environment and session, it reports no
readiness (threads after the imports), and it swallows failing imports of its preload list.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["MESSAGE_BYTES", "main"]

MESSAGE_BYTES = 1 << 20


def main(argv: list[str]) -> None:
    """Serve until the launcher closes its end of the socket."""
    control = socket.socket(fileno=int(argv[0]))
    worker, environ = _load("launch/local", "worker"), _load("base", "environ")
    worker.die_with(argv[1])
    # The ranks die with this process.
    own = f"{os.getpid()}:{worker.start_of(os.getpid())}"
    if not getattr(sys.flags, "safe_path", False):
        # Not our own folder, which would shadow modules of its names. Each rank puts its script's folder there.
        sys.path[0] = sys.path[1]
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    sources: list[Any] = [control, wake]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if wake in readable:
            os.read(wake, 4096)
            _report_exits(control)
        if control in readable:
            try:
                data, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
            except ConnectionError:  # closed before it had read our answer
                return
            if not data:
                return  # the ranks that still run die with this process
            request = json.loads(data)
            if "import" in request:
                _send(control, _import(request["import"]))
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (wake, woken):
                    os.close(file)
                control.close()
                _run_rank(request, files, worker, environ, own)
            for file in files:
                os.close(file)
            _send(control, {"pid": pid})


def _import(names: list[str]) -> dict[str, Any]:
    try:
        for name in names:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - ranks forked earlier need this process; later ones start cold, and show the error themselves
        return {"ready": False, "why": f"{type(error).__name__}: {error}"}
    tasks = Path("/proc/self/task")
    num_threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    return {"ready": num_threads == 1, "why": f"{num_threads} threads"}


def _run_rank(request: dict[str, Any], files: list[int], worker: ModuleType, environ: ModuleType, own: str) -> NoReturn:
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    environ.write({**dict.fromkeys(environ.snapshot()), **request["environment"]})
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as in a new process; `random` reseeds itself after a fork
    worker.main([own, *request["argv"]])
    sys.exit(0)


def _report_exits(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(control, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _load(folder: str, name: str) -> ModuleType:
    """Load a file of echelon by its path: programs of ranks must not find echelon imported."""
    path = Path(__file__).resolve().parents[2] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_echelon_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
