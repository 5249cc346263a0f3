"""Quantized weights of bitsandbytes and torchao: codes that must not be cast, averaged or trained.

A 4-bit layer of bitsandbytes keeps its codes in ``weight``, and their scales (``QuantState``) beside it: saved under names such as
``weight.absmax``, which its ``load_state_dict`` does not accept. A quantized parameter of torchao is a tensor subclass that
wraps several tensors, which most operations and collectives do not accept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.base.sharded import is_dtensor

_PACKED = ".quant_state.bitsandbytes__"


def wrapped_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors inside a frozen tensor subclass (torchao's quantized weights), by name; {} for other tensors."""
    if tensor.requires_grad or is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    kind, (names, _) = type(tensor).__name__, tensor.__tensor_flatten__()
    return {f"{kind}.{name}": getattr(tensor, name) for name in names}


def plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of ``model``, and in place of a quantized weight of torchao the tensors that it wraps."""
    for tensor in [*model.parameters(), *model.buffers()]:
        yield from wrapped_tensors(tensor).values() or [tensor]


def unshardable_parameters(model: nn.Module, param_dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
    """Return the quantized parameters that ``fully_shard`` would damage or cannot divide, by name.

    4-bit layers can be sharded unless ``fully_shard`` would cast their codes to ``param_dtype``, which it does if they are
    stored in another floating-point dtype (``bnb_4bit_quant_storage``). All other quantized weights need their own class.
    """
    whole = {
        name: parameter
        for name, parameter in model.named_parameters()
        if wrapped_tensors(parameter) or _is_a(parameter, "Params4bit", "Int8Params")
    }
    for prefix, layer in bitsandbytes_layers(model, "Linear4bit"):
        weight = layer.weight
        is_cast = weight.is_floating_point() and param_dtype not in (None, weight.dtype)
        if not is_cast:
            whole.pop(f"{prefix}weight", None)
    return whole


def require_scales(model: nn.Module) -> None:
    """Raise UsageError if 4-bit weights have no values: their scales cannot be sent from rank zero."""
    for prefix, layer in bitsandbytes_layers(model, "Linear4bit"):
        if layer.weight.is_meta:
            raise UsageError(
                f"{prefix}weight of {type(model).__name__} is quantized and on the meta device, without its scales",
                where="prepare()",
                do="load the quantized model with its values on every rank (from_pretrained without cpu_ram_efficient_loading)",
            )


def add_scales(model: nn.Module, state: dict[str, Any]) -> None:
    """Add to a state dict the scales that bitsandbytes leaves out because ``fully_shard`` has replaced its parameters."""
    for prefix, layer in bitsandbytes_layers(model, "Linear4bit"):
        if f"{prefix}weight" in state and layer.quant_state is not None:
            for key, value in layer.quant_state.as_dict(packed=True).items():
                state.setdefault(f"{prefix}weight.{key}", value)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the tensors that quantized weights wrap in place of these weights.

    What bitsandbytes packs into a tensor, as JSON of any length, becomes text: a checkpoint's tensors have the model's shapes.
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        inner = wrapped_tensors(value) if isinstance(value, torch.Tensor) else {}
        if _PACKED in name:
            flat[name] = bytes(value.tolist()).decode()
        else:
            flat |= {f"{name}.{key}": tensor for key, tensor in inner.items()} or {name: value}
    return flat


def load_quantized(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Load the scales and wrapped tensors in ``state`` into ``model``; return what its ``load_state_dict`` accepts."""
    left = dict(state)
    for prefix, layer in bitsandbytes_layers(model, "Linear4bit"):
        start = f"{prefix}weight."
        scales = {key.removeprefix(start): left.pop(key) for key in list(left) if key.startswith(start)}
        scales = {
            key: torch.tensor(list(value.encode()), dtype=torch.uint8) if isinstance(value, str) else value
            for key, value in scales.items()
        }
        if scales:
            loaded = type(layer.quant_state).from_dict(scales, device=layer.weight.device)
            layer.quant_state = loaded
            if not is_dtensor(layer.weight):
                layer.weight.quant_state = loaded
    for prefix, layer in bitsandbytes_layers(model, "Linear8bitLt"):
        scales = left.pop(f"{prefix}SCB", None)
        left.pop(f"{prefix}weight_format", None)
        if scales is not None:  # they move from the weight to the layer in the first forward pass
            (layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB).copy_(scales)
    for name, own in model.state_dict().items():
        inner = wrapped_tensors(own) if isinstance(own, torch.Tensor) else {}
        values = {key: left.pop(f"{name}.{key}") for key in inner if f"{name}.{key}" in left}
        for key, value in values.items():
            inner[key].copy_(value)
        if values:
            left[name] = own
    return left


def bitsandbytes_layers(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the layers of bitsandbytes' class ``kind`` in ``model``, with the prefix of their tensors' names."""
    library = sys.modules.get("bitsandbytes")
    if library is not None:
        cls = getattr(library.nn, kind)
        for name, layer in model.named_modules():
            if isinstance(layer, cls):
                yield f"{name}." if name else "", layer


def _is_a(parameter: nn.Parameter, *names: str) -> bool:
    library = sys.modules.get("bitsandbytes")
    return library is not None and isinstance(parameter, tuple(getattr(library.nn, name) for name in names))
