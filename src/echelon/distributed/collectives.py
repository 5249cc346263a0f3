"""Collectives for nested data (tuples, lists, dicts and named tuples of tensors) on any backend and with any dtype."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.base.errors import DesyncError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.config.sources import is_debug
from echelon.distributed.alone import is_alone
from echelon.distributed.small_messages import backends_of, bytes_of, ranks_of, wire_device
from echelon.distributed.tree import describe, leaves, map_tensors
from echelon.distributed.uncompiled import uncompiled
from echelon.status.notes import communicating, notes_of_process

# Without a process group every function here behaves as on one rank, so that a script also runs under plain python.
# Data is sent as bytes, because gloo and nccl each lack some dtypes (bool, int16, float8, complex).

# torch 2.13 renamed this function and warns at each call of the old name.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@uncompiled
@communicating
def gather(data: Any, *, mesh: DeviceMesh | None = None) -> Any:
    """Concatenate each tensor in ``data`` across ranks along the first dimension.

    Args:
        data: nested data. Tensors may have any dtype and must have equal shapes on all ranks; 0-d tensors count as shape [1].
        mesh: 1-D device mesh (default: all ranks).

    Returns:
        The same structure on every rank, with detached tensors of shape [world_size * n, ...] in rank order.

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: a leaf is not a tensor.

    Examples:
        >>> predictions = gather(model(x).argmax(dim=-1))
    """
    group = _group(mesh)
    _refuse_objects("gather", data)
    if is_alone(group):
        return map_tensors(lambda tensor: tensor.detach().reshape(-1) if tensor.dim() == 0 else tensor.detach(), data)
    check_same("gather", describe(data), group=group)
    return map_tensors(lambda tensor: _gather_tensor(tensor, group), data)


@uncompiled
@communicating
def gather_object(data: Any, *, mesh: DeviceMesh | None = None) -> list[Any]:
    """Gather a picklable object from each rank; lists and tuples are concatenated in rank order.

    Collective: call on every rank. Objects are pickled and sent only between the ranks of this job.

    Raises:
        DesyncError: some ranks pass a list and others do not.

    Examples:
        >>> file_names = gather_object([f"part-{world.rank}.txt"])
    """
    group = _group(mesh)
    objects: list[Any] = [data]
    if not is_alone(group):
        objects = [None] * dist.get_world_size(group)
        dist.all_gather_object(objects, data, group=group)
    sequences = [isinstance(item, (list, tuple)) for item in objects]
    if all(sequences):
        return [item for items in objects for item in items]
    if any(sequences):
        kinds = ", ".join(f"rank {rank}: {type(item).__name__}" for rank, item in zip(ranks_of(group), objects))
        raise DesyncError(
            f"gather_object: some ranks pass a list and others do not ({kinds})", do="pass a list on every rank"
        )
    return objects


@uncompiled
@communicating
def reduce(
    data: Any,
    reduction: Literal["mean", "sum", "max", "none"] = "mean",
    scale: float = 1.0,
    *,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Reduce each tensor in ``data`` elementwise across ranks.

    Args:
        data: nested data. Each tensor must have the same shape and dtype on all ranks. bfloat16 and float16 are summed in
            float32, bool and integers in int64.
        reduction: ``sum``, ``mean``, ``max`` (not for complex numbers), or ``none`` (returns ``data``).
        scale: multiplies the result.
        mesh: 1-D device mesh (default: all ranks).

    Returns:
        The same structure with new tensors that are equal on every rank. Floating-point and complex tensors keep their dtype.
        For integers and bools, sums are int64, and means and scaled values have torch's default dtype.

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: the reduction is unknown, or a leaf is not a tensor.

    Examples:
        >>> num_samples = reduce(torch.tensor(len(x)), "sum")
    """
    group = _group(mesh)
    if reduction not in ("mean", "sum", "max", "none"):
        raise UsageError(
            _("reduction must be 'mean', 'sum', 'max' or 'none', but got {reduction!r}", reduction=reduction),
            do=_("pass one of these values"),
        )
    if reduction == "none":
        return data
    _refuse_objects("reduce", data)
    if not is_alone(group):
        check_same(f"reduce({reduction})", describe(data), group=group)
    divisor = dist.get_world_size(group) if reduction == "mean" and dist.is_initialized() else 1
    integers_stay = reduction != "mean" and scale == 1.0
    op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    return map_tensors(lambda tensor: _reduce_tensor(tensor, op, divisor, scale, integers_stay, group), data)


