"""State dicts with plain parameter names, which lack the prefix that ``torch.compile`` adds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.engines.quantized_weights import add_scales, flat_state, load_quantized

_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """Return ``name`` without the prefixes that ``torch.compile`` adds."""
    return name.replace(_COMPILED, "")


def plain_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` with their plain names."""
    return [(plain_name(name), parameter) for name, parameter in module.named_parameters()]


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``module`` with plain names."""
    state = module.state_dict()
    add_scales(module, state)
    if not any(_COMPILED in name for name in state):
        return state
    plain = OrderedDict((plain_name(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", {})  # format versions, by module
    plain._metadata = {plain_name(f"{name}.")[:-1]: value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return plain


def load_plain_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the result of ``plain_state_dict``, no matter which parts of ``module`` are compiled."""
    own_state = module.state_dict()
    add_scales(module, own_state)
    own = {plain_name(name): name for name in flat_state(own_state)}
    is_plain = all(name == plain for plain, name in own.items())
    renamed = state if is_plain else {own.get(name, name): value for name, value in state.items()}
    module.load_state_dict(load_quantized(module, renamed), strict=strict)
