"""``torch.compile`` of models, whole or by their repeated blocks (each kind of block is then compiled once)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.compat.enums import DynamoBackend
from echelon.precision.policy import rebind_forward

__all__ = [
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "compile_whole",
    "compiles",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled",
    "is_compiled_module",
    "is_repeated_blocks",
    "moved_to",
    "uncompiled",
]


def is_compiled_module(module: object) -> bool:
    """Tell whether ``torch.compile`` made it."""
    # Its import takes a second, and without it nothing is compiled.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` made one of its submodules (or itself)."""
    return any(is_compiled_module(submodule) for submodule in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether it is a ``ModuleList`` of modules of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(m, type(module[0])) for m in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether a submodule (or itself) is a list of repeated blocks."""
    return any(is_repeated_blocks(submodule) for submodule in module.modules())


def compiles(plugin: TorchDynamoPlugin, module: nn.Module, *, by_regions: bool) -> bool:
    """Tell whether ``plugin`` asks for compiling ``module``, by its repeated blocks or whole; what is compiled stays so."""
    if plugin.backend is DynamoBackend.NO or is_compiled(module):
        return False
    return by_regions is (bool(plugin.use_regional_compilation) and has_repeated_blocks(module))


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile``, ``compile_regions`` or its own ``compile()`` has compiled ``module``."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compile_whole(module: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Return ``module`` compiled; nothing happens before it is called."""
    return _compiled(module, plugin.to_kwargs())


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` or ``compile_regions`` was given; ``module``, where it was neither."""
    holder: Mapping[str, Any] = module._modules if is_compiled_module(module) else module.__dict__
    inner: nn.Module = holder.get("_orig_mod", module)
    return inner


def moved_to(module: nn.Module, compiled: Any) -> nn.Module:
    """Return ``module`` compiled as ``compiled`` is, which stays as it is."""
    moved: nn.Module = type(compiled)(module, compiled.dynamo_ctx)  # as its own __reduce__ does
    return moved


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of ``module`` on the same parameters whose repeated blocks are compiled, each by itself.

    What has no repeated blocks is compiled whole. The original is the attribute ``_orig_mod`` of the copy.
    """
    compiled = _compile_regions(module, compile_kwargs)
    compiled.__dict__.setdefault("_orig_mod", module)
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of ``module`` in place, and the rest as a whole where there are none."""
    if is_repeated_blocks(module):
        regions = list(module.children())
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_fsdp2(child, **compile_kwargs)
        return module
    else:
        regions = [module]
    for region in regions:
        region.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of ``module`` in place; returns nothing."""
    compile_regions_fsdp2(module, **compile_kwargs)


def _compile_regions(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        return nn.ModuleList([_compiled(block, options) for block in module.children()])
    if not has_repeated_blocks(module):
        return _compiled(module, options)
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    # Methods that were set on the object (a forward in mixed precision) must run on the copy.
    for name, value in list(copied.__dict__.items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            copied.__dict__[name] = MethodType(value.__func__, copied)
    rebind_forward(copied, original=module)
    copied._modules = {}
    for name, child in module.named_children():
        copied.add_module(name, _compile_regions(child, options))
    return copied


def _compiled(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    compiled: Any = torch.compile(module, **options)
    assert isinstance(compiled, nn.Module), compiled
    return compiled
