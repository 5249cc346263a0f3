"""What scripts may do with a sharded model: read values, load full tensors, add parameters, and take the norm of gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.ddp.replica import Structure, require_same_parameters
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.engines.shards import shard_like

_ITEM = torch.ops.aten._local_scalar_dense.default
_dtype_of = attrgetter("dtype")


def warn_on_shard_values(owner: object) -> None:
    """While ``owner`` exists, warn once per line if a script reads this rank's part of an unfinished reduction.

    ``p.grad.norm().item()``, ``float()`` and ``bool()`` return one shard's value without a warning from torch. The value is not
    changed, because computing the full value needs all ranks, and not all of them may execute this line.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.get(_ITEM)
    if handler is None:
        handler = handlers[_ITEM] = _ItemHandler()
    if isinstance(handler, _ItemHandler):
        handler.owners.add(owner)


class _ItemHandler:
    """Replaces torch's implementation of ``DTensor.item()``."""

    def __init__(self) -> None:
        self.owners: WeakSet[Any] = WeakSet()
        self._lines: set[UserLine] = set()

    def __call__(self, _operator: object, args: tuple[Any, ...], _kwargs: object) -> Any:
        tensor: DTensor = args[0]
        if self.owners and tensor.device_mesh.size() > 1 and any(p.is_partial() for p in tensor.placements):
            line = user_line()
            if line not in self._lines:
                self._lines.add(line)
                warn(
                    _(
                        "this line reads the sum, norm or maximum of only this rank's shard of a tensor, which differs "
                        "between ranks. For the full value, call x.full_tensor().item() on every rank instead of "
                        "x.item(). For the norm of all gradients, call "
                        "accelerator.clip_grad_norm_(model.parameters(), float('inf'))."
                    ),
                    at=line,
                )
        return tensor.to_local().item()


def accept_full_state_dicts(model: nn.Module) -> list[Any]:
    """Make ``load_state_dict`` on ``model`` and its submodules accept full tensors; return the hook handles."""
    modules: list[Any] = list(model.modules())
    return [module.register_load_state_dict_pre_hook(_shard_values) for module in modules]


def _shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, own in [*module.named_parameters("", False, False), *module.named_buffers("", False, False)]:
        value = state_dict.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # otherwise torch's error shows both shapes
            state_dict[prefix + name] = shard_like(value.detach(), own)


# ---- parameters that are not sharded ----------------------------------------------------------------------------------


class UnshardedParameters:
    """Tracks a model's unsharded parameters, and broadcasts new ones from rank zero."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = Structure(model)
        self._known = self._find()
        self._sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        self._dtypes: list[torch.dtype] = []  # of the buffers that torch makes in the first forward pass
        self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def current(self) -> list[nn.Parameter]:
        """Return the unsharded parameters. Collective if the model's parameters were added or replaced since the last call."""
        self._update()
        return self._known

    def release(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._require_dtypes()
            self._update()

    def _require_dtypes(self) -> None:
        """Raise UsageError if sharded parameters were cast after the first forward pass, of which torch keeps its buffers."""
        now = list(map(_dtype_of, self._sharded))
        if not self._dtypes:
            self._dtypes = now
        if now == self._dtypes:
            return
        number = next(i for i, (dtype, before) in enumerate(zip(now, self._dtypes)) if dtype is not before)
        names = {id(p): name for name, p in self._model.named_parameters()}
        raise UsageError(
            f"{names.get(id(self._sharded[number]), 'a parameter')} was cast from {self._dtypes[number]} to {now[number]} after "
            "the first forward pass, but the buffers in which fully_shard gathers it have the former dtype",
            where="the forward pass, fsdp2 engine",
            do="cast the model before prepare(), or before its first forward pass",
        )

    def _update(self) -> None:
        if not self._structure.is_changed:
            return
        known = set(map(id, self._known))
        self._known = self._find()
        new = [p for p in self._known if id(p) not in known]
        self._structure.renew(self._model)
        if not new:
            return
        monitored_barrier("the first forward pass after a prepared model's parameters changed")
        require_same_parameters(self._model)
        names = {id(p): name for name, p in self._model.named_parameters()}
        large = [names[id(p)] for p in new if p.dim()]
        if large:
            warn(
                _(
                    "fully_shard does not shard parameters that were added to the model after prepare() "
                    "({names}{more}). echelon averages their gradients across ranks at each step. To shard these "
                    "parameters, add them before prepare()",
                    names=", ".join(large[:3]),
                    more=" and others" if len(large) > 3 else "",
                )
            )
        for parameter in new:
            dist.broadcast(parameter.data, src=0)

    def _find(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if not isinstance(p, DTensor)]


# ---- the norm of gradients ----------------------------------------------------------------------------------------------


def total_norm(
    gradients: Sequence[torch.Tensor], p: float, device: torch.device, *, also: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Return the p-norm of ``gradients``; the placements of each DTensor tell over which ranks it is sharded.

    Shards are summed in one all_reduce per distinct set of mesh axes, and ranks that hold equal copies count once.

    Collective if a gradient is sharded, or ``also`` is not empty: call with the gradients of the same parameters on the ranks of
    each mesh.

    Args:
        gradients: gradients of different parameters.
        p: order of the norm; infinity is the maximum.
        device: device of the result.
        also: groups whose ranks hold different parameters, such as the stages of a pipeline.
    """
    is_max = math.isinf(p)
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # The keys are in the order of the parameters, and so equal on the ranks of a mesh.
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    whole: list[torch.Tensor] = []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            whole.append(gradient)
            continue
        settled = _without_partial(gradient)
        groups = tuple(_sharding_groups(settled))
        (parts[groups] if groups else whole).append(settled.to_local())
    total = _power_sum(whole, p, device)
    for groups, tensors in parts.items():
        own = _power_sum(tensors, p, device)
        for group in groups:
            dist.all_reduce(own, op=operation, group=group)
        total = torch.maximum(total, own) if is_max else total + own
    if also:
        # The ranks of these groups may have gradients of different dtypes, or none.
        dtype, total = total.dtype, total if device.type == "mps" else total.double()
        for group in also:
            dist.all_reduce(total, op=operation, group=group)
        total = total.to(dtype)
    return total if is_max else total ** (1.0 / p)


def _without_partial(gradient: DTensor) -> DTensor:
    """Return ``gradient`` with partial sums added. Collective if there are any."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    settled = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    found: DTensor = gradient.redistribute(placements=settled)
    return found


def _sharding_groups(gradient: DTensor) -> Iterator[dist.ProcessGroup]:
    """Yield the groups of the mesh axes over which ``gradient`` is sharded; axes of size 1 also count, because they keep the
    sets of axes equal in runs of all sizes.
    """
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():  # torch's strided shards are not always instances of Shard
            yield gradient.device_mesh.get_group(axis)


def _power_sum(tensors: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the p-th powers (or the maximum if p is infinite) as a 0-d tensor with at least float32 precision."""
    # The dtype must be the same on every rank, including ranks without elements, so empty tensors count.
    wide = max((t.dtype.to_real() for t in tensors), key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    wide = torch.float32 if torch.finfo(wide).bits < 32 else wide
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(device=device, dtype=wide) for norm in torch._foreach_norm(filled, p)])
    return norms.max() if math.isinf(p) else (norms**p).sum()
