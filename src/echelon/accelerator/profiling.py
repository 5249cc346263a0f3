"""Runs torch's profiler, with one trace file per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from echelon.accelerator.plugins.kwargs_handlers import ProfileKwargs
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed import control

__all__ = ["PROFILE_PATTERN_NAME", "ProfileKwargs", "profile"]

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


@contextmanager
def profile(handler: ProfileKwargs, *, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; with ``output_trace_dir``, write its trace as ``profile_<rank>.json`` and wait for all ranks.

    With a schedule, the trace covers the last active period. torch writes each trace only once: if ``on_trace_ready``
    has already exported that period, this function warns instead of writing a file.

    Collective: with ``output_trace_dir``.
    """
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is None:
        return
    path = Path(handler.output_trace_dir, PROFILE_PATTERN_NAME.format(suffix=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    _export(profiler, path)
    control.barrier()


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    if profiler.profiler is None:
        warn(
            _(
                "{path} was not written, because the profiler's schedule never became active. Call step() more often",
                path=path,
            )
        )
        return
    try:
        profiler.export_chrome_trace(str(path))
    except RuntimeError as error:  # torch writes a trace only once
        if "already saved" not in str(error):
            raise
        warn(
            _(
                "{path} was not written, because on_trace_ready has already exported the trace. Remove one of the "
                "two exports",
                path=path,
            )
        )