@uncompiled
def mean_over_ranks(data: Any, *, mesh: DeviceMesh | None = None) -> Any:
    """Average each tensor in ``data`` across ranks, like ``reduce(data, "mean")``.

    Collective: call on every rank, with equal shapes.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.

    Examples:
        >>> loss = mean_over_ranks(loss.detach())
        >>> if world.is_rank_zero:
        ...     print(f"loss {loss.item():.1f}")
        loss 0.5
    """
    return reduce(data, "mean", mesh=mesh)


@uncompiled
@communicating
def broadcast(data: Any, from_process: int = 0, *, mesh: DeviceMesh | None = None) -> Any:
    """Return the tensors of rank ``from_process`` on every rank, as new tensors on the local tensors' devices.

    Args:
        data: nested data with equal shapes and dtypes on all ranks.
        from_process: a global rank.
        mesh: 1-D device mesh (default: all ranks).

    Collective: call on every rank.

    Raises:
        DesyncError: shapes, dtypes or structures differ between ranks.
        UsageError: ``from_process`` is not in the mesh, or a leaf is not a tensor.

    Examples:
        >>> threshold = broadcast(torch.rand(1))  # the same number on every rank
    """
    group = _group(mesh)
    _refuse_objects("broadcast", data)
    _check_member(from_process, group)
    if is_alone(group):
        return data
    check_same(f"broadcast(from_process={from_process})", describe(data), group=group)
    return map_tensors(lambda tensor: _broadcast_tensor(tensor, from_process, group), data)


@uncompiled
@communicating
def broadcast_object_list(objects: list[Any], from_process: int = 0, *, mesh: DeviceMesh | None = None) -> list[Any]:
    """Replace the items of ``objects`` in place with those from rank ``from_process``, and return the list.

    Collective: call on every rank, with lists of equal length. Objects are pickled.

    Raises:
        DesyncError: the lists differ in length.
        UsageError: ``from_process`` is not in the mesh.

    Examples:
        >>> (run_name,) = broadcast_object_list([run_name if world.is_rank_zero else None])
    """
    group = _group(mesh)
    _check_member(from_process, group)
    if not is_alone(group):
        check_same(f"broadcast_object_list(from_process={from_process})", f"list of {len(objects)}", group=group)
        dist.broadcast_object_list(objects, src=from_process, group=group)
    return objects


@uncompiled
@communicating
def pad_across_processes(
    data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False, *, mesh: DeviceMesh | None = None
) -> Any:
    """Pad each tensor in ``data`` along ``dim`` to the largest size on any rank, so that it can be gathered.

    Args:
        data: nested data. Each tensor's dtype and sizes in all dimensions except ``dim`` must be equal on all ranks.
        dim: the dimension to pad; tensors without this dimension are returned unchanged.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.
        mesh: 1-D device mesh (default: all ranks).

    Collective: call on every rank.

    Raises:
        DesyncError: structures, dtypes or numbers of dimensions differ between ranks.

    Examples:
        >>> tokens = gather(pad_across_processes(tokens, dim=1, pad_index=0))
    """
    group = _group(mesh)
    _refuse_objects("pad_across_processes", data)
    if is_alone(group):
        return data
    ranks_and_dtypes = map_tensors(lambda tensor: f"{tensor.dtype} of {tensor.dim()} dimensions", data)
    check_same("pad_across_processes", repr(ranks_and_dtypes), group=group)
    tensors = [leaf for leaf in leaves(data) if -leaf.dim() <= dim < leaf.dim()]
    if not tensors:
        return data
    sizes = torch.tensor([tensor.size(dim) for tensor in tensors], device=wire_device(tensors[0].device, group))
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    largest = iter(sizes.tolist())
    return map_tensors(
        lambda tensor: (
            _pad(tensor, dim, next(largest), pad_index, pad_first) if -tensor.dim() <= dim < tensor.dim() else tensor
        ),
        data,
    )


