"""Excludes echelon's own work from ``torch.compile``, in programs that compile a training step or loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")

_frames: Any = eval_frame
_CAN_SKIP = hasattr(_frames, "set_code_exec_strategy")  # not in every supported torch


def uncompiled(function: F) -> F:
    """Exclude ``function`` and everything that it calls from ``torch.compile``; a call in a compiled function is a graph break.

    Tracing such functions would compile counters and clocks into a graph, or fail: they read process groups, stacks and threads. Unlike
    ``torch.compiler.disable``, this adds no frame to a call and does not import ``torch._dynamo``, which takes a second.
    """
    marked: Any = function
    if not _CAN_SKIP:
        disabled: Any = torch._disable_dynamo(marked)
        return disabled  # type: ignore[no-any-return]
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "echelon's bookkeeping is not compiled; compile only the model with fullgraph=True"
    )
    skip = _frames._FrameAction.SKIP
    while marked is not None:
        # Programs share the wrappers of contextmanager and no_grad, which must remain compilable.
        if not f"{marked.__globals__['__name__']}.".startswith(("contextlib.", "torch.")):
            _frames.set_code_exec_strategy(marked.__code__, _frames._FrameExecStrategy(skip, skip))
        marked = getattr(marked, "__wrapped__", None)
    return function


def uncompiled_generator(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Exclude a generator function, as ``uncompiled`` does; torch ignores that mark when it traces a loop over a generator."""

    @wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return function(*args, **kwargs)

    return uncompiled(start)


def uncompiled_methods(*, but: Collection[str] = ()) -> Callable[[C], C]:
    """Return a class decorator that excludes all public methods from ``torch.compile``, except those named in ``but``."""

    def mark(owner: C) -> C:
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if name.startswith("_") or name in but or not inspect.isfunction(function):
                continue
            marked = uncompiled_generator(function) if inspect.isgeneratorfunction(function) else uncompiled(function)
            if marked is not function:
                setattr(owner, name, staticmethod(marked) if isinstance(value, staticmethod) else marked)
        return owner

    return mark
