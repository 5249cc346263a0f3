"""Warns once if an optimizer step in a plain DistributedDataParallel loop uses unreduced gradients."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.checks.replica_drift import ReplicaDriftCheck
from echelon.distributed.checks.ungathered_metrics import num_collectives, num_collectives_of_all_groups
from echelon.distributed.checks.unsharded_loader import UnshardedLoaderCheck
from echelon.distributed.ddp.replica import BackwardPasses, Replica, Structure
from echelon.distributed.ddp.sparse_gradients import copy_sparse_gradients
from echelon.distributed.shard import METRICS
from echelon.distributed.torch_hooks import Closure, is_in_backward, watch_calls, watch_optimizer_steps
from echelon.distributed.uncompiled import uncompiled

_DO_WRAP = (
    "put every parameter into a module that DistributedDataParallel wraps, call the wrapped module, and compute all gradients "
    "with loss.backward() (if each rank trains its own parameters on purpose, ignore this warning)"
)

_requires_grad = operator.attrgetter("requires_grad")


@final
class RawDDPGuard:
    """Watches optimizer steps and the DDP models that are built between ``setup()`` and ``cleanup()``.

    Unlike an Accelerator, it never reduces gradients itself: the user's loop may reduce them explicitly or skip reductions
    on purpose, and an additional collective could hang the program.
    """

    current: ClassVar[RawDDPGuard | None] = None
    """The guard for the open process group. Its hooks apply to the whole process."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._group = weakref.ref(group)
        self._models: WeakSet[_WatchedModel] = WeakSet()  # the hook on the model keeps each one alive
        self._buffer_syncs: WeakSet[_BufferSyncCounter] = WeakSet()
        self._models_of_optimizer: WeakKeyDictionary[
            Optimizer, tuple[tuple[int, int], list[weakref.ref[_WatchedModel]]]
        ] = WeakKeyDictionary()
        self._loaders = UnshardedLoaderCheck()
        self._drift = ReplicaDriftCheck()
        self._end_steps: Callable[[], object] = _do_nothing
        if group.size() > 1:  # otherwise there is nothing to compare or reduce
            self._end_steps = watch_optimizer_steps(self, RawDDPGuard._before_step)
        self._end_models = watch_calls(self, DistributedDataParallel, "__init__", RawDDPGuard._watch_model)

    @classmethod
    def begin(cls) -> None:
        """Start watching."""
        cls.end()
        cls.current = cls()

    @classmethod
    def leave_to_accelerator(cls) -> None:
        """Stop comparing weights, because an Accelerator compares them from now on."""
        if cls.current is not None:
            cls.current._drift.stop()

    @classmethod
    def end(cls) -> None:
        """Stop watching; does nothing if no guard is active."""
        guard, cls.current = cls.current, None
        if guard is not None:
            guard._drift.stop()
            guard._end_steps()
            guard._end_models()
            guard._loaders.stop()
            for model in list(guard._models):
                model.release()
            for counter in list(guard._buffer_syncs):
                counter.release()

    def _watch_model(self, wrapper: DistributedDataParallel, _result: None) -> None:
        """Watch a model that was just wrapped, and copy its sparse gradients before DDP scales them in place."""
        if RawDDPGuard.current is self and self._is_open() and dist.get_world_size(wrapper.process_group) > 1:
            copy_sparse_gradients(wrapper.module)
            for former in [model for model in self._models if model.is_of(wrapper.module)]:  # it was wrapped again
                former.release()
                self._models.discard(former)
            self._models.add(_WatchedModel(wrapper))
            if wrapper.broadcast_buffers and next(wrapper.module.buffers(), None) is not None:
                self._buffer_syncs.add(_BufferSyncCounter(wrapper))

    def _before_step(self, optimizer: Optimizer, _closure: Closure | None) -> None:
        if not self._is_open() or is_in_backward():  # DDP has reduced before its hook steps
            return
        models = [model for reference in self._models_of(optimizer) if (model := reference()) is not None]
        if not any(model.is_joined for model in models):  # joined ranks step different numbers of times
            self._drift.before_step(optimizer, _DO_WRAP, must_be_equal=False)
        for model in models:
            if model.check_step():
                self._loaders.check_step()
            if model.is_reported or model.is_joined:
                self._drift.ignore(optimizer)

    def _is_open(self) -> bool:
        """Return whether the group that ``begin()`` saw is still open; the user may have destroyed it."""
        return dist.is_initialized() and self._group() is dist.group.WORLD

    def _models_of(self, optimizer: Optimizer) -> list[weakref.ref[_WatchedModel]]:
        # Cached until models or parameters are added: walking over all parameters at each step is too slow.
        num_seen = sum(len(model.ids) for model in self._models)
        count = (num_seen, sum(len(group["params"]) for group in optimizer.param_groups))
        known = self._models_of_optimizer.get(optimizer)
        if known is None or known[0] != count:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = [weakref.ref(model) for model in self._models if not ids.isdisjoint(model.ids)]
            known = self._models_of_optimizer[optimizer] = (count, found)
        return known[1]


