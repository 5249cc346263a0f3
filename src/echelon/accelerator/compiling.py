"""``torch.compile`` of a model's repeated blocks, one by one: each kind of block is compiled once."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

__all__ = [
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_repeated_blocks",
]


def is_compiled_module(module: object) -> bool:
    """Tell whether ``torch.compile`` made it."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` made one of its submodules (or itself)."""
    return any(is_compiled_module(submodule) for submodule in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether it is a ``ModuleList`` of modules of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(m, type(module[0])) for m in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Tell whether a submodule (or itself) is a list of repeated blocks."""
    return any(is_repeated_blocks(submodule) for submodule in module.modules())


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
    copied._modules = {}
    for name, child in module.named_children():
        copied.add_module(name, _compile_regions(child, options))
    return copied


def _compiled(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    compiled: Any = torch.compile(module, **options)
    assert isinstance(compiled, nn.Module), compiled
    return compiled
