"""Decides what the warm server imports while the launcher starts, so that the first ranks are forked instead of each importing torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from echelon.launch.script import Script

__all__ = ["early_imports"]

_LIBRARIES = rb"torch|torchvision|echelon|accelerate|transformers|lightning"
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(?:" + _LIBRARIES + rb")\b", re.MULTILINE)
_CHANGES_ENVIRONMENT = re.compile(rb"environ|putenv|dotenv")
_ANY_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)
_ECHELON = re.compile(rb"^[ \t]*(?:import|from)[ \t]+echelon\b", re.MULTILINE)
_MAX_BYTES = 1 << 20
_MAX_FILES = 1000


def early_imports(script: Script, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the ranks of ``script`` import anyway; () if each rank must start as a new program.

    A forked rank has imported torch before its first line runs. That makes no difference unless the script sets variables that
    torch reads when it is imported, so a script that mentions the environment before its first import of torch, or imports a module
    beside it that does, is started anew. So is one that may use several threads in NumPy, whose threads a fork does not copy.

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
    if first is None or _may_change_environment(text[: first.start()], path.parent):
        return ()
    modules = ["torch", "torch.distributed"]
    if b"optim" in text or b"Trainer" in text:
        modules.append("torch._dynamo")  # the first optimizer imports it, which takes as long as importing torch
    if _ECHELON.search(text):
        modules.append("echelon.accelerator.accelerator")
        if b"Trainer" in text:
            modules.append("echelon.trainer")
    return tuple(modules)


def _may_change_environment(text: bytes, folder: Path) -> bool:
    """Return whether ``text``, or a module in ``folder`` that it imports directly or through others, mentions the environment."""
    texts, seen = [text], set[Path]()
    while texts:
        text = texts.pop()
        if _CHANGES_ENVIRONMENT.search(text):
            return True
        # "import a, b.c as d" and "from a.b import": the words include "as", which names no file
        names = {word.decode() for listed in _ANY_IMPORT.findall(text) for word in re.findall(rb"\w+", listed)}
        paths = [path for name in names for path in _files_of(folder / name)]
        if any(path is None for path in paths):
            return True
        for path in {path for path in paths if path is not None and path.is_file()} - seen:
            seen.add(path)
            if len(seen) > _MAX_FILES or path.stat().st_size > _MAX_BYTES:
                return True  # reading them would take longer than what is gained
            texts.append(path.read_bytes())
    return False


def _files_of(module: Path) -> Iterator[Path | None]:
    """Yield the source files of a module or package, then None if it is a folder with more files than can be looked through."""
    yield module.with_suffix(".py")
    num_files = 0
    for folder, _, files in os.walk(module):
        num_files += len(files)
        if num_files > _MAX_FILES:
            yield None
            return
        yield from (Path(folder, file) for file in files if file.endswith(".py"))
