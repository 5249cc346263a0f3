"""Hooks that torch calls for every optimizer and every module of the process, for as long as their owner lives."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer, optimizer as torch_optimizer

__all__ = ["Closure", "is_in_backward", "watch_module_changes", "watch_optimizer_steps"]

Closure = Callable[[], Any]
Owner = TypeVar("Owner")


def watch_optimizer_steps(
    owner: Owner, before_step: Callable[[Owner, Optimizer, Closure | None], Closure | None]
) -> Callable[[], object]:
    """Call ``before_step(owner, optimizer, closure)`` before each optimizer step in this process.

    It sees every subclass of ``torch.optim.Optimizer``, also one inside another optimizer. What it returns is the closure
    that the step gets; None: the one that it has.

    Args:
        owner: held weakly; the hook is removed when it dies.
        before_step: must not hold ``owner``: a function of its class.

    Returns:
        A function that removes the hook now.

    Source: torch.optim.optimizer.register_optimizer_step_pre_hook.
    """
    _remove_dead_hooks(torch_optimizer._global_optimizer_pre_hooks)
    handle = torch_optimizer.register_optimizer_step_pre_hook(_StepHook(owner, before_step))
    return _remove_with(owner, torch_optimizer, handle)


def watch_module_changes(owner: Owner, on_change: Callable[[Owner, nn.Module], None]) -> None:
    """Call ``on_change(owner, module)`` when a parameter or a module is about to be set on any ``module`` of this process.

    What is deleted, or written into ``_parameters`` and ``_modules`` past torch, is not seen.

    Args:
        owner: held weakly; the hooks are removed when it dies.
        on_change: must not hold ``owner``: a function of its class.

    Source: torch.nn.modules.module.register_module_parameter_registration_hook.
    """
    hook = _ModuleHook(owner, on_change)
    for hooks in (torch_module._global_parameter_registration_hooks, torch_module._global_module_registration_hooks):
        _remove_dead_hooks(hooks)
    for register in (
        torch_module.register_module_parameter_registration_hook,
        torch_module.register_module_module_registration_hook,
    ):
        _remove_with(owner, torch_module, register(hook))


def is_in_backward() -> bool:
    """Tell whether this thread is inside a backward pass of autograd (in a hook of a parameter, say)."""
    return torch._C._current_graph_task_id() != -1


class _Hook(Generic[Owner]):
    __slots__ = ("_function", "_owner")

    def __init__(self, owner: Owner, function: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self._function = function

    @property
    def is_dead(self) -> bool:
        """Has the owner died?"""
        return self._owner() is None


class _StepHook(_Hook[Owner]):
    __slots__ = ()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the graph of a compiled step is cut here
            return _look_uncompiled(self, optimizer, args, kwargs)
        return self.look(optimizer, args, kwargs)

    def look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Show the step to the owner; return its arguments where they change."""
        owner = self._owner()
        if owner is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        instead = self._function(owner, optimizer, closure)
        if instead is None:
            return None
        if len(args) > 1:
            return (args[0], instead, *args[2:]), kwargs
        return args, {**kwargs, "closure": instead}


@torch._disable_dynamo
def _look_uncompiled(hook: _StepHook[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    return hook.look(optimizer, args, kwargs)


class _ModuleHook(_Hook[Owner]):
    __slots__ = ()

    def __call__(self, module: nn.Module, _name: str, _value: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, module)


def _remove_with(owner: object, caller: ModuleType, handle: Any) -> Callable[[], object]:
    """Remove the hook of ``handle`` when ``owner`` dies."""
    removal = weakref.finalize(owner, _remove, str(caller.__file__), handle)
    removal.atexit = False
    return removal


def _remove(caller: str, handle: Any) -> None:
    """Remove a hook, unless torch is in the middle of calling all of them: garbage is collected at any place.

    What stays does nothing, and the next one that is registered clears it away.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == caller and not {"hook", "pre_hook"}.isdisjoint(frame.f_locals):
            return
        frame = frame.f_back
    handle.remove()


def _remove_dead_hooks(hooks: Any) -> None:
    dead = [key for key, hook in hooks.items() if isinstance(hook, _Hook) and hook.is_dead]
    for key in dead:
        del hooks[key]