def _do_nothing() -> None:
    pass


class _ModelHook(ABC):
    """A removable hook that is not copied or pickled with its model."""

    _handles: list[Any]
    """Handles of the registered hooks."""

    @abstractmethod
    def __call__(self, module: Any, inputs: Any) -> None:
        """Record a forward pass."""

    def __deepcopy__(self, _memo: Any) -> _NoHook:
        return _NoHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHook, ()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _WatchedModel(_ModelHook):
    """A DDP model's forward pre-hook that tracks whether the last backward pass reduced its gradients.

    DDP decides in the forward pass whether the next backward pass reduces gradients.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        parameters = [p for p in wrapper.module.parameters() if p.requires_grad]
        self.ids = frozenset(map(id, parameters))
        self._wrapper = weakref.ref(wrapper)
        self._module = weakref.ref(wrapper.module)
        self._passes = _LastPass()
        self._structure = Structure(wrapper.module)
        self._untrained: list[nn.Parameter] = []
        """Frozen parameters, which DDP therefore does not reduce."""
        self._late: dict[str, _LastPass] = {}
        """Hooks on parameters that became trainable after DDP was built, by parameter name."""
        self._list_untrained(wrapper)
        self._will_reduce = False
        self._is_compiled = False
        self._is_dirty = False
        self._is_unchecked = True
        self._is_prepared = False
        self._is_done = False
        handles = [p.register_post_accumulate_grad_hook(self._passes) for p in parameters]
        self._handles = [wrapper.register_forward_pre_hook(self), *handles]

    def __call__(self, module: Any, inputs: Any) -> None:
        """Record a forward pass through DDP."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            self._is_compiled = True  # only written here: reading it would compile its value into the graph
        else:
            self._update_reduced()
            self._watch_new_parameters(module)
        if module.require_backward_grad_sync:
            self._will_reduce = True

    def is_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the wrapped module."""
        return self._module() is module

    @property
    def is_joined(self) -> bool:
        """Whether the model is inside torch's ``Join`` context."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._join_config.enable

    @property
    def is_reported(self) -> bool:
        """Whether a warning has already reported that the ranks diverge."""
        return self._is_done

    def _list_untrained(self, wrapper: DistributedDataParallel) -> None:
        left_out = wrapper.parameters_to_ignore
        named = wrapper.module.named_parameters()
        self._untrained = [p for name, p in named if id(p) not in self.ids and name not in left_out]
        self._structure.renew(wrapper.module)

    def _watch_new_parameters(self, wrapper: DistributedDataParallel) -> None:
        """Watch parameters that DDP does not reduce because they were unfrozen, added or replaced after it was built."""
        if self._structure.is_changed:
            self._list_untrained(wrapper)
        if not any(map(_requires_grad, self._untrained)):
            return
        for name, parameter in wrapper.module.named_parameters():
            if parameter.requires_grad and any(parameter is other for other in self._untrained):
                self._late[name] = _LastPass(keeps=True)
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._late[name]))
                self.ids |= {id(parameter)}
        self._untrained = [p for p in self._untrained if not p.requires_grad]

    def check_step(self) -> bool:
        """Warn if the step uses unreduced gradients; return whether the model is used in a plain DDP loop."""
        wrapper = self._wrapper()
        if wrapper is None or self._is_prepared:
            return False
        if self._is_done:
            return True
        if self._is_unchecked:
            self._is_unchecked = False
            if any(
                isinstance(getattr(hook, "__self__", None), Replica) for hook in wrapper._forward_pre_hooks.values()
            ):
                self._is_prepared = True  # its engine handles this
                self.release()
                return False
        self._update_reduced()
        if self._late and (names := self._unaveraged_names()):
            self._is_done = True
            self.release()
            more = f" and {len(names) - 3} others" if len(names) > 3 else ""
            warn(
                _(
                    "this step uses {name} gradients that were not averaged across ranks, so the weights diverge "
                    "between ranks: {names}{more} became trainable after DistributedDataParallel was built. Wrap the "
                    "model again after such a change: model = DistributedDataParallel(model.module)",
                    name=type(wrapper.module).__name__,
                    names=", ".join(names[:3]),
                    more=more,
                )
            )
            return True
        if not self._is_dirty or self._passes.may_be_reduced_by_hand():
            return True
        self._is_done = True
        self.release()
        warn(
            _(
                "this step uses {name} gradients that were not averaged across ranks, so the weights diverge between "
                "ranks. The last backward pass ran inside no_sync(), followed a forward pass through the unwrapped "
                "module, or was the second one after a single forward pass. Call the DistributedDataParallel object, "
                "and run the last forward and backward pass before step() outside no_sync()",
                name=type(wrapper.module).__name__,
            )
        )
        return True

    def _unaveraged_names(self) -> list[str]:
        """Return the names of late-added parameters whose gradients, computed since the last step, have not been averaged
        across ranks. Resets their counts.
        """
        names = [name for name, last in self._late.items() if last.count.is_any and not last.may_be_reduced_by_hand()]
        for last in self._late.values():
            last.count.reset()
        return names

    def _update_reduced(self) -> None:
        passes = self._passes.count
        if passes.is_any:
            self._is_dirty = passes.are_unreduced(self._will_reduce, is_compiled=self._is_compiled)
            passes.reset()
            self._will_reduce = False


