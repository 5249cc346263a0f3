"""Ends a failed block of coalesced collectives, after which torch would silently skip all later collectives of the group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from echelon.base.errors import SetupError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn_here


class _CoalescingUnsupported(UsageError, RuntimeError):
    """torch raises a RuntimeError here, which programs may catch to run the collectives one by one."""


def guard_coalescing() -> None:
    """Make a failed block of coalesced collectives end properly. Calling it again has no effect.

    torch (2.7 to 2.13) collects collectives inside ``_coalescing_manager`` in ``pg_coalesce_state`` and runs them when the block ends. If
    the block fails, which it always does with a device on gloo ("Backend gloo does not implement startCoalescing"), the entry remains:
    from then on all_reduce, all_gather_into_tensor and reduce_scatter_tensor of this group only append to it and return. A program
    that catches the exception would go on with unreduced gradients.

    Raises:
        SetupError: a block has already failed, so that collectives have been skipped.
    """
    _require_no_skipped_collectives()
    cell = _original()
    if not isinstance(cell.cell_contents, _Guarded):
        cell.cell_contents = _Guarded(cell.cell_contents)


def stop_guarding_coalescing() -> None:
    """Undo ``guard_coalescing``."""
    cell = _original()
    if isinstance(cell.cell_contents, _Guarded):
        cell.cell_contents = cell.cell_contents.original


class _Guarded:
    """The generator function behind ``_coalescing_manager``."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or dist.group.WORLD
        state = distributed_c10d._world.pg_coalesce_state
        if group in state:  # a block inside another one, which ends it
            yield from self.original(group, device, async_ops)
            return
        try:
            yield from self.original(group, device, async_ops)
        except BaseException as error:
            skipped = state.pop(group, [])
            if "startCoalescing" in str(error):
                raise _unsupported(group, device) from error
            if skipped:
                warn_here(
                    _(
                        "{num_skipped} coalesced collectives did not run, because their block ended with {name} at "
                        "{line}. The tensors are unchanged on this rank.",
                        num_skipped=len(skipped),
                        name=type(error).__name__,
                        line=user_line(),
                    )
                )
            raise


def _unsupported(group: Any, device: Any) -> _CoalescingUnsupported:
    backend = dist.get_backend(group)
    warn_here(
        _(
            "{backend} cannot coalesce collectives, so those in the block at {line} did not run on this rank. If "
            "the program catches this error, it must run them without _coalescing_manager.",
            backend=backend,
            line=user_line(),
        )
    )
    return _CoalescingUnsupported(
        f"the process group's backend, {backend}, cannot coalesce collectives (torch: Backend {backend} does not implement "
        "startCoalescing); none of the block's collectives ran",
        where=f"_coalescing_manager(device={str(device)!r}) at {user_line()}",
        do="run the collectives one by one without _coalescing_manager, or omit device= if they are all all_reduce, all "
        "all_gather_into_tensor or all reduce_scatter_tensor",
    )


def _original() -> Any:
    """Return the cell that holds the generator function, so that modules which imported the context manager by name are covered, too."""
    helper: Any = distributed_c10d._coalescing_manager
    names = helper.__code__.co_freevars
    assert names == ("func",), names  # as contextlib.contextmanager makes it
    return helper.__closure__[0]


def _require_no_skipped_collectives() -> None:
    state = distributed_c10d._world.pg_coalesce_state
    skipped = sum(map(len, state.values()))
    is_stale = bool(state)
    state.clear()
    if skipped:
        raise SetupError(
            f"torch has skipped {skipped} collectives since a block of coalesced collectives failed and the exception was caught, so "
            "tensors differ between ranks",
            where="torch.distributed.distributed_c10d._coalescing_manager",
            do="do not use _coalescing_manager on this backend (gloo does not implement it), or do not catch its exception",
        )
    if is_stale:
        warn_here(
            _(
                "a block of coalesced collectives failed before; torch would have skipped all later collectives of "
                "its group."
            )
        )
