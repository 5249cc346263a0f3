"""A thread's call site: its line of user code, and whether it is in a call that may wait for other ranks."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

_OWN_PATHS = (str(Path(__file__).resolve().parent.parent), str(Path(json.__file__).parent.parent), "<frozen")
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Autograd also calls communicating code, partly from native code.
_COMMUNICATING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
_TORCH = "/torch/"
_MODULE_CALL = "/torch/nn/modules/module.py"
_TRAINING = ("/torch/nn/parallel/", "/torch/autograd/")
_IMPORT = "<frozen importlib._bootstrap>"
# In the stack only while code is being compiled, not while compiled code runs.
_COMPILING = (
    *("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/torch/_inductor/async_compile.py"),
    *("/torch/utils/cpp_extension.py", "/triton/compiler/"),
)
# Inside a compiler, autograd only traces, but the compilers of several ranks may communicate.
_AGREEMENT = "/torch/distributed/distributed_c10d.py"
# Python's debugger, on which others such as ipdb are built. It is in the stack while it waits for input.
_DEBUGGER = str(Path(json.__file__).parent.parent / "pdb.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A line in the user's program."""

    file: str
    line: int
    source: str = ""
    """The line's text; empty if it cannot be read."""
    communicates: bool = False
    """Whether the thread is in a torch call that may wait for other ranks."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSummary:
    """Summary of a thread's stack. It does not require reading source files, so it can be created twice a second."""

    file: str
    line: int
    signature: int
    """Hash that stays the same while the thread is at the same instruction in the same calls."""
    communicates: bool
    trains: bool
    """Whether the thread is communicating in a backward pass or in a wrapped model's forward pass."""
    compiles: bool
    imports: bool
    """Whether the thread is in Python's import system, or at the top level of an installed module."""
    debugs: bool
    """Whether a debugger has stopped the thread."""
    is_elsewhere: bool
    """Whether the innermost code is not part of Python, torch or echelon, for example a hook that runs during a wait."""


def current_call_site() -> CallSite:
    """Return the call site of the caller."""
    return _call_site_of(sys._getframe(1))


def call_site_of_thread(ident: int) -> CallSite | None:
    """Return the call site of thread ``ident``, or None if the thread has ended. This does not slow the thread down."""
    frame = sys._current_frames().get(ident)
    return None if frame is None else _call_site_of(frame)


def summarize_stack(innermost: FrameType) -> StackSummary:
    """Summarize the stack whose innermost frame is ``innermost``."""
    call_site = _call_site_of(innermost)
    stack: list[int] = []
    trains = compiles = imports = debugs = agrees = False
    innermost_name = ""
    is_inside = True  # still deeper than any user code; training code that an import runs is not an import
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        trains = trains or any(part in name for part in _TRAINING)
        agrees = agrees or (_AGREEMENT in name and not compiles)
        # The import of a compiler's module runs code of the same file.
        compiles = compiles or (frame.f_code.co_name != "<module>" and any(part in name for part in _COMPILING))
        is_inside = is_inside and not is_user_file(name)
        imports = imports or (is_inside and name == _IMPORT)
        debugs = debugs or name == _DEBUGGER
        if not innermost_name and not _is_standard(name):
            innermost_name = name
        stack += (id(frame), frame.f_lasti)
        frame = frame.f_back
    compiles = compiles and not agrees
    communicates = call_site.communicates and not compiles
    return StackSummary(
        file=call_site.file,
        line=call_site.line,
        signature=hash(tuple(stack)) & 0xFFFFFFFFFFFFFFFF,
        communicates=communicates,
        trains=trains and communicates,
        compiles=compiles,
        imports=imports and not communicates,
        debugs=debugs,
        is_elsewhere=_TORCH not in innermost_name and not innermost_name.startswith(_OWN_PATHS[0]),
    )


def _call_site_of(innermost: FrameType) -> CallSite:
    """Return the innermost line of user code or, during a forward pass, the line that called the model."""
    found: FrameType | None = None
    last = innermost
    is_inside, communicates, imports = True, False, False  # still deeper than any user code
    waits_in_torch: bool | None = None
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            found, is_inside = found or frame, False
        else:
            # Code that torch calls (a hook, a signal handler) does not wait for another rank.
            if waits_in_torch is None and not _is_standard(name):
                waits_in_torch = _TORCH in name
            is_in_torch = is_inside and waits_in_torch is True
            communicates = communicates or (is_in_torch and any(part in name for part in _COMMUNICATING))
            imports = imports or (is_inside and name == _IMPORT)
            if name.endswith(_MODULE_CALL):  # the line found so far is inside the model
                found = None
        last, frame = frame, frame.f_back
    found = found or last
    name = found.f_code.co_filename
    source = linecache.getline(name, found.f_lineno).strip()
    return CallSite(file=name, line=found.f_lineno, source=source, communicates=communicates and not imports)


def user_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of user code in a stack that torch's flight recorder has recorded, or an empty string."""
    for frame in frames:
        name, line = frame["filename"], frame["line"]
        if is_user_file(name):
            return str(CallSite(file=name, line=line, source=linecache.getline(name, line).strip()))
    return ""


@lru_cache(maxsize=4096)
def _is_standard(name: str) -> bool:
    """Return whether a file is part of Python's standard library."""
    return name.startswith(_OWN_PATHS[1:]) and not any(part in name for part in _INSTALLED)


@lru_cache(maxsize=4096)  # few different files appear in stacks
def is_user_file(name: str) -> bool:
    """Return whether a file is user code, that is, not part of echelon, an installed package or Python."""
    return not name.startswith(_OWN_PATHS) and not any(part in name for part in _INSTALLED)