class _BufferSyncCounter(_ModelHook):
    """Excludes DDP's buffer broadcasts before a forward pass from the collectives that may combine evaluation results."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._before: int | None = None
        # Runs before the module's other hooks, because a hook of the user's may share a result.
        before_module = wrapper.module.register_forward_pre_hook(self, prepend=True)
        self._handles = [wrapper.register_forward_pre_hook(self), before_module]

    def __call__(self, module: Any, inputs: Any) -> None:
        """Record a forward pass through DDP or its module."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if module is self._wrapper():
            self._before = num_collectives_of_all_groups()
        elif self._before is not None:
            METRICS.ignore((num_collectives_of_all_groups() or 0) - self._before)
            self._before = None


class _NoHook:
    """Replaces a hook in a copied or unpickled model."""

    def __call__(self, _wrapper: Any, _inputs: Any) -> None:
        """Do nothing."""


class _LastPass:
    """Parameter hook that counts backward passes and detects whether the last gradients were changed afterwards.

    It must not reference the model (see ``BackwardPasses``).
    """

    __slots__ = ("_before", "_collectives", "_keeps", "_of", "count")

    def __init__(self, *, keeps: bool = False) -> None:
        self.count = BackwardPasses()
        self._collectives: int | None = None
        self._keeps = keeps
        self._of: weakref.ref[torch.Tensor] | None = None
        self._before: torch.Tensor | None = None

    @uncompiled
    def __call__(self, parameter: torch.Tensor) -> None:
        if not self.count.count_current():
            return
        self._collectives = num_collectives()
        if self._keeps and parameter.grad is not None and not parameter.grad.is_sparse:
            self._of, self._before = weakref.ref(parameter), parameter.grad.detach().clone()

    def may_be_reduced_by_hand(self) -> bool:
        """Return whether the user's own collectives may have averaged the last backward pass's gradients.

        A collective that reduces a logged loss counts, too. After the first such collective, the first gradient of each
        backward pass is kept until the step. A gradient that is unchanged, clipped by value, or scaled
        (clipped by norm, or divided) has not been averaged.
        """
        if self._collectives is not None and self._collectives == num_collectives():
            return False
        self._keeps = True
        parameter = None if self._of is None else self._of()
        before, self._before = self._before, None
        if parameter is None or before is None or parameter.grad is None or before.numel() < _MIN_VALUES:
            return True
        a, b = before.double().flatten(), parameter.grad.detach().double().flatten()
        limit = b.abs().max()
        if torch.equal(a.clamp(-limit, limit), b):  # clipped by value
            return False
        similarity = torch.nn.functional.cosine_similarity(a, b, dim=0).abs().item()  # synchronizes, but rarely runs
        return not similarity > 1 - 1e-9


_MIN_VALUES = 4  # with fewer values an average over ranks may be a multiple of one rank's gradient by chance
