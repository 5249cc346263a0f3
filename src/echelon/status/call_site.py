"""Where a thread of a rank is: the user's line that it is in, and whether it is in a call that talks to other ranks."""

from __future__ import annotations

import json
import linecache
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

__all__ = ["CallSite", "Sight", "here", "is_users", "place_of_thread", "sight_of"]

_NOT_THE_USERS = (str(Path(__file__).resolve().parent.parent), str(Path(json.__file__).parent.parent), "<frozen")
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Autograd calls the others, from native code in part.
_COMMUNICATING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
_TORCH = "/torch/"
_MODULE_CALL = "/torch/nn/modules/module.py"
_TRAINING = ("/torch/nn/parallel/", "/torch/autograd/")
_IMPORT = "<frozen importlib._bootstrap>"
# Not in the stack of a program that runs what was compiled.
_COMPILING = (
    *("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/torch/_inductor/async_compile.py"),
    *("/torch/utils/cpp_extension.py", "/triton/compiler/"),
)
# In a compiler autograd traces, and waits for nobody; but compilers of several ranks may agree on something.
_AGREEING = "/torch/distributed/distributed_c10d.py"
# Python's own, on which others build (ipdb). It is in the stack while it asks, not while the program runs on.
_DEBUGGER = str(Path(json.__file__).parent.parent / "pdb.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A line of the user's program."""

    file: str
    line: int
    source: str = ""
    """The text of the line; empty where it cannot be read."""
    communicates: bool = False
    """Whether the thread is inside a call of torch that may wait for other ranks."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.source}" if self.source else "")

    def to_json(self) -> str:
        """Return what ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> CallSite:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What the stack of a thread says without a look at any source: cheap enough for twice a second."""

    file: str
    line: int
    signature: int
    """Equal while the thread is in the same calls, at the same places of them."""
    communicates: bool
    trains: bool
    """It communicates in a backward pass, or in the forward pass of a wrapped model."""
    compiles: bool
    imports: bool
    """The machinery of imports runs, or the top level of an installed module."""
    debugs: bool
    """A debugger has stopped it."""
    is_elsewhere: bool
    """The innermost code is neither Python's, nor torch's, nor echelon's: a wait that is in the stack is interrupted (a signal
    handler, a hook)."""


def here() -> CallSite:
    """Return where the caller is."""
    return _place_of(sys._getframe(1))


def place_of_thread(ident: int) -> CallSite | None:
    """Return where the thread ``ident`` of this process is; None: it has ended.

    It costs that thread nothing: it need not have noted anything.
    """
    frame = sys._current_frames().get(ident)
    return None if frame is None else _place_of(frame)


def sight_of(innermost: FrameType) -> Sight:
    """Return what the stack that ends in ``innermost`` says."""
    place = _place_of(innermost)
    stack: list[int] = []
    trains = compiles = imports = debugs = agrees = False
    innermost_name = ""
    is_inside = True  # as in _place_of: a training that is itself run by an import is no import
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        trains = trains or any(part in name for part in _TRAINING)
        agrees = agrees or (_AGREEING in name and not compiles)
        compiles = compiles or any(part in name for part in _COMPILING)
        is_inside = is_inside and not is_users(name)
        imports = imports or (is_inside and name == _IMPORT)
        debugs = debugs or name == _DEBUGGER
        if not innermost_name and not _is_standard(name):
            innermost_name = name
        stack += (id(frame), frame.f_lasti)
        frame = frame.f_back
    compiles = compiles and not agrees
    communicates = place.communicates and not compiles
    return Sight(
        file=place.file,
        line=place.line,
        signature=hash(tuple(stack)) & 0xFFFFFFFFFFFFFFFF,
        communicates=communicates,
        trains=trains and communicates,
        compiles=compiles,
        imports=imports and not communicates,
        debugs=debugs,
        is_elsewhere=_TORCH not in innermost_name and not innermost_name.startswith(_NOT_THE_USERS[0]),
    )


def _place_of(innermost: FrameType) -> CallSite:
    """Return the innermost line that is the user's own; of a forward pass, that which called the model."""
    found: FrameType | None = None
    last = innermost
    is_inside, communicates, imports = True, False, False  # still deeper than all that the user wrote
    waits_in_torch: bool | None = None
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            found, is_inside = found or frame, False
        else:
            # What hangs in something that torch has called (a hook, a signal handler) waits for no other rank.
            if waits_in_torch is None and not _is_standard(name):
                waits_in_torch = _TORCH in name
            is_there = is_inside and waits_in_torch is True
            communicates = communicates or (is_there and any(part in name for part in _COMMUNICATING))
            imports = imports or (is_inside and name == _IMPORT)
            if name.endswith(_MODULE_CALL):  # what was found is a line of the model
                found = None
        last, frame = frame, frame.f_back
    found = found or last
    name = found.f_code.co_filename
    source = linecache.getline(name, found.f_lineno).strip()
    return CallSite(file=name, line=found.f_lineno, source=source, communicates=communicates and not imports)


@lru_cache(maxsize=4096)
def _is_standard(name: str) -> bool:
    """Tell whether a file is Python's own."""
    return name.startswith(_NOT_THE_USERS[1:]) and not any(part in name for part in _INSTALLED)


@lru_cache(maxsize=4096)  # for the walk up a stack, of which each line is in one of a few files
def is_users(name: str) -> bool:
    """Tell whether a file is the user's own: not echelon's, not installed, not Python's."""
    return not name.startswith(_NOT_THE_USERS) and not any(part in name for part in _INSTALLED)
