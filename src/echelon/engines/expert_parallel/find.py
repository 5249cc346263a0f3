"""Finds the experts and routers of a model."""

from __future__ import annotations

import inspect

from torch import nn

__all__ = ["find_experts", "find_routers"]

_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold stacked experts, by name.

    These are ``StackedExperts`` and what transformers (5 or newer) has in Mixtral, Qwen2-MoE, Qwen3-MoE and others: modules with
    ``num_experts`` whose parameters have the experts in their first dimension, and whose ``forward`` takes ``hidden_states``,
    ``top_k_index`` and ``top_k_weights``.
    """
    found = {}
    for name, module in model.named_modules():
        num = getattr(module, "num_experts", None)
        own = list(module.parameters(recurse=False))
        if not isinstance(num, int) or not own or any(p.dim() < 2 or p.shape[0] != num for p in own):
            continue
        if tuple(inspect.signature(type(module).forward).parameters)[1:4] == _INPUTS:
            found[name] = module
    return found


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with ``top_k`` beside the experts, by name. They return logits, weights and indices of the chosen experts."""
    blocks = [name.rpartition(".")[0] for name in find_experts(model)]
    return {
        f"{block}.{name}".lstrip("."): module
        for block in blocks
        for name, module in model.get_submodule(block).named_children()
        if hasattr(module, "top_k")
    }
