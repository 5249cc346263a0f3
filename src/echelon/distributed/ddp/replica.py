"""Tracks whether DistributedDataParallel has reduced a model's gradients and knows all of its parameters."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from echelon.base.errors import DesyncError, UsageError
from echelon.base.warnings import user_line
from echelon.distributed.ddp.sparse_gradients import sparse_parameters, sparse_zeros_like
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.distributed.small_messages import fingerprint, gather_bytes, gather_counts
from echelon.distributed.torch_hooks import is_in_backward, watch_module_changes
from echelon.distributed.uncompiled import uncompiled

_UNUSED_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MAX_NAMES = 4
_requires_grad = operator.attrgetter("requires_grad")
_requires_grad_and_dtype = operator.attrgetter("requires_grad", "dtype")


def average_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Replace each parameter's gradient with the mean across ranks; if no rank has a gradient, it stays None.

    Collective: call on every rank, with the same parameters.
    """
    if not parameters:
        return
    world_size = dist.get_world_size()
    device = parameters[0].device
    are_sparse = [None if p.grad is None else p.grad.is_sparse for p in parameters]
    kinds = [[sparse is kind for sparse in are_sparse] for kind in (False, True)]
    present = torch.tensor(kinds, dtype=torch.int32, device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    for parameter, dense_somewhere, sparse_somewhere in zip(parameters, *present.tolist()):
        if not dense_somewhere and not sparse_somewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter) if dense_somewhere else sparse_zeros_like(parameter)
        elif dense_somewhere and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        parameter.grad.div_(world_size)  # before the sum, as DDP does: the same rounding
        dist.all_reduce(parameter.grad)


def average_loss(loss: Any) -> Any:
    """Return the mean of a closure's return value across ranks, or the value itself if it is not a number.

    An optimizer that uses the loss, such as LBFGS, must make the same decisions on all ranks.

    Collective: call on every rank.
    """
    if not isinstance(loss, (torch.Tensor, float)) or (isinstance(loss, torch.Tensor) and loss.numel() != 1):
        return loss
    value = loss.detach().clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
    value.div_(dist.get_world_size())
    dist.all_reduce(value)
    return value if isinstance(loss, torch.Tensor) else value.item()


def require_same_parameters(module: nn.Module) -> None:
    """Check that the names, shapes, dtypes and ``requires_grad`` of a module's parameters are equal on all ranks.

    Collective: call on every rank.

    Raises:
        DesyncError: the parameters differ; the message gives the first difference.
    """
    lines = [
        f"{name} {list(p.shape)} {p.dtype} ({'trainable' if p.requires_grad else 'frozen'})"
        for name, p in module.named_parameters()
    ]
    mine = "\n".join(lines).encode()
    (sums,) = gather_counts(fingerprint(torch.frombuffer(bytearray(mine or b"none"), dtype=torch.uint8)))
    if len(set(sums)) == 1:
        return
    ranks = [theirs.decode().split("\n") for theirs in gather_bytes(mine)]
    rank = next(rank for rank, theirs in enumerate(ranks) if theirs != ranks[0])
    count = max(len(ranks[0]), len(ranks[rank]))
    first, other = (theirs + ["nothing"] * (count - len(theirs)) for theirs in (ranks[0], ranks[rank]))
    place = next(i for i in range(count) if first[i] != other[i])
    raise DesyncError(
        f"a prepared model's parameters changed differently on different ranks: rank {rank} has {other[place]}, but "
        f"rank 0 has {first[place]}",
        do="add, replace, freeze and unfreeze the same parameters on every rank",
    )


