"""Accesses the parameter groups inside ``fully_shard`` modules, which are private in torch (2.7 to 2.13)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_fsdp_module

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule  # slow to import


def fsdp_groups(root: Any) -> list[Any]:
    """Return torch's parameter groups in ``root`` and its submodules. torch 2.7 has one per module, later versions a list."""
    found: list[Any] = []
    modules: Iterable[nn.Module] = root.modules()
    for module in modules:
        if is_fsdp_module(module):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
            found += groups
    return found


def fsdp_params(roots: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield torch's record for each sharded parameter in ``roots``."""
    for root in roots:
        for group in fsdp_groups(root):
            yield from group.fsdp_params


def unsharded_parameters(roots: Iterable[FSDPModule], wanted: set[int]) -> list[torch.Tensor]:
    """Return the unsharded parameters that autograd uses in place of the sharded parameters with the ids ``wanted``."""
    return [
        part._unsharded_param
        for part in fsdp_params(roots)
        if id(part.sharded_param) in wanted and hasattr(part, "_unsharded_param")
    ]


def sharded_parameters(roots: Iterable[FSDPModule], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``parameters`` without duplicates, replacing unsharded parameters with the sharded ones.

    If modules are not resharded, the model has unsharded parameters between the forward and backward pass, but its optimizers
    hold the sharded ones. Without the replacement, gradients would be assigned to the wrong parameters.
    """
    sharded = {
        id(part._unsharded_param): part.sharded_param
        for part in fsdp_params(roots)
        if hasattr(part, "_unsharded_param")  # torch creates it in the first pass
    }
    found = [sharded.get(id(parameter), parameter) for parameter in parameters]
    return list({id(parameter): parameter for parameter in found}.values())


def _is_unreduced(part: Any) -> bool:
    """Return whether a parameter has an unsharded gradient, that is, one that has not been reduced."""
    own = getattr(part, "_unsharded_param", None)
    return own is not None and (part.unsharded_accumulated_grad is not None or own.grad is not None)


def has_unreduced_gradients(root: FSDPModule) -> bool:
    """Return whether ``root`` has unreduced gradients."""
    return any(map(_is_unreduced, fsdp_params([root])))


def clear_unreduced_gradients(roots: Iterable[FSDPModule], owners: set[int]) -> None:
    """Discard unreduced gradients of the sharded parameters whose ids are in ``owners``."""
    for part in fsdp_params(roots):
        if id(part.sharded_param) in owners and _is_unreduced(part):
            part._unsharded_param.grad = None
            if part.unsharded_accumulated_grad is not None:  # since torch 2.15, the same gradient
                part.unsharded_accumulated_grad = None


def reduce_accumulated_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that unsynchronized backward passes accumulated. Collective: call on every rank of the mesh."""
    root.set_requires_gradient_sync(True)
    groups = [g for g in fsdp_groups(root) if any(map(_is_unreduced, g.fsdp_params))]
    for group in reversed(groups):
        group.post_backward()
    for group in groups:
        group.finalize_backward()
        group._training_state = type(group._training_state).IDLE
        group.comm_ctx.__dict__.get("reduce_scatter_states", []).clear()


@contextmanager
def reduce_once(root: FSDPModule) -> Iterator[bool]:
    """Accumulate the gradients of all backward passes in the block, and reduce them at its end if ``root`` is to reduce them.

    Yields whether it is. Without gradients, the block has only forward passes. Parameters are resharded at the end.

    Collective: call on every rank of the mesh.
    """
    reduces = torch.is_grad_enabled() and any(group.reduce_grads for group in fsdp_groups(root))
    if torch.is_grad_enabled():
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
    yield reduces
    if reduces:
        reduce_accumulated_gradients(root)
    reshard(root)


def reshard(root: nn.Module | FSDPModule) -> None:
    """Free the unsharded parameters of ``root``, which an optimizer step does not update."""
    for group in fsdp_groups(root):
        if group.is_unsharded:
            group.reshard()


def reshard_after_evaluation(root: nn.Module, _args: Any, _out: Any) -> None:
    """Forward hook that frees unsharded parameters after a forward pass without gradients.

    ``reshard_after_forward=False`` keeps them until the backward pass. Without a backward pass, they would replace the shards
    in the model and keep their old values in the next step, so changes to ``model.parameters()`` would be lost.
    """
    if not torch.is_grad_enabled():
        reshard(root)


def require_one_dtype(root: FSDPModule) -> None:
    """Raise UsageError if a unit has parameters of several dtypes. torch's own error comes later and names no parameter."""
    names = {id(p): name for name, p in root.named_parameters()}  # type: ignore[attr-defined]
    for group in fsdp_groups(root):
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        for parameter in (part.sharded_param for part in group.fsdp_params):
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, parameter)
        if len(by_dtype) > 1:
            found = " and ".join(f"{names.get(id(p), 'one')} ({dtype})" for dtype, p in list(by_dtype.items())[:2])
            raise UsageError(
                f"{found} are in one unit, but torch's fully_shard requires one dtype per unit",
                where="prepare(), fsdp2 engine",
                do="cast the model to one dtype, make the modules with each dtype separate units (with the wrap policy), exclude "
                "them from sharding (with ignored_modules), or use engine='ddp'",
            )