def check_same(operation: str, description: str, *, group: dist.ProcessGroup | None) -> None:
    """Raise an error on every rank if ``description`` differs between ranks; the error lists each rank's description.

    If gloo is the only backend, the check always runs and costs one gather of 16 bytes, because on a mismatch gloo would
    abort the process (SIGABRT) or mix up data. With other backends, it would synchronize the host and therefore runs only in
    debug mode (ECHELON_DEBUG=1).

    Collective: call on every rank of ``group``.

    Raises:
        DesyncError: the descriptions differ.
    """
    notes = notes_of_process()
    if notes is not None:
        notes.operation(operation, description)
    backends = backends_of(group)
    if set(backends.values()) != {"gloo"} and not is_debug():
        return
    digest = hashlib.blake2b(f"{operation} {description}".encode(), digest_size=16).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(wire_device(torch.device("cpu"), group))
    world_size = dist.get_world_size(group)
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine, group=group)
    if all(torch.equal(other, theirs[0]) for other in theirs):
        return
    texts: list[Any] = [None] * world_size
    dist.all_gather_object(texts, f"{operation} {description}", group=group)
    listing = "\n".join(f"    rank {rank}: {text}" for rank, text in zip(ranks_of(group), texts))
    raise DesyncError(
        f"{operation}: the ranks do not pass the same structure\n{listing}",
        do="pass the same shapes, dtypes and structures on every rank (use pad_across_processes for unequal sizes and "
        "gather_object for other data), and call collectives in the same order on every rank",
    )


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    return None if mesh is None else mesh.get_group()


def _refuse_objects(operation: str, data: Any) -> None:
    for leaf in leaves(data):
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(
                f"{operation} expects tensors or nested tuples, lists and dicts of tensors, but got {type(leaf).__name__} ({describe(data)})",
                do="convert it to a tensor, or use gather_object / broadcast_object_list",
            )


def _check_member(rank: int, group: dist.ProcessGroup | None) -> None:
    members = ranks_of(group) if dist.is_initialized() else [0]
    if rank not in members:
        raise UsageError(f"from_process={rank} is not one of the group's ranks {members}", do="pass one of these ranks")


def _gather_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    local = tensor.detach().to(wire_device(tensor.device, group)).contiguous()
    if local.dim() == 0:
        local = local.reshape(1)
    world_size = dist.get_world_size(group)
    result = torch.empty((world_size * local.size(0), *local.shape[1:]), dtype=local.dtype, device=local.device)
    if local.numel() > 0:
        _all_gather_single(bytes_of(result), bytes_of(local), group=group)
    return result.to(tensor.device)


def _reduce_tensor(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType,
    divisor: int,
    scale: float,
    integers_stay: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    if op == dist.ReduceOp.MAX and tensor.is_complex():
        raise UsageError("complex numbers have no maximum", do="reduce their absolute values with tensor.abs()")
    alone = is_alone(group)
    wire = tensor.device if alone else wire_device(tensor.device, group)
    wide = tensor.detach().to(wire).to(_sum_dtype(tensor.dtype)).clone(memory_format=torch.contiguous_format)
    if not alone and wide.numel() > 0:
        dist.all_reduce(torch.view_as_real(wide) if wide.is_complex() else wide, op=op, group=group)
    if wide.dtype.is_floating_point or wide.dtype.is_complex:
        result = (wide / divisor if divisor != 1 else wide) * scale if scale != 1.0 else wide / divisor
        return result.to(dtype=tensor.dtype, device=tensor.device)
    result = wide if integers_stay else (wide / divisor * scale).to(torch.get_default_dtype())
    return result.to(tensor.device)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def _broadcast_tensor(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    local = tensor.detach().to(wire_device(tensor.device, group)).clone(memory_format=torch.contiguous_format)
    if local.numel() > 0:
        dist.broadcast(bytes_of(local), src=source, group=group)
    return local.to(tensor.device)


def _pad(tensor: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    if tensor.size(dim) == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size - tensor.size(dim)
    padding = tensor.new_full(shape, value)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)
