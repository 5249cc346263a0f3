"""The mistake of training on several ranks with a loader that was never prepared: every rank reads everything."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from echelon.base.errors import UsageError
from echelon.base.warnings import UserLine, user_line
from echelon.data.loader import PreparedLoader
from echelon.distributed.own_cut import find_own_cut
from echelon.distributed.shard import ShardedLoader

__all__ = ["refuse_unprepared_loader"]


def refuse_unprepared_loader(*, num_processes: int, unsharded: list[Any]) -> None:
    """Look at the variables of the user's frames for a DataLoader that gives every rank the same data.

    Called at the first backward pass that happens outside every prepared loader's loop.

    Raises:
        UsageError: there is one; its name and the user's line are given.
    """
    place = user_line()
    frame: Any = sys._getframe(1)
    while frame is not None:
        in_script = frame.f_code.co_filename == place[0]
        if in_script:
            for name, value in _variables(frame).items():
                if _gives_all_ranks_the_same(value) and not any(value is allowed for allowed in unsharded):
                    raise _error(name, place, num_processes)
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return what the code of ``frame`` can name."""
    of_frame = frame.f_locals
    variables = {**frame.f_globals, **of_frame}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        of_frame.clear()  # a copy that stays with the frame: it would keep a model after the user's del
    return variables


def _gives_all_ranks_the_same(value: Any) -> bool:
    if not isinstance(value, DataLoader) or isinstance(value, (PreparedLoader, ShardedLoader)):
        return False
    cut = find_own_cut(value)
    return cut is None or cut.num_parts == 1


def _error(name: str, place: UserLine, num_processes: int) -> UsageError:
    return UsageError(
        f"backward() runs on {num_processes} processes outside of every prepared loader, and {name!r} is a DataLoader that "
        "was not prepared: every process would train on the same samples",
        where=str(place),
        do=f"{name} = accelerator.prepare({name}), or accelerator.allow_unsharded({name}) if every process shall read all of it",
    )
