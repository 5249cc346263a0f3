"""Collectives with Accelerate's signatures, exported by ``echelon.utils.operations``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError
from echelon.base.messages.translation import gettext as _
from echelon.config.sources import is_debug
from echelon.distributed import collectives
from echelon.distributed.alone import is_alone
from echelon.distributed.structure import recursively_apply
from echelon.distributed.tree import describe, leaves, map_tensors

P = ParamSpec("P")
T = TypeVar("T")

# Alias for scripts written for Accelerate. On gloo every collective checks structures, not only in debug mode.
DistributedOperationException = DesyncError


class CannotPadNestedTensorWarning(UserWarning):
    """Warning that a nested tensor was not padded."""


def gather(tensor: Any) -> Any:
    """Concatenate each tensor in nested data across ranks; with one process, return ``tensor`` itself.

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: a leaf is not a tensor (also a TypeError).
    """
    if is_alone():
        return tensor
    _refuse_objects("gather", tensor)
    return collectives.gather(tensor)


def gather_object(object: Any) -> Any:
    """Concatenate the lists from all ranks; with one process, return ``object`` itself.

    Objects other than lists and tuples are collected in a list. Objects are pickled.

    Collective: call on every rank.

    Raises:
        DesyncError: some ranks pass a list and others do not.
    """
    return object if is_alone() else collectives.gather_object(object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite the tensors in nested data in place with those from rank ``from_process``, and return the data.

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: a leaf is not a tensor (also a TypeError).
    """
    if is_alone():
        return tensor
    _refuse_objects("broadcast", tensor)
    received = leaves(collectives.broadcast(tensor, from_process))
    with torch.no_grad():
        for each in leaves(tensor):
            each.copy_(next(received))
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the list's items in place with those from rank ``from_process``, and return the list.

    Collective: call on every rank, with lists of equal length. Objects are pickled.

    Raises:
        DesyncError: the lists differ in length.
    """
    return object_list if is_alone() else collectives.broadcast_object_list(object_list, from_process)


def reduce(tensor: Any, reduction: Literal["mean", "sum", "max", "none"] = "mean", scale: float = 1.0) -> Any:
    """Reduce each tensor in nested data across ranks (mean, sum or maximum) and multiply it by ``scale``.

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: the reduction is unknown, or a leaf is not a tensor (then also a TypeError).
    """
    _refuse_objects("reduce", tensor)
    return collectives.reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad each tensor along ``dim`` to the largest size on any rank; nested tensors are skipped with a warning.

    Collective: call on every rank.

    Raises:
        DesyncError: structures, dtypes or numbers of dimensions differ between ranks.
        UsageError: a leaf is not a tensor (also a TypeError).
    """
    _refuse_objects("pad_across_processes", tensor)
    if not any(each.is_nested for each in leaves(tensor)):
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)
    warnings.warn(
        _("nested tensors are not padded, because they have no single size per dimension"),
        CannotPadNestedTensorWarning,
        stacklevel=2,
    )
    plain = map_tensors(lambda each: torch.zeros(()) if each.is_nested else each, tensor)  # 0-d: never padded
    padded = leaves(collectives.pad_across_processes(plain, dim, pad_index, pad_first))

    def choose(each: torch.Tensor) -> Any:
        other = next(padded)
        return each if each.is_nested else other

    return map_tensors(choose, tensor)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy one rank's tensor to every rank; the other ranks pass None.

    Collective: call on every rank.

    Raises:
        DesyncError: no rank or more than one rank passes a tensor.
    """
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    offers: list[Any] = [mine] if is_alone() else collectives.gather_object([mine])
    owners = [rank for rank, offer in enumerate(offers) if offer is not None]
    if len(owners) != 1:
        raise DesyncError(
            f"copy_tensor_to_devices: expected exactly one rank to pass a tensor, but {len(owners)} did (ranks {owners})",
            do="pass a tensor on one rank and None on all others",
        )
    shape, dtype = offers[owners[0]]
    local = torch.zeros(shape, dtype=dtype, device=_device()) if tensor is None else tensor
    copied: torch.Tensor = local.clone() if is_alone() else collectives.broadcast(local, owners[0])
    return copied


def verify_operation(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a collective so that, in debug mode, it first checks that all ranks pass the same structure.

    Raises:
        DesyncError: raised by the decorated function if the structures differ (alias ``DistributedOperationException``).
    """

    @functools.wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_alone() and is_debug():
            data = kwargs["tensor"] if "tensor" in kwargs else args[0]
            collectives.check_same(f"{function.__module__}.{function.__name__}", describe(data), group=None)
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls collectives so that their errors contain its name.

    Raises:
        DesyncError: raised by the decorated function if the ranks disagree (alias ``DistributedOperationException``).
    """

    @functools.wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except DesyncError as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DesyncError(f"in {name}: {error.what}", do=error.do) from error

    return chained


def _device() -> torch.device:
    """Return the device for this rank's tensors, which is the accelerator if the backend supports it."""
    if is_alone() or dist.get_backend() == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _refuse_objects(operation: str, data: Any) -> None:
    def accept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    accept.__name__ = operation
    recursively_apply(accept, data, error_on_other_type=True)
