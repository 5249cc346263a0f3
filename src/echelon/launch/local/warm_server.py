"""The warm server: a process that has imported torch and forks ranks, which start in 0.1 s instead of seconds.

It only imports modules; it does not start threads, run torch operations or use a device. Like the worker, it is run by
its path: ``python warm_server.py SOCKET PARENT``. Requests on the socket:

- ``{"import": [...]}``: import the modules, and answer ``{"ready": ...}``, which says whether ranks can be forked;
- ``{"argv": ..., "environment": ...}`` with two file descriptors for the rank's output: fork the rank, answer ``{"pid":
  ...}``, and send ``{"pid": ..., "status": ...}`` after the rank has ended;
- ``{"serve": true}`` with one file descriptor, a socket: fork a server that has the same modules and serves another launcher on it.

``multiprocessing.forkserver`` is not suitable: its children run a pickled function in the server's environment and
session, it does not report whether imports started threads, and it ignores failed imports in its preload list.
"""

from __future__ import annotations

import gc
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

MESSAGE_BYTES = 1 << 20


def main(argv: list[str]) -> None:
    """Serve until the launcher closes its end of the socket."""
    control = socket.socket(fileno=int(argv[0]))
    worker, environ = _load("launch/local", "worker"), _load("base", "environ")
    worker.die_with(argv[1])
    if not getattr(sys.flags, "safe_path", False):
        # Remove this file's folder, whose modules would shadow others. Each rank inserts the folder of its script.
        sys.path[0] = sys.path[1]
    _serve(control, worker, environ)


def _serve(control: socket.socket, worker: ModuleType, environ: ModuleType) -> None:
    # The ranks die with this process.
    own = f"{os.getpid()}:{worker.start_of(os.getpid())}"
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
            except ConnectionError:  # the launcher closed the socket without reading our answer
                return
            if not data:
                return  # ranks that are still running die with this process
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
                if "serve" in request:
                    worker.die_with(own)
                    _serve(socket.socket(fileno=files[0]), worker, environ)
                    sys.exit(0)
                _run_rank(request, files, worker, environ, own)
            for file in files:
                os.close(file)
            _send(control, {"pid": pid})


def _import(names: list[str]) -> dict[str, Any]:
    # Garbage collections take a fifth of the time of an import, and free little: 9,000 of the 457,000 objects that torch makes. Frozen, the
    # others are not examined by the ranks either, so that their memory remains shared.
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - forked ranks need this process; later ranks are not forked, and show the error
        return {"ready": False, "why": f"{type(error).__name__}: {error}"}
    finally:
        gc.freeze()
        gc.enable()
    tasks = Path("/proc/self/task")
    num_threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    return {"ready": num_threads == 1, "why": f"{num_threads} threads"}


def _run_rank(request: dict[str, Any], files: list[int], worker: ModuleType, environ: ModuleType, own: str) -> NoReturn:
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    environ.write({**dict.fromkeys(environ.snapshot()), **request["environment"]})
    # Like a new process; `random` reseeds itself after a fork. Torch draws the first seed of no device but the CPU.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()
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
    """Load an echelon file by its path, because a rank's program must not find echelon already imported."""
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
