"""Releases unused device memory, and finds the largest batch size that fits on all ranks."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.stores import store_of

_Outcome = Literal["done", "ran out", "failed"]

# Messages of torch's allocators, in addition to torch.OutOfMemoryError. Case is ignored.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cudnn_status_not_supported",
    "memory allocation failed",
    "not enough memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release torch's cached memory to the device; optionally collect garbage first."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release the memory of ``objects``; assign the result to the variables that still reference them.

    Returns:
        One None per object: ``model, batch = release_memory(model, batch)``.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether ``exception`` reports that a device or the host ran out of memory."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    text = str(exception.args[0]).lower()
    return any(words in text for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate ``function(batch_size, ...)`` so that it is called again with a smaller batch if memory runs out.

    The ranks decide together: if one runs out of memory, all of them try the smaller size, even if their attempt
    succeeded. They agree through the process group's store after each attempt. If a rank is inside a collective when
    another rank runs out of memory, the group's timeout releases it.

    Args:
        function: takes the batch size as its first argument, which the caller omits. Build the model and loaders inside
            it.
        starting_batch_size: batch size of the first attempt.
        reduce_batch_size_fn: returns the next batch size. None: 0.9 times the last one, rounded down.

    Collective: call the decorated function on every rank.

    Raises:
        UsageError: the caller passed a batch size.
        RuntimeError: even a batch size of one does not fit.

    Examples:
        >>> @find_executable_batch_size(starting_batch_size=256)
        ... def train(batch_size):
        ...     print(f"training with {batch_size}")
        >>> train()
        training with 256
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    run = function
    batch_size = starting_batch_size

    @functools.wraps(run)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size  # as in Accelerate, a second call starts with the size that fit
        _refuse_own_batch_size(run, args)
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            outcome, result = _attempt(run, batch_size, args, kwargs)
            if not _any_ran_out(outcome):
                return result
            del result
            before = batch_size
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else int(reduce_batch_size_fn())
            warn(
                _(
                    "out of memory with a batch size of {before}; the next attempt uses {batch_size}",
                    before=before,
                    batch_size=batch_size,
                )
            )
        raise _NoBatchFitsError(
            _("no executable batch size found: even the smallest batch does not fit in memory"),
            do=_("use a smaller model, a shorter sequence length, or a device with more memory"),
        )

    return with_batch_size


class _NoBatchFitsError(UsageError, RuntimeError):
    """Raised if no batch size fits. Derives from RuntimeError, because scripts written for Accelerate catch that type."""


class _ArgumentError(UsageError, TypeError):
    """Raised if the caller passes a batch size. Derives from TypeError, because scripts for Accelerate catch that type."""


def _refuse_own_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < len(args) + 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(places[1:], args[1:]))
        raise _ArgumentError(
            f"{function.__name__} receives its batch size from find_executable_batch_size, but the caller passed one",
            do=f"call {function.__name__}({shown})",
        )


def _attempt(
    function: Callable[..., Any], batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Outcome, Any]:
    """Return the outcome and the result. The exception is dropped, because its traceback would keep tensors alive."""
    try:
        return "done", function(batch_size, *args, **kwargs)
    except Exception as error:
        if not should_reduce_batch_size(error):
            _vote("failed")
            raise
    return "ran out", None


def _any_ran_out(outcome: _Outcome) -> bool:
    """Return whether any rank ran out of memory, using only the store, which unfinished collectives do not block."""
    votes = _vote(outcome, wait=True)
    failed = [rank for rank, vote in enumerate(votes) if vote == "failed"]
    if failed:
        raise DesyncError(
            f"rank {failed[0]} failed in find_executable_batch_size, but not because it ran out of memory",
            do=f"fix the error that rank {failed[0]} raised",
        )
    return "ran out" in votes


def _vote(outcome: _Outcome, *, wait: bool = False) -> list[str]:
    """Write this rank's outcome to the group's store; with ``wait``, return the outcomes of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [outcome]
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("echelon/batch_size", store_of(group))
    turn = store.add(f"turn/{dist.get_rank()}", 1)
    votes = [f"{turn}/{rank}" for rank in range(dist.get_world_size())]
    store.set(votes[dist.get_rank()], outcome)
    if not wait:
        return []
    store.wait(votes)
    return [store.get(vote).decode() for vote in votes]
