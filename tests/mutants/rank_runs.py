"""Runs a training script in the warm workers of ``run_on_ranks``, as ``python script.py`` would run it on each rank."""

from __future__ import annotations

import io
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.mutants import library_faults
from tests.mutants.probe import watching

States = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script with its arguments, and what surrounds it; it is pickled to the ranks."""

    path: Path
    arguments: tuple[str, ...] = ()
    engine: str | None = None
    """As from ``echelon launch --engine``."""
    fault: str = ""
    """Name of a context manager in ``library_faults``; empty: none."""


def run_program(program: Program) -> None:
    """Run ``program`` in this process as ``__main__``, and leave the process as it was. Collective."""
    with ExitStack() as stack:
        stack.enter_context(_surroundings(program))
        if program.fault:
            stack.enter_context(getattr(library_faults, program.fault)())
        runpy.run_path(str(program.path), run_name="__main__")


def watch_program(program: Program) -> States:
    """Run ``program`` and return what it shows with ``probe``. Collective."""
    with watching() as states:
        run_program(program)
    return states


@contextmanager
def _surroundings(program: Program) -> Iterator[None]:
    from echelon.state import AcceleratorState, GradientState, PartialState
    from echelon.world.group import close_group

    arguments, path, environ = list(sys.argv), list(sys.path), dict(os.environ)
    sys.argv = [str(program.path), *program.arguments]
    sys.path.insert(0, str(program.path.parent))
    if program.engine is not None:
        os.environ["ECHELON_ENGINE"] = program.engine
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        os.environ.clear()
        os.environ.update(environ)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()
        if dist.is_initialized():
            close_group()