class Structure:
    """Detects when a parameter or submodule is set anywhere inside ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet(module.modules())
        self.is_changed = False
        watch_module_changes(self, Structure._on_change)

    def _on_change(self, module: nn.Module) -> None:
        if module in self._modules:
            self.is_changed = True

    def renew(self, module: nn.Module) -> None:
        """Reset the flag, and watch the current submodules of ``module``."""
        self._modules = WeakSet(module.modules())
        self.is_changed = False


class Replica:
    """Tracks whether a DDP model's gradients contain unreduced values.

    DDP decides in the forward pass which gradients the next backward pass reduces, and reduces them only once. It reduces
    nothing in ``no_sync``, after a forward pass through the unwrapped module, or in a second backward pass after one forward
    pass. It ignores parameters that were added, replaced, unfrozen or cast after it was built, and waits forever for frozen ones.
    """

    def __init__(self, wrapper: DistributedDataParallel, *, reduces: bool = True, hooks: Sequence[Any] = ()) -> None:
        """Watch ``wrapper``.

        Args:
            reduces: whether DDP must reduce gradients; if False, they are never considered unreduced.
            hooks: handles of other hooks on the model that ``release`` also removes.
        """
        self.wrapper = wrapper
        self._reduces = reduces
        self._all = list(wrapper.module.parameters())
        # What the reducer was built for. DDP's own mixed precision changes the dtype during a pass.
        self._kind_of = _requires_grad if wrapper.mixed_precision is not None else _requires_grad_and_dtype
        self._kinds = list(map(self._kind_of, self._all))
        self.parameters = [p for p in self._all if p.requires_grad]
        """Trainable parameters."""
        self.version = 0
        """How often the set of parameters has changed so far."""
        self.num_reduced = 0
        """Number of backward passes that DDP has reduced since its reducer was built."""
        self.former: list[torch.Tensor] = []
        """Parameters that were removed from the model."""
        self._structure = Structure(wrapper.module)
        self._passes = BackwardPasses()  # backward passes since the last update_reduced()
        self._will_reduce = False  # DDP will reduce in the next backward pass
        self._is_compiled = False
        self._dirty = False
        self._is_compared = False  # a forward pass has checked the parameters since the last step
        self._has_passes = False  # a backward pass has run since the last step
        self._is_assigned = False  # the gradients were assigned, not made by a backward pass
        self._stepped: list[_Gradient | None] = []  # gradients of ``_sample()`` at the last step
        self._must_prepare = False  # the next backward pass reduces gradients of forward passes in no_sync
        self._hooks = [wrapper.register_forward_pre_hook(self._on_forward), *hooks]
        self._grad_hooks: dict[torch.Tensor, Any] = {}
        self._watch_gradients()

    def release(self) -> None:
        """Remove the hooks from the user's parameters."""
        for hook in (*self._hooks, *self._grad_hooks.values()):
            hook.remove()
        self._grad_hooks.clear()

    def _watch_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter not in self._grad_hooks:
                self._grad_hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._passes)

    def _on_forward(self, wrapper: nn.Module, _inputs: Any) -> None:
        # Same condition as in DDP's forward, which decides whether the backward pass reduces.
        if not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling():
            self.require_finished_reduction()
            self.sync_parameters()
            self.update_reduced()
            self._is_compared = True
        else:
            self._is_compiled = True  # only written here: reading it would compile its value into the graph
        if self.wrapper.require_backward_grad_sync:
            self._will_reduce = True

    # ---- the parameters of the model -----------------------------------------------------------------------------------

    def sync_parameters_before_step(self) -> None:
        """Call ``sync_parameters``, unless a forward pass has called it since the last step."""
        if not self._is_compared:
            self.sync_parameters()
        self._is_compared = False

    def sync_parameters(self) -> None:
        """Rebuild DDP's reducer if parameters were added, replaced, removed, frozen, unfrozen or cast; broadcast new parameters.

        Collective if any parameters have changed.

        Raises:
            DesyncError: the parameters changed differently on different ranks.
            UsageError: one of DDP's options prevents rebuilding it.
        """
        if not self._structure.is_changed and list(map(self._kind_of, self._all)) == self._kinds:
            return
        module = self.wrapper.module
        now = list(module.parameters())
        kinds = list(map(self._kind_of, now))
        is_same = len(now) == len(self._all) and all(map(operator.is_, now, self._all)) and kinds == self._kinds
        if not is_same:
            self._require_rebuildable(now, kinds)
            monitored_barrier("the first forward pass after a prepared model's parameters changed")
            require_same_parameters(module)
            known, were_trained = set(map(id, self._all)), set(map(id, self.parameters))
            for parameter in now:
                if id(parameter) not in known:
                    dist.broadcast(parameter.data, src=0, group=self.wrapper.process_group)
            is_there = set(map(id, now))
            self.former += [p for p in self._all if id(p) not in is_there]
            self._all, self._kinds = now, kinds
            self.version += 1
            self.parameters = [p for p in now if p.requires_grad]
            # A gradient that a new parameter already has was not reduced.
            self._dirty |= self._reduces and any(
                p.grad is not None and id(p) not in were_trained for p in self.parameters
            )
            if self._is_compiled and self._passes.is_any:
                self._mark_compiled_passes_unreduced(were_trained)
            self._watch_gradients()
            for gone in [p for p in self._grad_hooks if id(p) not in is_there]:
                self._grad_hooks.pop(gone).remove()
            if self.parameters:
                _rebuild_reducer(self.wrapper)
                self.num_reduced = 0
        self._structure.renew(module)

    def _mark_compiled_passes_unreduced(self, were_trained: set[int]) -> None:
        """Mark gradients from compiled passes as unreduced, because such passes do not check the parameters.

        Raises:
            UsageError: a parameter was frozen, so DDP would wait for it, or DDP stores gradients in its buckets.
        """
        named = self.wrapper.module.named_parameters()
        frozen = [name for name, p in named if id(p) in were_trained and not p.requires_grad]
        if frozen or self.wrapper.gradient_as_bucket_view:
            raise UsageError(
                f"{', '.join(frozen[:3]) or 'a parameter'}{' and others' if len(frozen) > 3 else ''} changed in a compiled model after "
                "prepare(), and DDP has reduced only some of its gradients",
                where="torch.compile and DistributedDataParallel",
                do="freeze and unfreeze parameters before prepare(), or remove torch.compile (and gradient_as_bucket_view if you "
                "unfreeze parameters)",
            )
        self.update_reduced()
        self._dirty = self._reduces

    def _require_rebuildable(self, now: list[nn.Parameter], kinds: list[Any]) -> None:
        wrapper: Any = self.wrapper
        if not (
            wrapper._use_python_reducer
            or wrapper.mixed_precision is not None
            or getattr(wrapper, "_delay_all_reduce_params", None)
        ):
            return
        before = {id(p): kind for p, kind in zip(self._all, self._kinds)}
        names = {id(p): name for name, p in wrapper.module.named_parameters()}
        changed = [names[id(p)] for p, kind in zip(now, kinds) if before.get(id(p)) != kind]
        raise UsageError(
            f"a prepared model's parameters changed ({', '.join(changed[:3]) or 'some were removed'}), but DDP cannot be rebuilt",
            where="DistributedDataParallel with mixed_precision, delay_all_reduce_named_params or the Python reducer",
            do="change the model before prepare(), or remove these options",
        )

    # ---- its gradients -------------------------------------------------------------------------------------------------

    def require_finished_reduction(self) -> None:
        """Check that the last backward pass reduced the gradients of all parameters that DDP waits for.

        DDP itself checks this only in the next forward pass, after an optimizer step has used one rank's local gradients.

        Raises:
            UsageError: some of the parameters received no gradient; the message lists them.
        """
        if is_in_backward():
            return
        try:
            self.wrapper._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            name_of = {id(p): name for name, p in self.wrapper.module.named_parameters()}
            reduced = [p for p in self.parameters if name_of.get(id(p)) not in self.wrapper.parameters_to_ignore]
            found = _UNUSED_INDICES.search(str(error))
            unused = [reduced[int(i)] for i in found[1].split() if int(i) < len(reduced)] if found else []
            names = [name_of.get(id(p), "a removed parameter") for p in unused]
            shown = ", ".join(names[:_MAX_NAMES]) + (
                f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else ""
            )
            raise UsageError(
                f"{len(names) or 'some'} of the {len(reduced)} trainable parameters received no gradient in the last backward pass"
                f"{': ' if shown else ''}{shown}. DDP waits for them and has not averaged all gradients across ranks",
                where=f"{type(self.wrapper.module).__name__} under DistributedDataParallel, {user_line()}",
                do="if the loss does not always depend on them, use Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)]) or TrainingArguments(ddp_find_unused_parameters=True). If it never does, call "
                "parameter.requires_grad_(False) before prepare()",
            ) from error

    @contextmanager
    def sync_next_backward(self) -> Iterator[None]:
        """Make the backward pass in the block reduce gradients, as if its forward pass had run outside ``no_sync``."""
        wrapper = self.wrapper
        before = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
        self._must_prepare = True
        if not wrapper.find_unused_parameters:  # otherwise DDP needs the loss, which is not known yet
            self.prepare_for_backward([])
        try:
            yield
        finally:
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = before
            self.update_reduced()
            self._will_reduce = self._must_prepare = False

    def prepare_for_backward(self, losses: list[torch.Tensor]) -> None:
        """Inside ``sync_next_backward``, prepare DDP's reducer; a forward pass in ``no_sync`` does not prepare it."""
        if self._must_prepare:
            self.update_reduced()
            self.wrapper.reducer.prepare_for_backward(losses)
            self._must_prepare, self._will_reduce = False, True

    def contribute_zeros(self) -> None:
        """Contribute zeros to the reduction that the forward pass prepared, if no backward pass has contributed gradients."""
        if self._will_reduce:
            sparse = {id(parameter) for _, parameter in sparse_parameters(self.wrapper.module)}
            zeros = [sparse_zeros_like(p) if id(p) in sparse else torch.zeros_like(p) for p in self.parameters]
            torch.autograd.backward(self.parameters, zeros)
            self.update_reduced()

    def update_reduced(self) -> None:
        """Update the unreduced flag based on the backward passes since the last call."""
        if not self._passes.is_any:
            return
        self._has_passes, self._is_assigned = True, False
        self._dirty = self._reduces and self._passes.are_unreduced(self._will_reduce, is_compiled=self._is_compiled)
        self.num_reduced += self._will_reduce
        self._passes.reset()
        self._will_reduce = False

    def is_dirty(self) -> bool:
        """Return whether any gradient contains unreduced values."""
        self.update_reduced()  # after a backward pass that did not go through the engine
        return self._dirty or (self._reduces and not self._has_passes and self.is_assigned())

    def is_assigned(self) -> bool:
        """Return whether the gradients were assigned, for example from ``torch.autograd.grad``, without a backward pass.

        Gradients that have not changed since the last step do not count, unless they had been assigned before it.
        """
        if self._has_passes:
            return False
        if not self._is_assigned:
            sample = self._sample()
            before = self._stepped or [None] * len(sample)
            self._is_assigned = any(
                p.grad is not None and (stepped is None or not stepped.is_unchanged(p.grad))
                for p, stepped in zip(sample, before)
            )
        return self._is_assigned

    def copy_assigned(self) -> list[torch.Tensor]:
        """Replace assigned gradients with detached copies, which can be reduced in place; return copies of a sample of them."""
        for p in self.parameters:
            if p.grad is not None:
                p.grad = p.grad.detach().clone()
        return [p.grad.clone() for p in self._sample() if p.grad is not None]

    def have_changed(self, copies: list[torch.Tensor]) -> bool:
        """Return whether the sampled gradients differ from ``copies``, which ``copy_assigned`` returned."""
        now = [p.grad for p in self._sample() if p.grad is not None]
        return len(now) != len(copies) or any(
            a.is_sparse or not torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True) for a, b in zip(now, copies)
        )

    def end_step(self) -> None:
        """Record that an optimizer step has used the current gradients."""
        self.update_reduced()
        self._has_passes = False
        self._stepped = [None if p.grad is None else _Gradient(p.grad) for p in self._sample()]

    def _sample(self) -> list[torch.Tensor]:
        """Return a few parameters, because checking all of them in each step would be slow."""
        own = self.parameters
        return [own[0], own[len(own) // 2], own[-1]] if own else []

    def mark_reduced(self) -> None:
        """Record that all gradients have been reduced or cleared."""
        self._dirty = False


def _rebuild_reducer(wrapper: Any) -> None:
    """Rebuild DDP's reducer for its module's current parameters, keeping its options and hooks.

    Source: DistributedDataParallel.__setstate__, which does this after unpickling.
    """
    ignored = wrapper.parameters_to_ignore
    wrapper._module_parameters = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
    parameters, is_sparse = wrapper._build_params_for_reducer()
    if not parameters:
        return
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, is_sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False  # the first backward pass records the graph
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    hooks = list(wrapper._comm_hooks)
    wrapper._comm_hooks.clear()
    for hook, state in hooks:
        if isinstance(state, PowerSGDState):  # its tensors belong to the old buckets
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
        wrapper.register_comm_hook(state, hook)


class _Gradient:
    """Identifies a gradient tensor and its contents."""

    __slots__ = ("_num_writes", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = ref(tensor)
        self._num_writes = tensor._version

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is the same tensor and has not been written to since."""
        return self._tensor() is tensor and tensor._version == self._num_writes


class BackwardPasses:
    """Gradient hook that counts backward passes.

    It must not reference the wrapper. DDP's reducer holds the parameters where the garbage collector cannot see them, so the
    cycle would never be freed, and neither would the model or the process group.
    """

    __slots__ = ("_last", "_seen", "is_any", "num")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the count."""
        self.is_any = False
        self.num = 0
        """Number of passes, excluding those nested in another pass (as in activation checkpointing)."""
        self._last = -1
        self._seen: set[int] = set()

    def are_unreduced(self, will_reduce: bool, *, is_compiled: bool) -> bool:
        """Return whether DDP, which decided before the passes whether it ``will_reduce``, has left gradients unreduced.

        It reduces only the first of several backward passes after one forward pass. (In compiled models they cannot be counted.)
        """
        return not will_reduce or (self.num > 1 and not is_compiled)

    @uncompiled
    def __call__(self, _parameter: torch.Tensor) -> None:
        self.count_current()

    def count_current(self) -> bool:
        """Count the running backward pass if it is not the last one counted; return whether it was counted."""
        task = torch._C._current_graph_task_id()
        if task == self._last:
            return False
        self.is_any, self._last = True, task
        if task not in self._seen:
            self._seen.add(task)
            self.num += not _is_inside_a_backward()
        return True


_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__


def _is_inside_a_backward() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False
