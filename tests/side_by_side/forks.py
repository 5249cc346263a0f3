"""Runs scripts on several ranks as forks: a program for the peers' Python, ``python forks.py PACKAGE``."""

from __future__ import annotations

import atexit
import gc
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fork_server import serve

del sys.path[0]


def main(package: str) -> None:
    for name in ("", ".utils", ".tracking", ".logging"):
        importlib.import_module(package + name)
    # Modules that the first optimizer, the first step and the trackers would import in every fork.
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"):
        importlib.import_module(name)
    assert importlib.import_module(package).Accelerator  # echelon imports it on first use
    gc.freeze()  # makes garbage collection in the forks take milliseconds
    serve(_run_script)


def _run_script(job: dict[str, Any]) -> None:
    sys.path[:0] = job["sys_path"]
    sys.argv = [job["script"]]
    runpy.run_path(job["script"], run_name="__main__")
    atexit._run_exitfuncs()


if __name__ == "__main__":
    main(sys.argv[1])
