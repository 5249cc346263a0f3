"""Global torch hooks on all optimizers and modules in this process, each removed when its owner is freed."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer, optimizer as torch_optimizer

from echelon.distributed.uncompiled import uncompiled

Closure = Callable[[], Any]
Owner = TypeVar("Owner")


def watch_optimizer_steps(
    owner: Owner, before_step: Callable[[Owner, Optimizer, Closure | None], Closure | None]
) -> Callable[[], object]:
    """Call ``before_step(owner, optimizer, closure)`` before each optimizer step in this process.

    It sees all subclasses of ``torch.optim.Optimizer``, including an optimizer inside another one.

    Args:
        owner: the object the hook belongs to; it is held weakly, and the hook is removed when it is freed.
        before_step: function that returns a new closure, or None to keep the old one. It must not reference ``owner``, so pass
            a function defined in its class, not a bound method.

    Returns:
        A function that removes the hook.

    Source: torch.optim.optimizer.register_optimizer_step_pre_hook.
    """
    _remove_dead_hooks(torch_optimizer._global_optimizer_pre_hooks)
    handle = torch_optimizer.register_optimizer_step_pre_hook(_StepHook(owner, before_step))
    return _remove_with(owner, torch_optimizer, handle)


def owners_of_step_hooks(kind: type[Owner]) -> list[Owner]:
    """Return the owners of class ``kind`` that currently watch optimizer steps."""
    hooks: Iterable[object] = torch_optimizer._global_optimizer_pre_hooks.values()
    owners = [hook.owner for hook in hooks if isinstance(hook, _Hook)]
    return [owner for owner in owners if isinstance(owner, kind)]


def watch_module_changes(owner: Owner, on_change: Callable[[Owner, nn.Module], None]) -> None:
    """Call ``on_change(owner, module)`` before a parameter or submodule is set on any ``module`` in this process.

    It does not see deletions or entries that are written directly to ``_parameters`` or ``_modules``.

    Args:
        owner: the object the hooks belong to; it is held weakly, and the hooks are removed when it is freed.
        on_change: function that must not reference ``owner``, so pass one defined in its class, not a bound method.

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


def watch_calls(
    owner: Owner, kind: type, method: str, after_call: Callable[[Owner, Any, Any], None]
) -> Callable[[], object]:
    """Call ``after_call(owner, self, result)`` after each call of a method of the class ``kind`` in this process.

    Args:
        owner: the object the hook belongs to; it is held weakly, and the hook is removed when it is freed.
        after_call: function that must not reference ``owner``, so pass one defined in its class, not a bound method.

    Returns:
        A function that removes the hook.
    """
    watched = getattr(getattr(kind, method), "watched_method", None) or _WatchedMethod(kind, method)
    hook = _Hook(owner, after_call)
    watched.add(hook)
    removal = weakref.finalize(owner, watched.remove, hook)
    removal.atexit = False
    return removal


class _WatchedMethod:
    """A method of a class that calls hooks; while there are none, the class has its own method."""

    def __init__(self, kind: type, method: str) -> None:
        self._kind, self._method = kind, method
        self._plain: Any = getattr(kind, method)
        self._hooks: list[_Hook[Any]] = []

        @functools.wraps(self._plain)
        def watched(of: Any, *args: Any, **kwargs: Any) -> Any:
            result = self._plain(of, *args, **kwargs)
            for hook in list(self._hooks):
                hook.call(of, result)
            return result

        watched.watched_method = self  # type: ignore[attr-defined]
        self._replacement = watched

    def add(self, hook: _Hook[Any]) -> None:
        if getattr(self._kind, self._method) is self._plain:
            setattr(self._kind, self._method, self._replacement)
        self._hooks.append(hook)

    def remove(self, hook: _Hook[Any]) -> None:
        if hook in self._hooks:
            self._hooks.remove(hook)
        if not self._hooks and getattr(self._kind, self._method) is self._replacement:
            setattr(self._kind, self._method, self._plain)


def is_in_backward() -> bool:
    """Return whether this thread is inside an autograd backward pass (for example, in a parameter hook)."""
    return torch._C._current_graph_task_id() != -1


class _Hook(Generic[Owner]):
    __slots__ = ("_function", "_owner")

    def __init__(self, owner: Owner, function: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self._function = function

    @property
    def owner(self) -> Owner | None:
        """The owner, or None if it was freed."""
        return self._owner()

    def call(self, *args: Any) -> None:
        """Call the owner's function, unless the owner was freed."""
        owner = self._owner()
        if owner is not None:
            self._function(owner, *args)


class _StepHook(_Hook[Owner]):
    __slots__ = ()

    @uncompiled
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Call the owner's function; return the step's new arguments, or None to keep the old ones."""
        owner = self._owner()
        if owner is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        replacement = self._function(owner, optimizer, closure)
        return None if replacement is None else _with_closure(replacement, args, kwargs)


def _with_closure(closure: Closure, args: Any, kwargs: Any) -> Any:
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


class _ModuleHook(_Hook[Owner]):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, _name: str, _value: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, module)


def _remove_with(owner: object, caller: ModuleType, handle: Any) -> Callable[[], object]:
    """Remove the hook with ``handle`` when ``owner`` is freed; return a function that removes it earlier."""
    removal = weakref.finalize(owner, _remove, str(caller.__file__), handle)
    removal.atexit = False
    return removal


def _remove(caller: str, handle: Any) -> None:
    """Remove a hook, unless torch is currently iterating over its hooks (the garbage collector may run at that time).

    A hook that remains does nothing, and the next registration removes it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == caller and not {"hook", "pre_hook"}.isdisjoint(frame.f_locals):
            return
        frame = frame.f_back
    handle.remove()


def _remove_dead_hooks(hooks: Any) -> None:
    dead = [key for key, hook in hooks.items() if isinstance(hook, _Hook) and hook.owner is None]
    for key in dead:
        del hooks[key]
