"""Hooks that run around a module's forward pass by replacing its ``forward``."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import fx, nn

from echelon.distributed.uncompiled import uncompiled

# Methods that dispatch_model replaces in the instance.
MOVING_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")


class ModelHook:
    """Base class of hooks for ``add_hook_to_module``; subclasses may override any method."""

    no_grad = False
    """Whether the forward pass runs without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare ``module`` when the hook is attached, and return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward pass, and return its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward pass, and return its output."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore ``module`` when the hook is removed, and return it."""
        return module


class SequentialHook(ModelHook):
    """Runs several hooks in the given order, both before and after the forward pass."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @uncompiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @uncompiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hook_of(module: nn.Module) -> Any:
    """Return the hook attached to ``module``, or None."""
    return vars(module).get("_hf_hook")


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach ``hook`` to ``module``, whose ``forward`` then calls it, and return the module.

    Args:
        module: the module. Other libraries find the hook in ``module._hf_hook``.
        append: run the hook after the existing hook. False: replace the existing hook.
    """
    present = hook_of(module)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    hooked: Any = module
    if "_old_forward" not in vars(module) or present is None:
        hooked._old_forward = hooked.forward
    hooked = hook.init_hook(module)
    hooked._hf_hook = hook
    forward = functools.partial(_forward_with_hook, hooked)
    _set_forward(hooked, functools.update_wrapper(forward, hooked._old_forward))
    return module if hooked is module else cast(nn.Module, hooked)


def _forward_with_hook(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def _set_forward(module: Any, forward: Any) -> None:
    # torch.fx recompiles the forward of a graph as an attribute of its class, which each module has for itself.
    owner = type(module) if isinstance(module, fx.GraphModule) else module
    owner.forward = forward


def _restore_forward(module: Any) -> None:
    old = module._old_forward
    del module._old_forward
    function = getattr(old, "__func__", None)
    if isinstance(module, fx.GraphModule):
        _set_forward(module, old if function is None else function)
    elif function is not None and function is getattr(type(module), "forward", None) and old.__self__ is module:
        del module.forward  # the method of the class is found again
    else:
        module.forward = old


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook from ``module``, restore its ``forward``, and return the module.

    Args:
        recurse: also remove hooks from its submodules.
    """
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
    if "_hf_hook" in vars(module):
        del module._hf_hook
    if "_old_forward" in vars(module):
        _restore_forward(module)
    for name in MOVING_METHODS:
        vars(module).pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from ``module`` and all submodules."""
    remove_hook_from_module(module, recurse=True)
