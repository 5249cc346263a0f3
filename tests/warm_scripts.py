"""Runs recorded scripts on ranks forked from a process that has imported torch: a run takes a second instead of ten.

Stands in for ``echelon launch`` in tests of ``echelon verify`` with many runs. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.fork_server import ForkServer, serve  # noqa: E402 - this module is also a program


class WarmRunner:
    """Records runs (``RunRequest``) as ``LayoutRunner`` does."""

    def __init__(self, server: ForkServer, *, variables: Mapping[str, str], timeout_s: float) -> None:
        self._server, self._variables, self._timeout_s = server, dict(variables), timeout_s
        self.seconds = 0.0
        """Sum of the time of all runs."""

    def record(self, request: Any) -> Any:
        """Run the script, and return a ``LayoutRun``."""
        from echelon.verify.command.run_layouts import LayoutRun, RunFailure
        from echelon.verify.trace import RUN_FILE

        request.folder.mkdir(parents=True, exist_ok=True)
        arguments = [one.replace("{layout}", request.layout.slug) for one in request.arguments]
        (request.folder / RUN_FILE).write_text(json.dumps(asdict(request.run)))
        variables = dict(self._variables)
        if request.layout.engine is not None:
            variables["ECHELON_ENGINE"] = request.layout.engine
        output = request.folder / "output.txt"
        began, num_ranks, port = time.monotonic(), request.layout.num_processes, _free_port()
        output.write_text("")
        codes = self._server.run(
            [{**_place(rank, num_ranks, port=port), **variables} for rank in range(num_ranks)],
            outputs=[str(output)] * num_ranks,
            folder=str(_empty(request.folder / "files")),
            timeout_s=self._timeout_s,
            argv=[str(request.folder), request.script, *arguments],
        )
        seconds = time.monotonic() - began
        self.seconds += seconds
        failure, count = None, _num_updates(request)
        if any(codes):
            text = output.read_text(errors="replace")[-2500:]
            failure = RunFailure(what=f"exit codes {codes}", details=tuple(text.splitlines()), output=str(output))
        elif not count:
            failure = RunFailure(what="the script ended without an optimizer step")
        return LayoutRun(request=request, num_updates=count, seconds=seconds, failure=failure)


@contextmanager
def warm_runner(
    *modules: str, variables: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> Iterator[WarmRunner]:
    """Start the process that forks, with ``modules`` imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1", "PYTHONHASHSEED": "0"}
    with closing(ForkServer([sys.executable, str(Path(__file__)), *modules], env=environment)) as server:
        yield WarmRunner(server, variables=variables or {}, timeout_s=timeout_s)


def _empty(folder: Path) -> Path:
    """Return a new folder, in which scripts with relative paths write."""
    folder.mkdir(exist_ok=True)
    return folder


def _num_updates(request: Any) -> int:
    found = set()
    for path in request.folder.glob("rank_0.trace.jsonl"):
        for line in path.read_text().splitlines():
            if line.startswith('{"kind":"optimizer_step"'):
                found.add(json.loads(line)["update"])
    return len(found)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def _place(rank: int, num_ranks: int, *, port: int) -> dict[str, str]:
    size = str(num_ranks)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}


def _run(job: dict[str, Any]) -> None:
    from echelon.ecosystem import swap
    from echelon.verify import child

    if libraries := os.environ.get("ECHELON_AS"):
        swap.install_for_rank(libraries)
    child.main(job["argv"])


def _main(modules: Sequence[str]) -> None:
    for name in ("echelon.verify.child", *modules):
        importlib.import_module(name)
    serve(_run)


if __name__ == "__main__":
    _main(sys.argv[1:])
