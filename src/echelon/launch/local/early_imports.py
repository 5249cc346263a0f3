"""Decides what the warm server imports while the launcher starts, so that the first ranks are forked instead of each importing torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from echelon.launch.script import Script

__all__ = ["early_imports"]

_LIBRARIES = rb"torch|torchvision|echelon|accelerate|transformers|lightning"
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(?:" + _LIBRARIES + rb")\b", re.MULTILINE)
_CHANGES_ENVIRONMENT = re.compile(rb"environ|putenv")
_ECHELON = re.compile(rb"^[ \t]*(?:import|from)[ \t]+echelon\b", re.MULTILINE)
_MAX_BYTES = 1 << 20


def early_imports(script: Script, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the ranks of ``script`` import anyway; () if each rank must start as a new program.

    A forked rank has imported torch before its first line runs. That makes no difference unless the script sets variables that
    torch reads when it is imported, so a script that mentions the environment before its first import of torch is started anew. So
    is one that may use several threads in NumPy, whose threads a fork does not copy.

    Args:
        script: the program that each rank runs.
        environment: the ranks' environment.
    """
    threads = environment.get("OPENBLAS_NUM_THREADS") or environment.get("OMP_NUM_THREADS")
    if sys.platform != "linux" or script.kind != "script" or threads != "1":
        return ()
    path = Path(script.target)
    try:
        if path.stat().st_size > _MAX_BYTES:
            return ()
        text = path.read_bytes()
    except OSError:
        return ()  # a rank shows the error
    first = _IMPORT.search(text)
    if first is None or _CHANGES_ENVIRONMENT.search(text, 0, first.start()):
        return ()
    modules = ["torch", "torch.distributed"]
    if b"optim" in text or b"Trainer" in text:
        modules.append("torch._dynamo")  # the first optimizer imports it, which takes as long as importing torch
    if _ECHELON.search(text):
        modules.append("echelon.accelerator.accelerator")
        if b"Trainer" in text:
            modules.append("echelon.trainer")
    return tuple(modules)
