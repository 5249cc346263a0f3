"""Compiles models with ``torch.compile``, as a whole or by repeated blocks (each kind of block is compiled once)."""

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


def is_compiled_module(module: object) -> bool:
    """Return whether ``module`` was created by ``torch.compile``."""
    # Importing dynamo takes a second, and if it is not imported, nothing is compiled.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` created the module or a submodule."""
    return any(is_compiled_module(submodule) for submodule in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``ModuleList`` of modules of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(m, type(module[0])) for m in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether the module or a submodule is a list of repeated blocks."""
    return any(is_repeated_blocks(submodule) for submodule in module.modules())


def compiles(plugin: TorchDynamoPlugin, module: nn.Module, *, by_regions: bool) -> bool:
    """Return whether ``plugin`` compiles ``module``, by repeated blocks or as a whole; compiled modules are not recompiled."""
    if plugin.backend is DynamoBackend.NO or is_compiled(module):
        return False
    return by_regions is (bool(plugin.use_regional_compilation) and has_repeated_blocks(module))


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` was compiled with ``torch.compile``, ``compile_regions`` or ``module.compile()``."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compile_whole(module: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Return ``module`` wrapped by ``torch.compile``; it is compiled on its first call."""
    return _compiled(module, plugin.to_kwargs())


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module passed to ``torch.compile`` or ``compile_regions``, or ``module`` itself if it is not compiled."""
    holder: Mapping[str, Any] = module._modules if is_compiled_module(module) else module.__dict__
    inner: nn.Module = holder.get("_orig_mod", module)
    return inner


def moved_to(module: nn.Module, compiled: Any) -> nn.Module:
    """Return ``module`` compiled with the options that ``compiled`` was compiled with; ``compiled`` is not changed."""
    moved: nn.Module = type(compiled)(module, compiled.dynamo_ctx)  # same as its __reduce__
    return moved


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of ``module`` that shares its parameters and whose repeated blocks are compiled separately.

    A module without repeated blocks is compiled as a whole. The copy's ``_orig_mod`` attribute is the original.
    """
    compiled = _compile_regions(module, compile_kwargs)
    compiled.__dict__.setdefault("_orig_mod", module)
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of ``module`` in place; parts without such blocks are compiled as a whole."""
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
    """Compile the repeated blocks of ``module`` in place."""
    compile_regions_fsdp2(module, **compile_kwargs)


def _compile_regions(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        return nn.ModuleList([_compiled(block, options) for block in module.children()])
    if not has_repeated_blocks(module):
        return _compiled(module, options)
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    # Methods set on the instance (a forward in mixed precision) must run on the copy.
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
