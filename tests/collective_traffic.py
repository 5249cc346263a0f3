"""Counts the collectives of a piece of code and their bytes, by kind and by the ranks that take part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.world.mesh import AXES, MeshLayout

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_": "all_gather",
    "allreduce_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "scatter_": "scatter",
    "send": "send",
    # functional collectives
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over one group of ranks."""

    calls: int = 0
    num_bytes: int = 0
    """Sum over the calls of the larger of this rank's input and output: the whole tensor of an all_gather, for example. In a ring of n
    ranks, each rank sends (n - 1) / n of it (all_reduce: twice that)."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.num_bytes + other.num_bytes)


class CollectiveTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that this process starts inside the ``with`` block, including those of the backward pass.

    It also works on torch's fake process group, with which one process computes what one of thousands of ranks would start. Backends
    whose calls do not pass through torch's dispatcher (``TCPStore`` exchanges) are not counted.

    Source: torch.distributed.tensor.debug.CommDebugMode, which counts calls, but neither bytes nor groups.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_ranks: dict[tuple[str, tuple[int, ...]], Traffic] = {}
        """Traffic by kind and by the ranks of the group."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name not in _NOT_COLLECTIVES:
                self._count(name, args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        group = _group(args)
        if group is None:
            return
        # c10d: tensors are written in place, and the second argument is the input of gathers and scatters.
        num_bytes = max(_num_bytes(args[0]), _num_bytes(args[1]), _num_bytes(result))
        key = (_KINDS.get(name, name), tuple(dist.get_process_group_ranks(group)))
        self.by_ranks[key] = self.by_ranks.get(key, Traffic()) + Traffic(1, num_bytes)

    def by_axes(self, layout: MeshLayout) -> dict[tuple[str, tuple[str, ...]], Traffic]:
        """Return the traffic by kind and by the axes of ``layout`` on which the ranks of a group differ."""
        found: dict[tuple[str, tuple[str, ...]], Traffic] = {}
        for (kind, ranks), traffic in self.by_ranks.items():
            key = (kind, _axes(layout, ranks))
            found[key] = found.get(key, Traffic()) + traffic
        return found


def _axes(layout: MeshLayout, ranks: Iterable[int]) -> tuple[str, ...]:
    places = [layout.coordinates(rank) for rank in ranks]
    return tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1)


def _group(args: tuple[Any, ...]) -> Any:
    """Return the process group among the arguments: an object (c10d) or, last, its name (functional collectives)."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
            return dist.ProcessGroup.unbox(arg)
    name: Any = args[-1]
    if type(name) is str:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return None


def _num_bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in pytree.tree_leaves(tensors) if isinstance(one, torch.Tensor))
